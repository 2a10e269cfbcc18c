import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks


def total(rank, start):
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return int(value), torch.get_num_threads()


def fail_on_rank_1(rank):
    if rank == 1:
        raise KeyError("lost token")
    dist.barrier()


def hang_or_die(rank):
    if rank == 0:
        time.sleep(600)
    os._exit(7)


def sleep_for_ever(rank):
    time.sleep(600)


def test_results_come_back_by_rank_from_processes_of_one_thread():
    assert run_on_ranks(2, total, 5) == [(11, 1), (11, 1)]


def test_the_error_of_one_rank_is_reported_and_ends_the_others():
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 .*rank 1 failed:.*lost token"):
        run_on_ranks(2, fail_on_rank_1)


def test_a_rank_that_dies_is_named_with_its_status():
    with pytest.raises(RuntimeError, match=r"rank 0 was still running and was killed\nrank 1 ended with status 7"):
        run_on_ranks(2, hang_or_die)


def test_a_hang_is_an_error():
    with pytest.raises(RuntimeError, match="rank 0 was still running and was killed"):
        run_on_ranks(1, sleep_for_ever, time_limit=8)
