"""Layouts of a model on a number of ranks, the fastest that fit first."""

from collections.abc import Iterator
from dataclasses import replace

from guide_code.config import ModelConfig
from guide_code.parallel.mesh import ParallelSizes
from guide_code.planner.plan import Hardware, Job, Plan, make_plan


def suggest(config: ModelConfig, ranks: int, job: Job, hardware: Hardware, most: int = 10) -> list[Plan]:
    """Search sizes (powers of two below ``dp``, tp within a machine), ZeRO 1 to 3, with recomputation and without.

    Raises:
        ValueError: nothing fits; the message tells what the smallest layout lacks.
    """
    plans, refusals = [], []
    for sizes in layouts(ranks, hardware.gpus_per_node, config):
        for zero in (1, 2, 3):
            for recompute in (False, True):
                try:
                    plans.append(make_plan(config, sizes, replace(job, zero=zero, recompute=recompute), hardware))
                except ValueError as error:
                    refusals.append(str(error))
    fitting = [plan for plan in plans if not plan.misfits]
    if not plans:
        raise ValueError(f"gpus={ranks}: no layout is possible, for example because {refusals[0]}")
    if not fitting:
        least = min(plans, key=lambda plan: max(stage.bytes for stage in plan.stages))
        raise ValueError(f"gpus={ranks}: no layout fits. The smallest: {least.misfits[0]}; or give more gpus")
    return sorted(fitting, key=lambda plan: plan.seconds)[:most]


def layouts(ranks: int, gpus_per_node: int, config: ModelConfig) -> Iterator[ParallelSizes]:
    """Sizes whose product is ``ranks`` and that may suit the model."""
    experts = config.moe.num_experts if config.moe else 1
    for pp in _powers(config.num_layers):
        for tp in _powers(gpus_per_node):
            for cp in _powers(8):
                if ranks % (pp * tp * cp):
                    continue
                row = ranks // pp
                for ep in _powers(min(experts, row)):
                    if row % ep == 0 and experts % ep == 0:
                        yield ParallelSizes(pp=pp, dp=row // (tp * cp), cp=cp, tp=tp, ep=ep)


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]
