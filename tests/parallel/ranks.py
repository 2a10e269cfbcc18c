"""Run a function on several gloo ranks, each a process of one thread, and never wait for ever.

Processes are forked from a server that has imported torch and done nothing else: seconds less for each.
"""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint"]
GRACE = 3.0
"""Seconds that the other ranks get to report their own errors after a first one fails."""


def run_on_ranks(ranks: int, function: Callable, *args, time_limit: float = 60.0) -> list:
    """``function(rank, *args)`` on each of ``ranks`` gloo ranks; their results, by rank.

    Args:
        ranks: processes to start.
        function: a function of a module's top level, which a new process can import.
        args: what it gets after its rank.
        time_limit: seconds until every process is killed; a collective that waits fails after half of it.

    Raises:
        RuntimeError: a rank failed, died or did not finish; the message holds the report of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn")
        context.set_forkserver_preload(PRELOADED)  # nothing to do for "spawn"
        processes = [
            context.Process(target=_rank_main, args=(rank, ranks, folder, time_limit / 2, function, args), daemon=True)
            for rank in range(ranks)
        ]
        before = os.environ.copy()
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it loads torch
        try:
            for process in processes:
                process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        deadline, failed = time.monotonic() + time_limit, False
        while any(p.exitcode is None for p in processes) and time.monotonic() < deadline:
            if not failed and any(p.exitcode for p in processes):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE)
            time.sleep(0.01)
        codes = [p.exitcode for p in processes]
        for process in processes:
            process.kill()
            process.join(5)
        if any(codes) or None in codes:
            raise RuntimeError("\n".join(_report(Path(folder), rank, code) for rank, code in enumerate(codes)))
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _report(folder: Path, rank: int, code: int | None) -> str:
    error = folder / f"{rank}.error"
    if error.exists():
        return f"rank {rank} failed:\n{error.read_text()}"
    return f"rank {rank} " + ("was still running and was killed" if code is None else f"ended with status {code}")


def _rank_main(rank: int, ranks: int, folder: str, time_limit: float, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name need not resolve
    try:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=time_limit))
        torch.save(function(rank, *args), f"{folder}/{rank}.pt")
        dist.barrier()  # no rank leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
        os._exit(1)  # a destructor of the process group may wait for ranks that will never come
