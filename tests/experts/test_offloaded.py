import copy
import dataclasses

import pytest
import torch
from torch import nn

from guide_code.experts.expert_cache import ExpertCache, MemoryStore
from guide_code.experts.grouped import GroupedExperts
from guide_code.experts.offloaded import OffloadedExperts
from guide_code.experts.store import MappedStore, build_store, open_store
from guide_code.testing.contract import CASES, CLAMPED, TOLERANCES, Case, make_inputs, relative_rms
from guide_code.testing.oracle import oracle_experts

PLAIN = Case("eight experts, four choices", num_tokens=9, num_experts=8, top_k=4, bias=True, routing="holes")


def make(case, dtype=torch.float32, **options):
    """Resident experts with random weights, and the same ones offloaded."""
    sizes = case.num_experts, case.hidden_size, case.intermediate_size
    style = {"activation": case.activation, "gated": case.gated, "bias": case.bias}
    resident = GroupedExperts(*sizes, **style)
    for parameter in resident.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    resident = resident.to(dtype).requires_grad_(False)
    options.setdefault("store", MemoryStore(resident.state_dict()))
    return resident, OffloadedExperts(*sizes, **style, **options)


def inputs(case, dtype=torch.float32, seed=0):
    return make_inputs(case, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", [*CASES, CLAMPED, PLAIN], ids=lambda case: case.reason)
def test_same_bits_as_resident_experts_for_every_cache_size(case, dtype):
    for cache_experts in sorted({1, 2, 3, case.num_experts - 1, case.num_experts, 99} - {0}):
        resident, offloaded = make(case, dtype, cache_experts=cache_experts)
        for seed in range(3):  # the second call finds what the first one left
            args = inputs(case, dtype, seed)
            assert torch.equal(offloaded(*args), resident(*args)), (cache_experts, seed)


def test_same_bits_for_large_and_odd_sizes_and_single_tokens():
    for sizes in ((64, 132, 68, 12, 6), (1, 256, 96, 16, 8), (257, 40, 20, 9, 3), (5, 33, 17, 5, 4)):
        case = Case(str(sizes), *sizes)
        resident, offloaded = make(case, cache_experts=4)
        args = inputs(case)
        assert torch.equal(offloaded(*args), resident(*args)), sizes


@pytest.mark.parametrize("cache_experts", [2, 8])
def test_equals_the_oracle(cache_experts):
    resident, offloaded = make(PLAIN, cache_experts=cache_experts)
    args = inputs(PLAIN)
    weights = {name: p.double() for name, p in resident.state_dict().items()}
    expected = oracle_experts(*(t.double() if t.is_floating_point() else t for t in args), **weights)
    assert relative_rms(offloaded(*args), expected) < 2e-6


@pytest.mark.parametrize("cache_experts", [1, 8])
def test_autocast_gives_the_same_bits(cache_experts):
    resident, offloaded = make(PLAIN, cache_experts=cache_experts)
    args = inputs(PLAIN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(offloaded(*args), resident(*args))
    assert not torch.equal(offloaded(*args), resident.bfloat16()(*args))


def test_gradients_are_refused_and_the_rest_of_a_model_is_not():
    _, offloaded = make(PLAIN)
    x_TD, ids_TK, weights_TK = inputs(PLAIN)
    assert not list(offloaded.parameters())
    for x, weights in ((x_TD.clone().requires_grad_(), weights_TK), (x_TD, weights_TK.clone().requires_grad_())):
        with pytest.raises(ValueError, match=r"compute no gradients: call under torch.inference_mode\(\)"):
            offloaded(x, ids_TK, weights)
        with torch.no_grad():
            out_TD = offloaded(x, ids_TK, weights)
        with torch.inference_mode():
            assert torch.equal(offloaded(x, ids_TK, weights), out_TD)
    with torch.inference_mode():
        fresh = make(PLAIN)[1]
        fresh(x_TD, ids_TK, weights_TK)
    assert fresh(x_TD, ids_TK, weights_TK).isfinite().all(), "a cache made in inference mode works outside it"


def test_state_dict_goes_both_ways(tmp_path):
    """known_failures O-02: saving works while offloaded."""
    resident, offloaded = make(PLAIN, cache_experts=2)
    build_store(tmp_path / "store", {"layer": resident.state_dict()})
    on_disk = make(PLAIN, store=open_store(tmp_path / "store", "layer"))[1]
    for source in (offloaded, on_disk):
        state = source.state_dict()
        assert {n: tuple(t.shape) for n, t in state.items()} == {
            n: tuple(t.shape) for n, t in resident.state_dict().items()
        }
        assert all(torch.equal(state[name], value) for name, value in resident.state_dict().items())
        GroupedExperts(8, 16, 8, bias=True).load_state_dict(state)
    other = GroupedExperts(8, 16, 8, bias=True).requires_grad_(False)
    args = inputs(PLAIN)
    for assign in (False, True):
        nn.init.normal_(other.down_proj)
        offloaded(*args)
        offloaded.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(offloaded(*args), other(*args)), "the cache forgot the old ones"
        assert (offloaded.store.stacked("down_proj").data_ptr() == other.down_proj.data_ptr()) == assign
    with pytest.raises(RuntimeError, match=r"MappedStore, which is read only"):
        on_disk.load_state_dict(other.state_dict())
    state = dict(other.state_dict(), down_proj=torch.zeros(8, 16, 9), stray=torch.zeros(1))
    del state["gate_up_proj"]
    words = r"(?s)Missing.*gate_up_proj.*Unexpected.*stray|Unexpected.*stray.*Missing.*gate_up_proj"
    with pytest.raises(RuntimeError, match=words) as error:
        offloaded.load_state_dict(state)
    assert "down_proj has shape (8, 16, 9), but (8, 16, 8) is wanted" in str(error.value)


def test_random_experts_when_no_store_is_given():
    torch.manual_seed(3)
    resident = GroupedExperts(8, 16, 8).requires_grad_(False)
    torch.manual_seed(3)
    offloaded = OffloadedExperts(8, 16, 8)
    args = inputs(dataclasses.replace(PLAIN, bias=False))
    assert torch.equal(offloaded(*args), resident(*args))


def test_copies_have_a_cache_of_their_own():
    resident, offloaded = make(PLAIN, cache_experts=2)
    offloaded.look_ahead = lambda x_TD: None
    args = inputs(PLAIN)
    offloaded(*args)
    twin = copy.deepcopy(offloaded)
    assert twin.look_ahead is None and twin.stats().requests == 0
    assert torch.equal(twin(*args), resident(*args)) and offloaded.stats() != twin.stats()._replace(requests=1)


def test_stats_count_requests_hits_and_bytes():
    case = Case("one choice", 1, 16, 8, 4, 1)
    _, offloaded = make(case, cache_experts=2)
    x_TD, weights_TK = torch.randn(1, 16), torch.ones(1, 1)
    for expert in (0, 1, 0, 2, 0, 1):  # 2 takes the place of 1, then 1 that of 2
        offloaded(x_TD, torch.tensor([[expert]]), weights_TK)
    size = 3 * 16 * 8 * 4
    assert offloaded.stats() == (6, 2, 0, 4 * size)
    assert offloaded.stats().hit_rate == 1 / 3
    assert offloaded.pin_hottest(1) == [0]
    for expert in (1, 2, 3, 0):
        offloaded(x_TD, torch.tensor([[expert]]), weights_TK)
    assert offloaded.stats()[:2] == (10, 4), "1 and the pinned 0"
    with pytest.raises(ValueError, match="2 pinned experts leave no slot of 2 free: pin at most 1"):
        offloaded.pin_hottest(2)


def test_least_recently_used_leaves_first_and_pinned_ones_stay():
    cache = ExpertCache(MemoryStore({"a": torch.arange(6.0)[:, None]}), 3)
    assert [len(w) for w in cache.waves([5, 1, 2, 3])] == [3, 1]
    for experts in ([5, 1, 2], [5], [3]):
        slots = cache.fetch(experts)
        assert [cache.slots["a"][slot].item() for slot in slots] == experts
    assert cache.experts == [2, 5, 3]
    assert list(cache.waves([0, 3, 4, 5])) == [[3, 5, 0], [4]], "those on the device first"
    cache.pin([4])
    assert cache.experts == [5, 3, 4]
    assert list(cache.waves([0, 1, 2, 4])) == [[4, 0, 1], [2]]
    for experts in ([0], [1], [2], [4, 5, 0]):
        slots = cache.fetch(experts)
        assert [cache.slots["a"][slot].item() for slot in slots] == experts and 4 in cache.experts
    cache.pin([])
    cache.fetch([1, 2, 3])
    assert cache.experts == [1, 2, 3]
    with pytest.raises(ValueError, match="at least 1 expert, got 0"):
        ExpertCache(cache.store, 0)


class Slow(MemoryStore):
    """Lets nothing through before it is told to, and fails for one expert."""

    def __init__(self, *args, broken=None):
        super().__init__(*args)
        import threading

        self.gate, self.broken = threading.Event(), broken

    def read(self, expert):
        assert self.gate.wait(20)
        if expert == self.broken:
            raise OSError("the disk is gone")
        return super().read(expert)


def test_prefetch_works_while_others_compute_and_is_waited_for():
    store = Slow({"a": torch.arange(6.0)[:, None]})
    cache = ExpertCache(store, 3)
    cache.prefetch([4, 2, 5, 0])  # returns although nothing can be read yet; 0 finds no room
    store.gate.set()
    assert [cache.slots["a"][slot].item() for slot in cache.fetch([2, 4])] == [2, 4]
    assert cache.stats == (2, 2, 3, 3 * 4)
    cache.prefetch([1])
    assert cache.stats == (2, 2, 4, 4 * 4) and cache.experts == [2, 4, 1], "5 was never used"


def test_a_failed_read_is_raised_where_it_is_noticed_and_leaves_a_cache_that_works():
    store = Slow({"a": torch.arange(6.0)[:, None]}, broken=3)
    store.gate.set()
    cache = ExpertCache(store, 2)
    cache.prefetch([1, 3])
    with pytest.raises(OSError, match="the disk is gone"):
        cache.fetch([0])
    with pytest.raises(OSError, match="the disk is gone"):
        cache.fetch([3])
    assert cache.experts == [1] and cache.stats.bytes_moved == 4
    assert [cache.slots["a"][slot].item() for slot in cache.fetch([0, 2])] == [0, 2]


def test_looking_ahead_changes_no_bit_whatever_it_says():
    resident, offloaded = make(PLAIN, cache_experts=3)
    before = make(PLAIN)[1]
    before.look_ahead = lambda x_TD: offloaded.cache_on(x_TD.device).prefetch(torch.randperm(8)[:3].tolist())
    for seed in range(20):
        args = inputs(dataclasses.replace(PLAIN, num_tokens=1 + seed % 3, routing="random"), seed=seed)
        before(*args)
        assert torch.equal(offloaded(*args), resident(*args))
    assert offloaded.stats().prefetched > 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "swish"}, "activation must be one of .*'swish'"),
        ({"activation": "swigluoai", "gated": False}, "activation='swigluoai' .* gated=False"),
        ({"cache_experts": 0}, "cache_experts=0 must be at least 1"),
        ({"store": MemoryStore({"down_proj": torch.zeros(3, 16, 8)})}, "the store holds 3 experts, but num_experts=4"),
        ({"store": MemoryStore({"down_proj": torch.zeros(4, 16, 8)})}, r"the store's experts have {'down_proj'.*asked"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(list(value)),
)
def test_what_cannot_work_is_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        OffloadedExperts(4, 16, 8, **options)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "equally many experts in each of its tensors, got {}"),
        ({"a": torch.zeros(0, 2)}, "got {'a': 0}"),
        ({"a": torch.zeros(2, 2), "b": torch.zeros(3, 2)}, "got {'a': 2, 'b': 3}"),
        ({"a": torch.zeros(2, 2, device="meta")}, "a of expert 0 is on meta"),
        ({"a": [torch.zeros(2), torch.zeros(3)]}, r"a of expert 1 is torch.float32 \(3,\), but others are .* \(2,\)"),
        ({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2).half()}, "b of expert 0 is torch.float16 .*torch.float32"),
    ],
    ids=str,
)
def test_a_store_of_uneven_experts_is_refused(tensors, words):
    with pytest.raises(ValueError, match=words):
        MemoryStore(tensors)


def test_a_mapped_store_is_a_memory_store():
    assert issubclass(MappedStore, MemoryStore)
