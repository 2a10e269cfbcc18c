import pytest
import torch

from guide_code.kernels.configs import Tile
from guide_code.kernels.launch import Launch, run
from guide_code.kernels.order import CHUNK, num_row_tiles, order_by_expert, scan_kernel


@pytest.mark.parametrize(
    ("num_assignments", "num_experts", "kind"),
    [(1, 1, torch.int64), (CHUNK, 3, torch.int32), (5 * CHUNK + 7, 5, torch.int64), (40, 70, torch.int32)],
)
def test_order_is_the_stable_sort(num_assignments, num_experts, kind):
    ids = torch.randint(-1, num_experts + 2, (num_assignments, 1), dtype=kind)
    if num_experts == 5:
        ids[ids == 2] = 4  # one expert is idle
        ids[7], ids[8] = torch.iinfo(kind).max, torch.iinfo(kind).min
    order = order_by_expert(ids, num_experts, 16)
    flat = ids.flatten().long()
    counts = [int((flat == e).sum()) for e in range(num_experts)]
    assert order.offsets.tolist() == [0, *torch.tensor(counts).cumsum(0).tolist()]
    expected = torch.cat([(flat == e).nonzero().flatten() for e in range(num_experts)])
    assert order.assignments[: len(expected)].tolist() == expected.tolist()

    tiles = [(e, int(order.offsets[e]) + r) for e, count in enumerate(counts) for r in range(0, count, 16)]
    tiles += [(-1, 0)] * (order.tiles.shape[1] - len(tiles))
    assert order.tiles.T.tolist() == [list(tile) for tile in tiles]


def test_scan_continues_over_many_chunks():
    """More than 1,024 chunks: the running total is carried from block to block."""
    counts = torch.randint(0, CHUNK, (2, 1100), dtype=torch.int32)
    starts, totals = counts.clone(), torch.empty(2, dtype=torch.int32)
    args = {"starts": starts, "totals": totals, "num_experts": 2, "num_chunks": 1100, "BLOCK": 1024}
    run(Launch(scan_kernel, (2,), args, Tile(1, 1, 1, 4, 1)))
    assert torch.equal(starts, (counts.cumsum(1) - counts).int()) and torch.equal(totals, counts.sum(1).int())


@pytest.mark.parametrize(
    ("num_assignments", "num_experts", "rows"), [(64, 4, 16), (5, 9, 16), (1000, 7, 16), (3, 3, 1)]
)
def test_the_bound_on_row_tiles_holds_for_the_worst_routing(num_assignments, num_experts, rows):
    spread = [1] * min(num_experts, num_assignments)  # one row each, the rest on the first: most tiles wasted
    spread[0] += num_assignments - sum(spread)
    needed = sum(-(-count // rows) for count in spread)
    assert needed == num_row_tiles(num_assignments, num_experts, rows)
