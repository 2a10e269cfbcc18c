"""known_failures C-05: expert e of a checkpoint is expert e under every split, with its optimizer state."""

from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from training import build, moe_layers

from guide_code.parallel.checkpoint import load_distributed, save_distributed
from guide_code.parallel.mesh import ParallelSizes, build_meshes
from guide_code.parallel.parallelize import parallelize

RANKS = 4
SPLITS = ((1, 3), (2, 1), (2, 3), (4, 1))
"""(ep, zero)"""


def numbered(like):
    return torch.arange(len(like), dtype=like.dtype).view(-1, 1, 1).expand(like.shape)


def make(ep, zero, fill):
    model = build()
    if fill:
        with torch.no_grad():
            for layer in moe_layers(model):
                for parameter in layer.experts.parameters():
                    parameter.copy_(numbered(parameter))
    sizes = ParallelSizes(dp=RANKS, ep=ep)
    model = parallelize(model, sizes, build_meshes(sizes, "cpu"), zero=zero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    return model, optimizer, [p for name, p in model.named_parameters() if "experts." in name]


def on_ranks(rank, folder):
    found, wholes = {}, lambda tensors: [tensor.full_tensor() for tensor in tensors]
    for split in SPLITS:
        model, optimizer, experts = make(*split, fill=True)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = 10 * parameter.detach().clone()
        save_distributed(Path(folder) / str(split), 7, model, optimizer)
    for source in SPLITS:
        for target in SPLITS:
            model, optimizer, experts = make(*target, fill=False)
            step = load_distributed(Path(folder) / str(source), model, optimizer)
            moments = [optimizer.state[parameter]["momentum_buffer"] for parameter in experts]
            values = [(p, 1.0) for p in wholes(experts)] + [(m, 10.0) for m in wholes(moments)]
            right = all(torch.equal(value, scale * numbered(value)) for value, scale in values)
            found[source, target] = step, right, len(values)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def results(folder):
    return run_on_ranks(RANKS, on_ranks, str(folder), time_limit=150)


def test_every_expert_is_itself_under_every_split(results):
    for found in results:
        assert len(found) == len(SPLITS) ** 2
        for splits, (step, right, count) in found.items():
            assert step == 7 and right and count >= 4, splits


def test_a_checkpoint_is_as_large_whatever_the_split(results, folder):
    sizes = [sum(f.stat().st_size for f in (folder / str(split)).glob("*.distcp")) for split in SPLITS]
    assert min(sizes) > 10_000 and max(sizes) < 1.2 * min(sizes)
