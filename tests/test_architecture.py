"""The rules of the package, proved from its syntax trees: who may import whom, and what copies out alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from guide_code.sitebuild.imports import imported_files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "guide_code"

ROUTERS = [
    f"routers/{name}" for name in ("top_k", "expert_choice", "hashed", "sinkhorn", "quantile", "sparse_mixer", "replay")
]

LEAVES = [
    *ROUTERS,
    "balance",
    "load_metrics",
    "importance",
    "capacity",
    "experts/loop",
    "experts/grouped",
    "experts/blocked",
    "experts/padded",
    "experts/gathered",
    "experts/identity",
    "experts/expert_cache",
    "experts/offloaded",
    "experts/low_rank",
    "moe",
    "balancer",
    "layers",
    "rotary",
    "attention",
    "latent_attention",
    "decoding",
    "transformer",
    "parallel/mesh",
    "parallel/expert",
    "parallel/expert_variants",
    "parallel/expert_tensor",
    "parallel/data",
    "parallel/placement",
    "parallel/pipeline",
]
"""Standard library and torch, and other leaves of the same copy set by relative import; nothing else."""

ORDER = [
    *ROUTERS,
    "routers",
    *LEAVES[len(ROUTERS) :],
    "parallel",
    "kernels",
    "experts",
    "backends",
    "config",
    "presets",
    "build",
    "models",
    "planner",
    "conventions",
    "corpus",
    "checkpoint",
    "conversion",
    "convert",
    "verify",
    "hf_flags",
    "hf_generic",
    "hf_switch",
    "hf_plugin",
    "testing",
    "figures",
    "sitebuild",
    "images_cli",
    "training",
    "train",
    "lora",
    "adapter",
    "offload",
    "generate",
    "benchmarks",
    "bench",
    "cli",
]
"""A file may import files and folders above it, never below. A folder's own files may import one another; its
``__init__`` stands below them and re-exports their names."""

COPY_SETS = {name: [name] for name in LEAVES} | {
    "load_metrics": ["balance", "load_metrics"],
    "balancer": ["balance", "load_metrics", "importance", "balancer"],
    "transformer": ["decoding", "transformer"],
    "parallel/expert_tensor": ["parallel/expert", "parallel/expert_tensor"],
    "parallel/expert_variants": ["parallel/expert", "parallel/expert_variants"],
    "experts/low_rank": ["experts/grouped", "experts/low_rank"],
    "experts/offloaded": ["experts/grouped", "experts/expert_cache", "experts/offloaded"],
}
COPY_SETS |= {
    "attention": ["rotary", "attention"],
    "latent_attention": ["rotary", "attention", "latent_attention"],
}
COPY_SETS |= {name: [ROUTERS[0], name] for name in ROUTERS[1:]}
"""What to copy into a package of your own to get a leaf."""

EXPERTS_CALL = "(4, 8, 8)(torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))"
SMOKE = {
    "routers/top_k": "top_k.TopKRouter(8, 4, 2)(torch.randn(3, 8))",
    "routers/expert_choice": "expert_choice.ExpertChoiceRouter(8, 4, 2)(torch.randn(3, 8))",
    "routers/hashed": "hashed.HashRouter(8, 4, hashed.hash_table(9, 4, 2))(torch.randn(1, 8), None, torch.tensor([3]))",
    "routers/sinkhorn": "sinkhorn.SinkhornRouter(8, 4, 2)(torch.randn(3, 8))",
    "routers/quantile": "quantile.QuantileRouter(8, 4, 2)(torch.randn(3, 8))",
    "routers/sparse_mixer": "sparse_mixer.SparseMixerRouter(8, 4, 2)(torch.randn(3, 8))",
    "routers/replay": "replay.ReplayRouter(replay.TopKRouter(8, 4, 2), torch.tensor([[0, 1]]))(torch.randn(1, 8))",
    "balance": "balance.load_balancing_loss(torch.rand(3, 4), torch.zeros(3, 1, dtype=torch.int64))",
    "load_metrics": "load_metrics.load_entropy(torch.tensor([1, 2]))",
    "importance": "importance.importance_loss(torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int64), 4)",
    "capacity": "capacity.expert_capacity(64, 8, 2, 1.25)",
    "experts/loop": f"loop.LoopExperts{EXPERTS_CALL}",
    "experts/grouped": f"grouped.GroupedExperts{EXPERTS_CALL}",
    "experts/blocked": f"blocked.BlockedExperts{EXPERTS_CALL}",
    "experts/padded": f"padded.PaddedExperts{EXPERTS_CALL}",
    "experts/gathered": f"gathered.GatheredExperts{EXPERTS_CALL}",
    "experts/identity": "identity.identity_experts(torch.ones(1, 8), torch.tensor([[4]]), torch.ones(1, 1), 4, 1)",
    "experts/expert_cache": "expert_cache.MemoryStore({'down_proj': torch.zeros(4, 8, 8)})",
    "experts/low_rank": "low_rank.LowRank(torch.zeros(4, 8, 8), 2, 4.0)",
    "experts/offloaded": f"offloaded.OffloadedExperts{EXPERTS_CALL}",
    "moe": "moe.DenseFeedForward(torch.nn.Linear(8, 8))(torch.randn(1, 3, 8))",
    "balancer": "balancer.Balancer(4, coefs={'load_balancing': 0.01})",
    "layers": "layers.FeedForward(8, 16)(torch.randn(3, 8))",
    "rotary": "rotary.RotaryEmbedding(8)(torch.arange(3)[None])",
    "attention": "attention.GroupedQueryAttention(8, 2, 1, 4)(torch.randn(1, 3, 8), [torch.ones(1, 3, 4)] * 2)",
    "latent_attention": "latent_attention.LatentAttention(8, 2, kv_lora_rank=6, nope_size=4, rope_size=2, value_size=5)"
    "(torch.randn(1, 3, 8), [torch.ones(1, 3, 2)] * 2)",
    "decoding": "decoding.sample_tokens(torch.randn(2, 5), temperature=1.0)",
    "transformer": "transformer.Output(torch.zeros(1, 1, 1), ())",
    "parallel/mesh": "mesh.picture(mesh.ParallelSizes(dp=4, ep=2), 8)",
    "parallel/expert": "expert.all_to_all_bytes(5, 4, 8, 4, element_size=4)",
    "parallel/data": "data.gradient_norm([torch.nn.Parameter(torch.ones(2))])",
    "parallel/expert_tensor": "part = torch.nn.Module(); part.gated, part.activation = False, 'silu'\n"
    "part.down_proj = torch.nn.Parameter(torch.zeros(4, 8, 6)); expert_tensor.slice_experts_(part, 0, 3)",
    "parallel/pipeline": "pipeline.cut_layers([1.0, 2.0, 2.0], 2)",
    "parallel/placement": "placement.place_experts(torch.tensor([9, 8, 2, 1]), 2)",
    "parallel/expert_variants": "expert_variants.deduplicated_bytes(5, 4, 8, 2, 4, element_size=4)",
}


def python_files():
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.parent != PACKAGE or p.name != "__init__.py"]


def place(path: Path) -> str:
    """The entry of ORDER that holds a file: itself, or its top folder."""
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return name if name in ORDER else name.split("/")[0]


def local_imports(path: Path) -> list[str]:
    """Places of the package files that a file imports, without ``__init__`` files that hold a docstring only."""
    files = {p for p in imported_files(path, ROOT) if p.name != "__init__.py" or place(p) in ORDER}
    return sorted({place(p) for p in files})


@pytest.mark.parametrize("path", python_files(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_go_one_way(path):
    if path == PACKAGE / "experts/__init__.py":
        assert not local_imports(path)
        return
    here = place(path)
    assert here in ORDER, f"{here} has no place in the import order"
    above = {here, here.rpartition("/")[0]}  # importing a file of a folder runs the folder's __init__ as well
    below = [name for name in local_imports(path) if name not in above and ORDER.index(name) > ORDER.index(here)]
    assert not below, f"{here} may not import {below}: they stand below it"


def test_the_order_names_what_exists():
    assert not [n for n in ORDER if not (PACKAGE / f"{n}.py").is_file() and not (PACKAGE / n).is_dir()]


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_imports_only_torch_the_standard_library_and_its_copy_set(name):
    others = []
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            others += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            others.append("." * node.level + (node.module or ""))
    allowed = {"torch", *sys.stdlib_module_names} | {f".{m.split('/')[-1]}" for m in COPY_SETS[name]}
    assert not [m for m in others if m not in allowed and m.split(".")[0] not in allowed]


def test_every_copy_set_runs_in_an_empty_package(tmp_path):
    lines = ["import torch"]
    for name, files in COPY_SETS.items():
        package = "only_" + name.replace("/", "_")
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        for file in files:
            (tmp_path / package / f"{file.split('/')[-1]}.py").write_bytes((PACKAGE / f"{file}.py").read_bytes())
        lines += [f"from {package} import {name.split('/')[-1]}", SMOKE[name]]
    lines.append("import sys; assert not [m for m in sys.modules if m.startswith('guide_code')]")
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_leaf_begins_with_what_to_know():
    for name in LEAVES:
        docstring = ast.get_docstring(ast.parse((PACKAGE / f"{name}.py").read_text())) or ""
        flat = " ".join(docstring.split())
        assert "arXiv:" in flat and "Copy " in flat and "needs torch only" in flat, name


def test_the_oracle_imports_nothing_of_the_package():
    oracle = PACKAGE / "testing/oracle.py"
    assert not [p for p in imported_files(oracle, ROOT) if p.name != "__init__.py"]


def test_everything_public_at_the_top_of_a_module_has_a_docstring():
    missing = []
    for path in python_files():
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            missing.append(f"{path.name}: module")
        for node in tree.body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                missing.append(f"{path.name}: {node.name}")
    assert not missing


def test_files_stay_rooms_not_halls():
    long = {p.name: n for p in python_files() if (n := len(p.read_text().splitlines())) > 350}
    assert not long, "split them: one idea, one file"


def test_one_forward_of_the_default_layer_is_short_to_read():
    """At most 80 lines, comments and checks of arguments aside, in 5 functions."""
    wanted = {
        "moe.py": {"MoE.forward"},
        "routers/top_k.py": {"TopKRouter.forward", "top_k_routing"},
        "experts/grouped.py": {"grouped_experts"},
        "balancer.py": {"Balancer.forward"},
    }
    total = 0
    for file, names in wanted.items():
        text = (PACKAGE / file).read_text()
        tree, lines = ast.parse(text), [line.strip() for line in text.splitlines()]
        scopes = [("", tree)] + [(f"{n.name}.", n) for n in tree.body if isinstance(n, ast.ClassDef)]
        for prefix, scope in scopes:
            for node in scope.body:
                if isinstance(node, ast.FunctionDef) and prefix + node.name in names:
                    first = node.body[1] if ast.get_docstring(node) else node.body[0]
                    body = lines[first.lineno - 1 : node.end_lineno]
                    total += sum(bool(line) and not line.startswith("#") for line in body)
                    names.discard(prefix + node.name)
    assert not any(wanted.values())
    assert total <= 80, f"{total} lines"


def test_no_import_time_work_in_the_package():
    """Only definitions, imports, constants and ``if __name__`` at the top level of a module."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    odd = []
    for path in python_files():
        for node in ast.parse(path.read_text()).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if not (isinstance(node, allowed) or docstring or main or typing):
                odd.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not odd
