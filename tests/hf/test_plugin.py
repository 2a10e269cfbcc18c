"""The plug-in on experts modules alone: every class of the interface, its flags, and what is refused."""

import copy
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from guide_code import hf_flags
from guide_code.hf_plugin import explain, guide_experts, register
from guide_code.testing.contract import relative_rms

transformers = pytest.importorskip("transformers")
moe = importlib.import_module("transformers.integrations.moe")

MODELS = Path(transformers.__file__).parent / "models"
T, E, K = 23, 5, 2


def decorated_classes():
    """(model, class) of every experts class of the installed transformers that takes part in the interface."""
    pattern = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
    paths = sorted(MODELS.glob("*/modeling_*.py"))
    return [(path.parent.name, name) for path in paths for name in pattern.findall(path.read_text("utf-8"))]


def make_experts(model, class_name, *, hidden_size=12, intermediate_size=6, act="silu"):
    """Experts with random parameters, from a configuration that knows every name that models give their sizes."""
    sizes = {
        "num_experts num_local_experts n_routed_experts moe_num_experts": E,
        "hidden_size moe_hidden_size": hidden_size,
        "intermediate_size moe_intermediate_size": intermediate_size,
        "hidden_act mlp_hidden_act hidden_activation": act,
        "swiglu_limit swiglu_alpha mlp_gate_softcap mlp_up_softcap": 0.7,
        "_experts_implementation": "eager",
        "moe_latent_size": None,
        "post_norm_eps": 1e-5,
    }
    config = SimpleNamespace(**{name: value for names, value in sizes.items() for name in names.split()})
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    experts = getattr(module, class_name)(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts


def mixtral(**options):
    return make_experts("mixtral", "MixtralExperts", **options)


def gpt_oss(*, alpha=1.702, limit=7.0, **options):
    experts = make_experts("gpt_oss", "GptOssExperts", **options)
    experts.alpha, experts.limit = alpha, limit
    return experts


def one_experts_module(experts):
    """What ``explain`` says about it once it runs "guide"."""
    register()
    experts.config._experts_implementation = "guide"
    ((_, text),) = explain(nn.ModuleDict({"experts": experts})).items()
    return text


def inputs(experts, dtype=torch.float32):
    width = experts.down_proj.shape[1 if not experts.is_transposed else 2]
    ids_TK = torch.rand(T, E).argsort(dim=1)[:, :K]
    return torch.randn(T, width, dtype=dtype), ids_TK, torch.rand(T, K) + 0.1


def run(experts, implementation, x_TD, ids_TK, weights_TK, cotangent_TD=None):
    """Output and every gradient."""
    register()
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    x, weights = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    out_TD = experts(x, ids_TK, weights)
    out_TD.backward(torch.ones_like(out_TD) if cotangent_TD is None else cotangent_TD)
    return [out_TD.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]


def assert_equal_to_eager(experts, tolerance=1e-6):
    arguments = inputs(experts)
    cotangent_TD = torch.randn_like(arguments[0])
    expected = run(experts, "eager", *arguments, cotangent_TD)
    for actual, tensor in zip(run(experts, "guide", *arguments, cotangent_TD), expected, strict=True):
        assert tensor.norm() > 0 and relative_rms(actual, tensor) < tolerance


@pytest.mark.parametrize(("model", "class_name"), decorated_classes())
def test_every_class_that_takes_part_equals_eager(model, class_name):
    """Once at widths that F.grouped_mm takes and once at widths that it does not."""
    for hidden_size, intermediate_size in ((16, 8), (9, 5)):
        assert_equal_to_eager(
            make_experts(model, class_name, hidden_size=hidden_size, intermediate_size=intermediate_size)
        )


def test_the_flags_are_those_of_the_installed_interface():
    parameters = inspect.signature(moe.use_experts_implementation).parameters
    flags = {name: p.default for name, p in parameters.items() if name in hf_flags.FLAGS}
    assert flags == hf_flags.FLAGS
    assert parameters.keys() == {"experts_class", "experts_interface", *hf_flags.FLAGS}
    found = {flag for model, name in decorated_classes() for flag in set_flags(model, name)}
    assert found == {"is_transposed", "is_concatenated", "has_bias", "has_gate", "has_post_expert_norm"}, "the sweep"


def set_flags(model, class_name):
    experts = make_experts(model, class_name)
    return {name for name, default in hf_flags.FLAGS.items() if getattr(experts, name) != default}


@pytest.mark.parametrize("act", ["silu", "swish", "gelu", "gelu_python", "relu", "gelu_pytorch_tanh", "relu2", "tanh"])
def test_activations(act):
    names = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "relu": "relu"}
    experts = [mixtral(act=act), make_experts("nemotron_h", "NemotronHExperts", act=act)]
    for module in experts:
        assert_equal_to_eager(module)
        expected = f"grouped_experts, activation '{names.get(act)}'" if act in names else "generic_experts, for act_fn="
        assert one_experts_module(module).startswith(expected)


