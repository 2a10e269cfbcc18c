"""Training on ranks against one process with the same groups: losses, every gradient, norm, bias, the curve."""

import functools

import pytest
import torch
from counting import relative_rms
from ranks import run_on_ranks
from training import train_alone, train_on_ranks

from guide_code.parallel.expert_variants import DeduplicatedExpertParallel, PaddedExpertParallel

RANKS = 4
LAYOUTS = {
    "dp 4, zero 1": dict(layout=dict(dp=4), zero=1),
    "dp 4, zero 2": dict(layout=dict(dp=4), zero=2),
    "dp 4, zero 3": dict(layout=dict(dp=4), zero=3),
    "ep 2 x edp 2, zero 1": dict(layout=dict(dp=4, ep=2), zero=1),
    "ep 2 x edp 2, zero 3": dict(layout=dict(dp=4, ep=2), zero=3),
    "ep 4, zero 3": dict(layout=dict(dp=4, ep=4), zero=3),
    "ep 4, padded": dict(layout=dict(dp=4, ep=4), variant=PaddedExpertParallel),
    "ep 2, deduplicated": dict(layout=dict(dp=4, ep=2), variant=DeduplicatedExpertParallel),
    "ep 2, global": dict(layout=dict(dp=4, ep=2), convention="megatron_global"),
    "ep 2, sequence": dict(layout=dict(dp=4, ep=2), convention="sequence"),
    "ep 4, dropping": dict(layout=dict(dp=4, ep=4), capacity_factor=1.0),
    "ep 2, float64": dict(layout=dict(dp=4, ep=2), dtype=torch.float64),
    "ep 4, float64, global": dict(layout=dict(dp=4, ep=4), dtype=torch.float64, convention="megatron_global"),
}


QUICK = ["dp 4, zero 3", "ep 2 x edp 2, zero 1", "ep 4, dropping", "ep 4, float64, global"]
"""Run by ``make test``; ``make test-full`` runs the others."""


def on_ranks(rank, names):
    results = {name: train_on_ranks(rank, **LAYOUTS[name]) for name in names}
    return results if rank == 0 else None


@functools.cache
def results(quick):
    names = [name for name in LAYOUTS if (name in QUICK) == quick]
    return run_on_ranks(RANKS, on_ranks, names, time_limit=250)[0]


@functools.cache
def alone(**how):
    return train_alone(RANKS, **how)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_equal_to_one_process(name):
    how = {k: v for k, v in LAYOUTS[name].items() if k in ("convention", "dtype", "capacity_factor")}
    wanted, found = alone(**how), results(name in QUICK)[name]
    tolerance = 1e-12 if how.get("dtype") == torch.float64 else 2e-5
    for key in ("losses", "norms"):
        actual, expected = (torch.tensor(r[key], dtype=torch.float64) for r in (found, wanted))
        assert relative_rms(actual, expected) <= tolerance, key
    for key in ("gradients", "parameters"):
        assert found[key].keys() == wanted[key].keys()
        for parameter, value in wanted[key].items():
            assert value.any() and relative_rms(found[key][parameter], value) <= tolerance, (key, parameter)
    for step_found, step_wanted in zip(found["balancing"], wanted["balancing"], strict=True):
        for layer_found, layer_wanted in zip(step_found, step_wanted, strict=True):
            assert layer_found == pytest.approx(layer_wanted, rel=tolerance)
    for key in ("bias", "counts"):
        assert all(torch.equal(a, b) and a.any() for a, b in zip(found[key], wanted[key], strict=True)), key
