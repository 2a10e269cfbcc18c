"""Time functions in turns with cold caches, and the memory that a call needs beyond what was there before.

Turns, so that other work on the machine slows all of them alike; a buffer larger than the last cache is read before
each call, so that nobody finds weights that the one before has read.
"""

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

COLD_BYTES = 1 << 27
"""Read before each call. Twice the last cache of most processors; a machine with a larger one needs more."""


class Timing(NamedTuple):
    """Milliseconds of repeated calls."""

    median_ms: float
    low_ms: float
    """A tenth of the calls took less."""
    high_ms: float
    """A tenth of the calls took more."""
    repeats: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        """From seconds of single calls, at least one."""
        ordered = sorted(1e3 * s for s in seconds)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


def take_turns(
    functions: Mapping[str, Callable[[int], object]],
    *,
    repeats: int = 40,
    seconds: float = 10.0,
    device: torch.device | str = "cpu",
    cold: bool = True,
) -> dict[str, Timing]:
    """The times of each function.

    Args:
        functions: by name; called with the number of the turn, so that inputs can change from turn to turn. They are
            not warmed up here.
        repeats: turns.
        seconds: a function that has used up this much time takes no further turn; each takes at least one.
        device: where they compute; a GPU is waited for.
        cold: read :data:`COLD_BYTES` before each call.

    Raises:
        ValueError: ``repeats`` is below 1 or ``seconds`` not above 0.
    """
    if repeats < 1 or seconds <= 0:
        raise ValueError(f"repeats={repeats} must be at least 1 and seconds={seconds} above 0")
    device = torch.device(device)
    buffer = torch.ones(COLD_BYTES // 4 if cold else 0, device=device)
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    was_enabled = gc.isenabled()
    gc.disable()  # a collection in the middle of a call would count as its time
    try:
        for turn in range(repeats):
            shift = turn % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                if sum(times[name]) >= seconds:
                    continue
                buffer.sum()
                _wait(device)
                start = time.perf_counter()
                result = functions[name](turn)
                _wait(device)
                times[name].append(time.perf_counter() - start)
                del result
            gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return {name: Timing.of(taken) for name, taken in times.items()}


def peak_extra_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int | None:
    """Most memory at any time of a call above that before it, its result included.

    On a GPU what PyTorch's allocator counts. On Linux the high-water mark of resident memory, to a few hundred
    kilobytes: the kernel counts in batches. ``None`` where the system does not tell.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return None
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would hide what the call needs
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again at what is resident now
    except (OSError, AttributeError):
        return None
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, as jemalloc and tcmalloc do; whether the C library could be told so.

    glibc gives large tensors back to the system at once. The gradients of each step then cost fresh pages, and a
    virtual machine may have to fetch those from its host: on one the same step took 230 or 900 ms, by chance.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    m_trim_threshold, m_mmap_max = -1, -4
    return bool(mallopt(m_mmap_max, 0)) and bool(mallopt(m_trim_threshold, 2**31 - 1))


def available_bytes() -> int:
    """Memory of this machine that new data can take without swapping; 4 GB where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 << 30
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 4 << 30)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
