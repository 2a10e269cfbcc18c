"""A few experts on the device, the rest in a store: least recently used ones make room, likely ones come early.

Eliseev and Mazur 2023 (arXiv:2312.17238), sections 3.1 (LRU cache) and 3.2 (loading ahead of need).
Copy alone: needs torch only.

E experts, C experts that fit on the device.
"""

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ExpertStore(Protocol):
    """Where the weights of one layer's experts are while they are not on the device."""

    num_experts: int
    dtype: torch.dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of one expert's tensors, by name: ``gate_up_proj`` (2I, D), ``down_proj`` (D, I), ..."""
        ...

    def read(self, expert: int) -> Mapping[str, Tensor]:
        """One expert's tensors, on the CPU. They may share memory with the store: copy, do not write."""
        ...

    def stacked(self, name: str) -> Tensor:
        """The tensors of all experts under one name, (E, ...); may take as much memory as they do."""
        ...


class MemoryStore:
    """Experts in CPU memory.

    Args:
        tensors: by name, each stacked (E, ...) or a sequence of one tensor per expert.
        pin: copy them to page-locked memory, from which a GPU reads without waiting; needs CUDA.

    Raises:
        ValueError: tensors have no memory (the meta device), are not on the CPU, or differ in dtype, number or shape.
    """

    def __init__(self, tensors: Mapping[str, Tensor | Sequence[Tensor]], *, pin: bool = False):
        if pin:
            tensors = {
                name: t.pin_memory() if isinstance(t, Tensor) else [one.pin_memory() for one in t]
                for name, t in tensors.items()
            }
        each = {name: list(t.detach().unbind()) if isinstance(t, Tensor) else list(t) for name, t in tensors.items()}
        counts = {name: len(ts) for name, ts in each.items()}
        if not counts or len(set(counts.values())) != 1 or not min(counts.values()):
            raise ValueError(f"a store needs equally many experts in each of its tensors, got {counts}")
        for name, ts in each.items():
            for expert, tensor in enumerate(ts):
                if tensor.device.type != "cpu":
                    raise ValueError(f"{name} of expert {expert} is on {tensor.device}: a store needs data on the CPU")
                like = next(iter(each.values()))[0]
                if tensor.shape != ts[0].shape or tensor.dtype != like.dtype:
                    raise ValueError(
                        f"{name} of expert {expert} is {tensor.dtype} {tuple(tensor.shape)}, but others are "
                        f"{like.dtype} {tuple(ts[0].shape)}"
                    )
        self._stacked = {name: t.detach() for name, t in tensors.items() if isinstance(t, Tensor)}
        self._each = each
        self.num_experts = next(iter(counts.values()))
        self.dtype = next(iter(each.values()))[0].dtype
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(ts[0].shape) for name, ts in each.items()}

    def read(self, expert: int) -> dict[str, Tensor]:
        """Views."""
        return {name: ts[expert] for name, ts in self._each.items()}

    def stacked(self, name: str) -> Tensor:
        """The tensor that was given, if it was stacked; else a new one."""
        return self._stacked[name] if name in self._stacked else torch.stack(self._each[name])


class OffloadStats(NamedTuple):
    """What a cache has done."""

    requests: int = 0
    """Experts that were needed, once per call and expert."""
    hits: int = 0
    """Of these, how many were on the device already, or on their way."""
    prefetched: int = 0
    """Experts that were moved ahead of need, whether needed in the end or not."""
    bytes_moved: int = 0
    """From the store to the device."""

    @property
    def hit_rate(self) -> float:
        """Hits per request; nan when nothing was asked for."""
        return self.hits / self.requests if self.requests else float("nan")