def test_activations_that_are_no_modules_of_transformers():
    experts = mixtral()
    known = {F.relu: "relu", nn.GELU(): "gelu", nn.GELU("tanh"): None, nn.ReLU(): "relu", torch.sigmoid: None}
    for act_fn, name in known.items():
        experts.act_fn = None  # a function may follow a module here
        del experts.act_fn
        experts.act_fn = act_fn
        assert hf_flags.activation(experts) == name
        assert_equal_to_eager(experts)


def test_the_gate_of_gpt_oss_is_known_only_with_its_own_constants():
    assert one_experts_module(gpt_oss()) == "grouped_experts, activation 'swigluoai'"
    generic = "generic_experts, for GptOssExperts._apply_gate"
    assert one_experts_module(gpt_oss(limit=5.0)) == one_experts_module(gpt_oss(alpha=1.0)) == generic
    for experts in (gpt_oss(), gpt_oss(limit=0.5), gpt_oss(alpha=1.0)):
        with torch.no_grad():
            experts.gate_up_proj *= 8  # so that the clamp at 7 acts
        assert_equal_to_eager(experts)


def test_a_gate_of_ones_own():
    experts = mixtral()
    experts._apply_gate = lambda hidden: hidden.chunk(2, dim=-1)[1] * 3
    arguments = inputs(experts)
    assert one_experts_module(experts) == "generic_experts, for MixtralExperts._apply_gate"
    assert relative_rms(run(experts, "guide", *arguments)[0], run(experts, "batched_mm", *arguments)[0]) < 1e-6


SENTINELS = {
    "grouped": mixtral,
    "transposed": gpt_oss,
    "generic": lambda: make_experts("muse_spark", "MuseSparkExperts"),
    "generic, biases": lambda: gpt_oss(limit=5.0),
}


@pytest.mark.parametrize("make", SENTINELS.values(), ids=SENTINELS)
def test_sentinels_contribute_nothing(make):
    """Ids past the last expert, as expert parallelism gives them. Here on tokens that hold NaN, and with weights."""
    experts = make()
    x_TD, ids_TK, weights_TK = inputs(experts)
    ids_TK[::3, 1], ids_TK[1], ids_TK[4] = E, torch.tensor([E, E + 7]), torch.tensor([-1, E])
    x_TD[1] = x_TD[4] = torch.nan
    cotangent_TD = torch.randn_like(x_TD)
    actual = run(experts, "guide", x_TD, ids_TK, weights_TK, cotangent_TD)
    inside_TK = (ids_TK >= 0) & (ids_TK < E)
    without = (x_TD.nan_to_num(), torch.where(inside_TK, ids_TK, 0), torch.where(inside_TK, weights_TK, 0.0))
    expected = run(experts, "eager", *without, cotangent_TD)
    expected[2] = torch.where(inside_TK, expected[2], 0.0)
    assert not actual[0][1].any() and not actual[1][4].any()
    for tensor, reference in zip(actual, expected, strict=True):
        assert relative_rms(tensor, reference) < 1e-6

    nothing = run(experts, "guide", x_TD, torch.full_like(ids_TK, E), weights_TK)
    assert all(tensor is not None and not tensor.any() for tensor in nothing)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_two_ranks_of_experts_add_up(make):
    """What transformers' AllReduceEP does: a rank's experts see the ids of all others as one past their own last."""
    experts = make()
    x_TD, ids_TK, weights_TK = inputs(experts)
    expected_TD, split, partial = run(experts, "eager", x_TD, ids_TK, weights_TK)[0], 2, []
    for first, last in ((0, split), (split, E)):
        local = make()
        for name, parameter in experts.named_parameters():
            setattr(local, name, nn.Parameter(parameter.detach()[first:last].clone()))
        local.num_experts, local._is_expert_parallel = last - first, True
        here_TK = (ids_TK >= first) & (ids_TK < last)
        local_ids_TK = torch.where(here_TK, ids_TK - first, last - first)
        partial.append(run(local, "guide", x_TD, local_ids_TK, torch.where(here_TK, weights_TK, 0.0))[0])
    assert relative_rms(sum(partial), expected_TD) < 1e-6


def test_widths_that_the_grouped_mm_of_transformers_refuses():
    """known_failures X-04."""
    for experts in (mixtral(hidden_size=9, intermediate_size=5), gpt_oss(hidden_size=9, intermediate_size=5)):
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            run(experts, "grouped_mm", *inputs(experts))
        assert_equal_to_eager(experts)


