"""The routers of the installed transformers: ours choose the same experts with the same weights.

Only routers and MoE blocks are made, never a whole model. What we call a fault of transformers is pinned as its
behaviour, so that we notice when it changes.
"""

import importlib

import pytest
import torch
from torch import nn

from guide_code.balance import expert_counts
from guide_code.capacity import apply_capacity
from guide_code.experts.identity import IdentityExperts
from guide_code.experts.loop import LoopExperts
from guide_code.layers import FeedForward
from guide_code.moe import MoE
from guide_code.routers import HashRouter, TopKRouter, top_k_routing
from guide_code.testing.contract import relative_rms

transformers = pytest.importorskip("transformers")

D, E, K, T = 24, 12, 3, 300
PREFIXES = {"gpt_oss": "GptOss", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "deepseek_v4": "DeepseekV4"}
PREFIXES |= {"switch_transformers": "SwitchTransformers", "longcat_flash": "LongcatFlash"}


def theirs(family, name, **fields):
    """A router or block of transformers with a tiny config, every parameter and bias for choice at random."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    prefix = PREFIXES.get(family, family.title().replace("_", ""))
    config_name = f"{prefix}TextConfig" if family == "llama4" else f"{prefix}Config"
    config = getattr(transformers, config_name)(hidden_size=D, num_attention_heads=4, **fields)
    block = getattr(module, prefix + name)(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for buffer_name, buffer in block.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.3)
    return block


def ours(their, num_experts=E, top_k=K, **options):
    """Our router with the parameters and the bias of theirs."""
    expert_bias = getattr(their, "e_score_correction_bias", None)
    bias = getattr(their, "bias", None)
    router = TopKRouter(
        D, num_experts, top_k, bias=bias is not None, use_expert_bias=expert_bias is not None, **options
    )
    router.weight.data.copy_((their.classifier if hasattr(their, "classifier") else their).weight)
    if bias is not None:
        router.bias.data.copy_(bias)
    if expert_bias is not None:
        router.expert_bias.copy_(expert_bias)
    return router


def assert_same_routing(routing, their_weights, their_ids, *, scale=1.0):
    """Ids first, in any order within a token; tokens that differ are listed with how near a tie they were."""
    ids_TK, order_TK = routing.ids.sort(dim=1)
    their_ids_TK, their_order_TK = their_ids.sort(dim=1)
    gaps = {}
    for token in (ids_TK != their_ids_TK).any(dim=1).nonzero().flatten().tolist():
        scores_E = routing.scores[token]
        gaps[token] = (scores_E[ids_TK[token]].min() - scores_E[their_ids_TK[token]].min()).item()
    ties = sum(abs(gap) < 1e-6 for gap in gaps.values())
    assert not gaps, f"{len(gaps)} of {len(ids_TK)} tokens differ, {ties} by a tie; gaps between scores: {gaps}"
    weights_TK, their_weights_TK = routing.weights.gather(1, order_TK), their_weights.gather(1, their_order_TK)
    torch.testing.assert_close(weights_TK / scale, their_weights_TK.float() / scale, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("family", "fields", "options"),
    [
        ("mixtral", {"num_local_experts": E}, {}),
        ("qwen2_moe", {"num_experts": E}, {"norm_topk_prob": False}),
        ("qwen2_moe", {"num_experts": E, "norm_topk_prob": True}, {}),
        ("qwen3_moe", {"num_experts": E}, {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts": E, "norm_topk_prob": True}, {}),
        ("olmoe", {"num_experts": E}, {"norm_topk_prob": False}),
        ("olmoe", {"num_experts": E, "norm_topk_prob": True}, {}),
        ("gpt_oss", {"num_local_experts": E}, {}),
    ],
)
def test_softmax_routers(family, fields, options):
    """gpt-oss takes the softmax after the choice, and has a bias in its logits; the others before."""
    their = theirs(family, "TopKRouter", num_experts_per_tok=K, **fields)
    x_TD = 3 * torch.randn(T, D)
    logits_TE, weights_TK, ids_TK = their(x_TD)
    routing = ours(their, **options)(x_TD)
    assert (getattr(their, "bias", None) is not None) == (family == "gpt_oss")
    torch.testing.assert_close(routing.logits, logits_TE)
    assert_same_routing(routing, weights_TK, ids_TK)


@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "top_k_groups": 2}], ids=["greedy", "groups"])
def test_deepseek_v2_limits_groups_by_their_best_expert(groups):
    fields = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2} if groups else {}
    their = theirs(
        "deepseek_v2", "TopkRouter", num_experts_per_tok=K, n_routed_experts=E, routed_scaling_factor=16.0, **fields
    )
    x_TD = 3 * torch.randn(T, D)
    _, weights_TK, ids_TK = their(x_TD)
    options = {"norm_topk_prob": False, "routed_scaling_factor": 16.0, **groups}
    assert_same_routing(ours(their, group_score="max", **options)(x_TD), weights_TK, ids_TK, scale=16.0)
    if groups:
        other = ours(their, group_score="top2_sum", **options)(x_TD)
        assert (other.ids.sort(dim=1).values != ids_TK.sort(dim=1).values).any(), "the rule makes no difference here"


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("num_groups", "top_k_groups"), [(1, 1), (4, 2), (3, 2)])
def test_sigmoid_routers_with_bias_and_groups(family, norm_topk_prob, num_groups, top_k_groups):
    """The random bias makes many scores negative: with 0 in place of -inf, forbidden groups would win."""
    their = theirs(
        family, "TopkRouter", num_experts_per_tok=K, n_routed_experts=E, n_group=num_groups, topk_group=top_k_groups,
        norm_topk_prob=norm_topk_prob, routed_scaling_factor=2.5,
    )  # fmt: skip
    their.e_score_correction_bias -= 0.5
    x_TD = 3 * torch.randn(T, D)
    _, weights_TK, ids_TK = their(x_TD)
    options = {"score_fn": "sigmoid", "norm_topk_prob": norm_topk_prob, "routed_scaling_factor": 2.5}
    routing = ours(their, num_groups=num_groups, top_k_groups=top_k_groups, **options)(x_TD)
    assert ((routing.scores + their.e_score_correction_bias) < 0).float().mean() > 0.2
    assert_same_routing(routing, weights_TK, ids_TK, scale=2.5)


def test_deepseek_v4_by_score_and_by_hash():
    fields = {"num_experts_per_tok": K, "n_routed_experts": E, "vocab_size": 50, "num_hidden_layers": 2}
    options = {"score_fn": "sqrtsoftplus", "routed_scaling_factor": 1.5}
    their = theirs("deepseek_v4", "TopKRouter", **fields)
    x_TD, tokens_T = 3 * torch.randn(T, D), torch.randint(0, 50, (T,))
    _, weights_TK, ids_TK = their(x_TD)
    assert_same_routing(ours(their, **options)(x_TD), weights_TK, ids_TK, scale=1.5)

    their = theirs("deepseek_v4", "HashRouter", **fields)
    their.tid2eid.copy_(torch.rand(50, E).argsort(dim=1)[:, :K])
    _, weights_TK, ids_TK = their(x_TD, tokens_T)
    our = HashRouter(D, E, their.tid2eid, **options)
    our.weight.data.copy_(their.weight)
    assert_same_routing(our(x_TD, None, tokens_T), weights_TK, ids_TK, scale=1.5)


def stacked(experts, gate_up_proj, down_proj):
    """Our experts with stacked weights of transformers."""
    experts.gate_up_proj.data.copy_(gate_up_proj)
    experts.down_proj.data.copy_(down_proj)
    return experts


def test_mixtral_block():
    their = theirs("mixtral", "SparseMoeBlock", num_experts_per_tok=K, num_local_experts=E, intermediate_size=16)
    x_BSD = torch.randn(2, 50, D)
    our = MoE(ours(their.gate), stacked(LoopExperts(E, D, 16), their.experts.gate_up_proj, their.experts.down_proj))
    assert relative_rms(our(x_BSD).out, their(x_BSD)) < 2e-6


@pytest.mark.parametrize("top_k", [1, 3])
def test_llama4_weighs_the_inputs_of_its_experts(top_k):
    their = theirs("llama4", "TextMoe", num_experts_per_tok=top_k, num_local_experts=E, intermediate_size=16)
    router = ours(their.router, top_k=top_k, score_fn="sigmoid", norm_topk_prob=False)
    x_TD = torch.randn(T, D)
    their_scores_TE, logits_TE = their.router(x_TD)
    routing = router(x_TD)
    torch.testing.assert_close(routing.logits, logits_TE)
    assert torch.equal(their_scores_TE.gather(1, routing.ids), routing.weights)
    assert (their_scores_TE > 0).sum() == T * top_k

    projections = (their.experts.gate_up_proj.mT, their.experts.down_proj.mT)
    shared = FeedForward(D, 16)
    shared.gate_up_proj.weight.data.copy_(
        torch.cat([their.shared_expert.gate_proj.weight, their.shared_expert.up_proj.weight])
    )
    shared.down_proj.weight.data.copy_(their.shared_expert.down_proj.weight)
    our = MoE(router, stacked(LoopExperts(E, D, 16), *projections), shared, weight_on_input=True)
    x_BSD = x_TD.view(3, 100, D)
    out_BSD = their(x_BSD)[0].view_as(x_BSD)
    assert relative_rms(our(x_BSD).out, out_BSD) < 2e-6
    our.weight_on_input = False
    assert relative_rms(our(x_BSD).out, out_BSD) > 0.05


def test_longcat_block_with_zero_experts():
    Z = 5
    fields = {"n_routed_experts": E, "zero_expert_num": Z, "moe_topk": K, "expert_ffn_hidden_size": 16}
    their = theirs("longcat_flash", "MoE", routed_scaling_factor=6.0, **fields)
    router = ours(their.router, num_experts=E + Z, norm_topk_prob=False, routed_scaling_factor=6.0)
    x_BSD = 3 * torch.randn(3, 100, D)
    _, weights_TK, ids_TK = their.router(x_BSD)
    routing = router(x_BSD.flatten(0, 1))
    assert_same_routing(routing, weights_TK, ids_TK, scale=6.0)
    assert expert_counts(routing.ids, E + Z)[E:].min() > 0

    real = stacked(LoopExperts(E, D, 16), their.experts.gate_up_proj[:E], their.experts.down_proj)
    assert relative_rms(MoE(router, IdentityExperts(real, Z))(x_BSD).out, their(x_BSD)) < 2e-6


@pytest.mark.parametrize("bias", [False, True])
def test_switch_with_its_capacity_per_sequence(bias):
    B, S, capacity = 4, 60, 6
    their = theirs("switch_transformers", "Top1Router", num_experts=E, expert_capacity=capacity, router_bias=bias)
    x_BSD = 3 * torch.randn(B, S, D)
    mask_BSE, probs_BS1, logits_BSE = their.eval()(x_BSD)
    router = TopKRouter(D, E, 1, norm_topk_prob=False, bias=bias)
    router.weight.data.copy_(their.classifier.weight)
    if bias:
        router.bias.data.copy_(their.classifier.bias)
    routing = router(x_BSD.flatten(0, 1))
    torch.testing.assert_close(routing.logits, logits_BSE.flatten(0, 1))
    assert_same_routing(routing, probs_BS1.flatten(0, 1), logits_BSE.argmax(dim=-1).view(-1, 1))
    kept = apply_capacity(routing, capacity, group_size=S)
    dropped_T = kept.ids[:, 0] == E
    assert 10 < dropped_T.sum() < B * S - 10
    assert torch.equal(mask_BSE.flatten(0, 1).sum(dim=1) == 0, dropped_T)
    assert torch.equal(mask_BSE.flatten(0, 1).argmax(dim=1)[~dropped_T], kept.ids[~dropped_T, 0])


def test_its_fault_jitter_overwrites_the_input():
    """known_failures R-06. Switch: in float32 only, where ``.to(float32)`` copies nothing; Mixtral: always."""
    x_BSD = torch.randn(2, 5, D)
    router = theirs("switch_transformers", "Top1Router", num_experts=E, router_jitter_noise=0.1).train()
    for dtype, overwritten in ((torch.float32, True), (torch.bfloat16, False)):
        x = x_BSD.to(dtype).clone()
        router(x)
        assert torch.equal(x, x_BSD.to(dtype)) != overwritten
    block = theirs("mixtral", "SparseMoeBlock", num_local_experts=E, intermediate_size=16, router_jitter_noise=0.1)
    x = x_BSD.clone()
    block.train()(x)
    assert not torch.equal(x, x_BSD)

    our = TopKRouter(D, E, K, jitter=0.1)
    x = x_BSD.clone()
    our(x.flatten(0, 1))
    assert torch.equal(x, x_BSD)


def test_its_fault_padding_takes_the_places_of_tokens():
    """The Switch router takes no mask: twelve identical rows of padding fill the expert that the tokens want."""
    x_1SD = torch.randn(1, 1, D).expand(1, 18, D).clone()
    their = theirs("switch_transformers", "Top1Router", num_experts=E, expert_capacity=8).eval()
    mask_1SE, _, _ = their(x_1SD)
    assert mask_1SE[0, 12:].sum() == 0  # the tokens come last, and all are dropped
    router = TopKRouter(D, E, 1, norm_topk_prob=False)
    routing = router(x_1SD[0], torch.arange(18) >= 12)
    assert (apply_capacity(routing, 8).ids[12:] < E).all()


def test_its_fault_a_row_that_is_not_finite_gets_weights_that_are_not_finite():
    """known_failures R-07: ours reach no expert."""
    their = theirs("mixtral", "TopKRouter", num_experts_per_tok=K, num_local_experts=E)
    x_TD = torch.randn(3, D)
    x_TD[1, 4] = torch.nan
    _, weights_TK, _ = their(x_TD)
    assert weights_TK[1].isnan().all() and weights_TK[[0, 2]].isfinite().all()
    assert (ours(their)(x_TD).weights[1] == 0).all()


def test_its_fault_bfloat16_logits_choose_other_experts():
    """Its product is done in the dtype of the model; ours in float32 from the same bfloat16 numbers."""
    their = theirs("qwen3_moe", "TopKRouter", num_experts_per_tok=K, num_experts=E, norm_topk_prob=True).bfloat16()
    x_TD = torch.randn(5000, D).bfloat16()
    _, _, ids_TK = their(x_TD)
    exact = top_k_routing(x_TD.double() @ their.weight.double().T, K)
    our = ours(their).bfloat16()(x_TD)
    flipped = (ids_TK.sort(dim=1).values != exact.ids.sort(dim=1).values).any(dim=1).float().mean().item()
    assert 0.002 < flipped < 0.05
    assert torch.equal(our.ids.sort(dim=1).values, exact.ids.sort(dim=1).values)