class ExpertCache:
    """Slots for ``capacity`` experts on a device, filled from a store.

    One thread uses a cache; :meth:`prefetch` works on another one meanwhile, and every method waits for it first.

    Args:
        store: of all experts.
        capacity: number C of experts on the device, at least 1; no more than there are is used.
        device: where the slots are.

    Raises:
        ValueError: the capacity is below 1.
    """

    def __init__(self, store: ExpertStore, capacity: int, device: torch.device | str = "cpu"):
        if capacity < 1:
            raise ValueError(f"a cache needs room for at least 1 expert, got {capacity}")
        self.store, self.capacity = store, min(capacity, store.num_experts)
        self.device = torch.device(device)
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside it
            shapes = {name: (self.capacity, *shape) for name, shape in store.shapes.items()}
            self.slots = {name: torch.zeros(s, dtype=store.dtype, device=self.device) for name, s in shapes.items()}
        self.pinned: frozenset[int] = frozenset()
        self.uses: Counter[int] = Counter()
        self._stats = OffloadStats()
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.capacity))
        self._job: _Job | None = None
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def stats(self) -> OffloadStats:
        """What was done so far."""
        self._settle()
        return self._stats

    @property
    def experts(self) -> list[int]:
        """Those on the device, the least recently used first."""
        self._settle()
        return list(self._slot_of)

    def waves(self, experts: Sequence[int]) -> Iterator[list[int]]:
        """Groups of experts that fit at the same time, those on the device first; to be fetched one after the other."""
        self._settle()
        here = [e for e in experts if e in self._slot_of]
        rest = here + [e for e in experts if e not in self._slot_of]
        while rest:
            room, wave = self.capacity - len(self.pinned), []
            for expert in rest:
                if expert in self.pinned:
                    wave.append(expert)
                elif room:
                    room -= 1
                    wave.append(expert)
            rest = [e for e in rest if e not in wave]
            yield wave

    def fetch(self, experts: Sequence[int]) -> list[int]:
        """The slots of some experts, once they are all on the device; one of the :meth:`waves`."""
        self._settle()
        missing = [e for e in experts if e not in self._slot_of]
        self.uses.update(experts)
        requests, hits = self._stats.requests + len(experts), self._stats.hits + len(experts) - len(missing)
        self._stats = self._stats._replace(requests=requests, hits=hits)
        for expert in experts:
            if expert in self._slot_of:
                self._slot_of.move_to_end(expert)
        self._start(self._claim(missing, keep=experts), in_background=False)
        return [self._slot_of[e] for e in experts]

    def prefetch(self, experts: Sequence[int]) -> None:
        """Start to move the likely experts, the likeliest first, as far as there is room. Returns at once."""
        self._settle()
        likely = list(experts)[: self.capacity]
        claims = self._claim([e for e in likely if e not in self._slot_of], keep=likely)
        self._stats = self._stats._replace(prefetched=self._stats.prefetched + len(claims))
        self._start(claims, in_background=True)

    def pin(self, experts: Iterable[int]) -> None:
        """Keep exactly these experts on the device from now on, whatever else is used.

        Raises:
            ValueError: they would leave no slot for the others.
        """
        self._settle()
        wanted = frozenset(experts)
        limit = self.capacity if self.capacity == self.store.num_experts else self.capacity - 1
        if len(wanted) > limit:
            raise ValueError(f"{len(wanted)} pinned experts leave no slot of {self.capacity} free: pin at most {limit}")
        self.pinned = frozenset()
        self._start(self._claim([e for e in wanted if e not in self._slot_of], keep=wanted), in_background=False)
        self.pinned = wanted

    def _claim(self, missing: Iterable[int], keep: Iterable[int]) -> list[tuple[int, int]]:
        """A slot for each missing expert while there are any; whoever is in it has left when this returns."""
        kept, claims = self.pinned.union(keep), []
        leaving = iter([e for e in self._slot_of if e not in kept])
        for expert in missing:
            if not self._free:
                victim = next(leaving, None)
                if victim is None:
                    break
                self._free.append(self._slot_of.pop(victim))
            claims.append((expert, self._free.pop()))
        return claims

    def _start(self, claims: list[tuple[int, int]], *, in_background: bool) -> None:
        if not claims:
            return
        if self._stream is not None:  # kernels that still read the slots' old experts come first
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._job = _Job(self, claims)
        if in_background:
            self._job.start()
        else:
            self._job.run()
            self._settle()

    def _settle(self) -> None:
        """Wait for what is on its way, and enter it; a failure gives its slots back and is raised here."""
        job, self._job = self._job, None
        if job is None:
            return
        if job.ident is not None:
            job.join()
        self._slot_of.update(job.claims[: job.done])
        self._free += [slot for _, slot in job.claims[job.done :]]
        size = sum(slots.nbytes for slots in self.slots.values()) // self.capacity
        self._stats = self._stats._replace(bytes_moved=self._stats.bytes_moved + job.done * size)
        if job.error is not None:
            raise job.error

    def move(self, expert: int, slot: int) -> None:
        """Copy one expert into a slot; on a GPU, the stream of the cache does."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name, tensor in self.store.read(expert).items():
                self.slots[name][slot].copy_(tensor, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()


class _Job(threading.Thread):
    """Copies experts into slots, and remembers how far it came."""

    def __init__(self, cache: ExpertCache, claims: list[tuple[int, int]]):
        super().__init__(daemon=True, name="expert prefetch")
        self.cache, self.claims, self.done = cache, claims, 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for expert, slot in self.claims:
                self.cache.move(expert, slot)
                self.done += 1
        except BaseException as error:  # raised again where it is noticed: an exception in a thread is lost
            self.error = error