@pytest.mark.parametrize("make", SENTINELS.values(), ids=SENTINELS)
def test_autocast_and_narrow_types(make):
    experts = make()
    arguments = inputs(experts)
    expected_TD = run(experts, "eager", *arguments)[0]
    experts.config._experts_implementation = "guide"
    with torch.autocast("cpu", torch.bfloat16):
        out_TD = experts(*arguments)
    assert out_TD.dtype == torch.float32 and 1e-4 < relative_rms(out_TD, expected_TD) < 1.5e-2
    for dtype, tolerance in ((torch.bfloat16, 1.5e-2), (torch.float16, 2e-3)):
        narrow = run(copy.deepcopy(experts).to(dtype), "guide", arguments[0].to(dtype), *arguments[1:])
        assert {tensor.dtype for tensor in (narrow[0], narrow[1], *narrow[3:])} == {dtype}
        assert narrow[2].dtype == torch.float32
        assert 1e-5 < relative_rms(narrow[0], expected_TD) < tolerance


@pytest.mark.parametrize("make", SENTINELS.values(), ids=SENTINELS)
def test_same_bits_on_every_call(make):
    experts = make()
    arguments = inputs(experts)
    first, second = (run(experts, "guide", *arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class _Copies(TorchDispatchMode):
    """Names of operators that make a tensor of ``numel`` elements or more."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.found = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.numel:
                if tensor.untyped_storage().data_ptr() not in old:
                    self.found.append(func.name())
        return out


@pytest.mark.parametrize("make", [mixtral, gpt_oss, lambda **sizes: gpt_oss(limit=5.0, **sizes)])
def test_no_weight_is_copied(make):
    experts = make(hidden_size=64, intermediate_size=32)
    register()
    experts.config._experts_implementation = "guide"
    with torch.no_grad(), _Copies(64 * 32) as copies:
        experts(torch.randn(3, 64), torch.tensor([[0, 3], [1, 3], [3, 4]]), torch.rand(3, 2))
    assert not copies.found
    with _Copies(64 * 32) as copies:
        experts.gate_up_proj.detach().mT.contiguous()
    assert copies.found, "the probe sees nothing"


def test_interleaved_weights_with_a_gate_that_splits_in_halves_are_refused():
    experts = mixtral()
    experts.is_concatenated = False
    with pytest.raises(NotImplementedError, match=r"MixtralExperts has is_concatenated=False .*_apply_gate"):
        run(experts, "guide", *inputs(experts))
    assert one_experts_module(experts).startswith("refused: MixtralExperts has is_concatenated=False")
    experts.has_gate = False  # then nothing is split, and the flag means nothing
    assert not hf_flags.obstacle(SimpleNamespace(**vars(experts), up_proj=torch.zeros(1), down_proj=torch.zeros(1)))


def test_quantised_weights_are_refused():
    experts = mixtral()
    arguments = inputs(experts)
    for weight in (torch.zeros(E, 12, 6, dtype=torch.int8), torch.zeros(E, 12, 6).to(torch.float8_e4m3fn)):
        experts.down_proj = nn.Parameter(weight, requires_grad=False)
        kind = re.escape(str(weight.dtype))
        with pytest.raises(NotImplementedError, match=rf"MixtralExperts.down_proj is quantised \({kind}\)"):
            guide_experts(experts, *arguments)
    experts.gate_up_proj = None
    with pytest.raises(NotImplementedError, match=r"MixtralExperts.gate_up_proj is quantised \(NoneType\)"):
        guide_experts(experts, *arguments)


def test_a_flag_of_a_later_transformers_is_refused_where_it_is_set(monkeypatch):
    later = lambda experts_class=None, *, experts_interface=None, has_gate=True, is_striped=False: None
    monkeypatch.setattr(moe, "use_experts_implementation", later)
    experts = mixtral()
    assert_equal_to_eager(experts)
    experts.is_striped = True
    with pytest.raises(NotImplementedError, match="MixtralExperts has is_striped=True"):
        run(experts, "guide", *inputs(experts))


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_reading_the_flags_breaks_no_compiled_graph(make):
    experts = make()

    def read(x):
        return x + len(hf_flags.obstacle(experts)) + len(hf_flags.activation(experts))

    expected = float(len(hf_flags.activation(experts)))
    assert torch.compile(read, backend="eager", fullgraph=True)(torch.zeros(1)).item() == expected


def test_register_twice():
    register()
    before = dict(moe.ALL_EXPERTS_FUNCTIONS)
    register()
    assert dict(moe.ALL_EXPERTS_FUNCTIONS) == before and before["guide"] is guide_experts


def test_without_transformers_or_with_an_old_one(monkeypatch):
    monkeypatch.delattr(moe, "ExpertsInterface")
    with pytest.raises(ImportError, match=rf"transformers {transformers.__version__} has no experts interface"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'moe-guide\[hf\]'"):
        register()


def test_a_model_outside_the_interface_is_named():
    """transformers takes experts_implementation for such a model, and does nothing with it."""
    config = transformers.Llama4TextConfig(
        hidden_size=8, intermediate_size=8, intermediate_size_mlp=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, vocab_size=9, head_dim=4,
    )  # fmt: skip
    register()
    model = transformers.Llama4ForCausalLM._from_config(config, experts_implementation="guide")
    with pytest.raises(ValueError, match="Llama4ForCausalLM has no experts that take part"):
        explain(model)
