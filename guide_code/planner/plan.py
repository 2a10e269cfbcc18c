"""Memory, operations, traffic and time of one training step, per rank, under given sizes of parallelism.

Dense parameters, gradients and optimizer state are sharded over dp x cp, those of experts over edp, by ZeRO's stages;
tp divides tokens outside matrices as well (sequence parallelism, arXiv:2205.05198). Shards count as equal, loads of
experts as even. Under ZeRO 1 and 2 parameters are gathered once a step, as in the paper; FSDP2 gathers them for every
micro-batch.
"""

import functools
from dataclasses import dataclass, field

from guide_code.config import ModelConfig
from guide_code.parallel.mesh import ParallelSizes, check_experts
from guide_code.parallel.pipeline import cut_layers
from guide_code.planner.layers import Layer, layers_of
from guide_code.planner.traffic import Traffic, exchange, point_to_point, ring

BYTES = {"parameters": 2, "gradients": 2, "optimizer": 12}
"""Of a parameter: Rajbhandari et al. 2019 (arXiv:1910.02054), section 3.1. Float32 masters with float32 gradients and
Adam, as FSDP2 keeps them, take the same 16."""
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}
"""Stages per rank."""
E = 2  # bytes of a bfloat16 activation


@dataclass(frozen=True)
class Job:
    """What a step computes.

    Raises:
        ValueError: a number is below 1, or a word is not known.
    """

    sequence: int = 4096
    batch: int = 512
    """Sequences of a step, over all ranks."""
    micro_batch: int = 1
    """Sequences that a rank computes at once."""
    zero: int = 3
    recompute: bool = False
    """Keep the inputs of blocks only, and compute the blocks again in the backward."""
    schedule: str = "1F1B"

    def __post_init__(self):
        for name in ("sequence", "batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1: give a positive number")
        if self.zero not in (1, 2, 3):
            raise ValueError(f"zero={self.zero} is no ZeRO stage: give 1, 2 or 3")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not known: give one of {', '.join(SCHEDULES)}")


@dataclass(frozen=True)
class Hardware:
    """Peak rates as vendors state them; defaults: H100 SXM, dense bfloat16, NVLink and 400 Gb/s per GPU, one way."""

    hbm_bytes: float = 80e9
    peak_flops: float = 989e12
    intra_bytes: float = 450e9
    inter_bytes: float = 50e9
    gpus_per_node: int = 8
    efficiency: float = 0.5
    """Part of the peak of operations that is reached: an assumption, not a measurement."""
    reserve: float = 0.1
    """Part of the memory kept free for libraries, buffers of collectives and fragmentation: an assumption."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "reserve" and value <= 0:
                raise ValueError(f"{name}={value} must be above 0: give what the machine has")
        for name, top in (("efficiency", 1.0), ("reserve", 0.99)):
            if not 0 <= getattr(self, name) <= top:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and {top}: give a part of the whole")


@dataclass(frozen=True)
class Stage:
    """Every rank of one pipeline stage."""

    dense_parameters: float
    """That the rank computes with, before ZeRO."""
    expert_parameters: float
    memory: dict[str, float]
    """Bytes by what they hold."""
    flops: float
    """Of a step."""
    traffic: dict[str, Traffic]
    """By axis; "dp" and "edp" hold gradients and gathered parameters."""
    compute_seconds: float
    blocking_seconds: float
    """Traffic that the next operation waits for: tp, cp, ep, etp, pp."""
    sharding_seconds: float
    """Traffic of dp and edp, which can hide behind operations."""

    @property
    def bytes(self) -> float:
        """All memory."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """What a layout takes."""

    sizes: ParallelSizes
    job: Job
    micro_batches: int
    stages: list[Stage]
    bubble: float
    """Idle part of the time."""
    seconds: float
    """A step: the slowest stage's operations and blocking traffic, and what of the sharding traffic exceeds the
    operations, stretched by the bubble."""
    tokens_per_second: float
    misfits: list[str] = field(default_factory=list)
    """What does not fit, and why."""


def make_plan(config: ModelConfig, sizes: ParallelSizes, job: Job, hardware: Hardware) -> Plan:
    """Plan a step.

    Raises:
        ValueError: the layout is impossible for this model or batch; the message names field, value and fix.
    """
    micro_batches = _check(config, sizes, job)
    first, blocks, last = layers_of(config, job.sequence, E)
    per_rank = SCHEDULES[job.schedule] if sizes.pp > 1 else 1
    bounds = _cut(tuple(b.flops + b.expert_flops for b in blocks), sizes.pp * per_rank)
    stages = []
    for rank in range(sizes.pp):
        held = [blocks[n] for part in range(per_rank) for n in range(*bounds[rank + part * sizes.pp])]
        ends = [first] * (rank == 0), [last] * (rank == sizes.pp - 1)
        in_flight = pipeline_held(job.schedule, rank, sizes.pp, micro_batches)
        stages.append(_stage(config, sizes, job, hardware, micro_batches, held, *ends, in_flight, per_rank))
    bubble = pipeline_bubble(job.schedule, sizes.pp, micro_batches)
    busy = max(
        s.compute_seconds + s.blocking_seconds + max(0.0, s.sharding_seconds - s.compute_seconds) for s in stages
    )
    seconds = busy / (1 - bubble)
    room = hardware.hbm_bytes * (1 - hardware.reserve)
    misfits = [_misfit(n, stage, room, job) for n, stage in enumerate(stages) if stage.bytes > room]
    return Plan(
        sizes, job, micro_batches, stages, bubble, seconds, job.batch * job.sequence / seconds, misfits
    )  # fmt: skip


_cut = functools.lru_cache(maxsize=64)(cut_layers)  # a search cuts the same model into as many stages again and again


def pipeline_bubble(schedule: str, stages: int, micro_batches: int) -> float:
    """Idle part of the time: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2."""
    return (stages - 1) / (SCHEDULES[schedule] * micro_batches + stages - 1)


def pipeline_held(schedule: str, rank: int, stages: int, micro_batches: int) -> float:
    """Micro-batches whose activations a rank holds at most; part of a rank's layers counts as that part."""
    if schedule == "GPipe" or stages == 1:
        return micro_batches if schedule == "GPipe" else 1
    if schedule == "1F1B":
        return min(micro_batches, stages - rank)
    return min(2 * micro_batches, 2 * (stages - rank - 1) + stages + 1) / 2


def _check(config: ModelConfig, sizes: ParallelSizes, job: Job) -> int:
    if config.moe is not None:
        check_experts(sizes, config.moe.num_experts)
        if config.moe.moe_intermediate_size % sizes.etp:
            raise ValueError(
                f"etp={sizes.etp} must divide moe_intermediate_size={config.moe.moe_intermediate_size}: "
                "give a smaller power of two"
            )
    elif sizes.ep * sizes.etp > 1:
        raise ValueError(f"ep={sizes.ep} and etp={sizes.etp} split experts, and the model has none: give 1")
    heads = "num_heads" if config.kv_lora_rank is not None else "num_kv_heads"
    if getattr(config, heads) % sizes.tp:
        raise ValueError(f"tp={sizes.tp} must divide {heads}={getattr(config, heads)}: give a divisor")
    if job.sequence % (sizes.cp * sizes.tp):
        raise ValueError(f"cp={sizes.cp} x tp={sizes.tp} must divide sequence={job.sequence}: give a divisor")
    if job.sequence > config.max_length:
        raise ValueError(f"sequence={job.sequence} exceeds max_length={config.max_length}: give at most that")
    if config.tie_embeddings and sizes.pp > 1:
        raise ValueError(f"pp={sizes.pp} parts the embedding from the head, which the model ties: give pp=1")
    if config.layer_types is not None and sizes.pp > 1:
        raise ValueError(f"pp={sizes.pp}: windows of attention cannot be pipelined here: give pp=1")
    stages = sizes.pp * (SCHEDULES[job.schedule] if sizes.pp > 1 else 1)
    if stages > config.num_layers:
        raise ValueError(f"pp={sizes.pp} makes {stages} stages of num_layers={config.num_layers}: give a smaller pp")
    if job.batch % (sizes.dp * job.micro_batch):
        raise ValueError(
            f"batch={job.batch} must be a multiple of dp={sizes.dp} x micro_batch={job.micro_batch}: "
            f"give batch={-(-job.batch // (sizes.dp * job.micro_batch)) * sizes.dp * job.micro_batch}"
        )
    return job.batch // (sizes.dp * job.micro_batch)


def _stage(
    config: ModelConfig,
    sizes: ParallelSizes,
    job: Job,
    hardware: Hardware,
    micro_batches: int,
    blocks: list[Layer],
    first: list[Layer],
    last: list[Layer],
    in_flight: float,
    per_rank: int,
) -> Stage:
    parts = [*first, *blocks, *last]
    dense = {id(p): p.split / sizes.tp + p.copied for p in parts}
    experts = sum(p.experts for p in parts) / (sizes.ep * sizes.etp)
    total = sum(p.split for p in parts) / sizes.tp + sum(p.copied for p in parts)
    memory = {}
    for name, since in (("parameters", 3), ("gradients", 2), ("optimizer", 1)):
        sharded = job.zero >= since
        memory[f"dense {name}"] = BYTES[name] * total / (sizes.dp * sizes.cp if sharded else 1)
        memory[f"expert {name}"] = BYTES[name] * experts / (sizes.edp if sharded else 1)
    biggest = max(dense[id(p)] * (sizes.dp * sizes.cp > 1) + _experts(p, sizes) * (sizes.edp > 1) for p in parts)
    # One block's parameters gathered and the next one's on their way (ZeRO-3), one block's gradients (ZeRO-2 and 3).
    memory["gathered"] = biggest * (2 * BYTES["parameters"] * (job.zero == 3) + BYTES["gradients"] * (job.zero >= 2))

    tokens = job.micro_batch * job.sequence // (sizes.cp * sizes.tp)
    whole = tokens * sum(_saved(b, sizes) for b in blocks)
    ends = tokens * sum(p.saved for p in (*first, *last))
    logits = tokens * (E + 4) * config.vocab_size * bool(last)  # as computed and in float32, until the loss is done
    inputs = tokens * E * config.hidden_size * len(blocks)
    working = tokens * max(_saved(b, sizes) for b in blocks)
    held = (inputs if job.recompute else whole) * in_flight + (working if job.recompute else 0)
    memory["activations"] = held + ends * max(1.0, in_flight if first else 1.0) + logits

    step_tokens = job.batch * job.sequence
    again = 1 if job.recompute else 0
    inside = (3 + again) * sum(b.flops + b.expert_flops for b in blocks)
    row = sizes.dp * sizes.cp * sizes.tp
    flops = step_tokens * (inside + 3 * sum(p.flops for p in last)) / row
    traffic = _traffic(config, sizes, job, hardware, micro_batches, parts, total, experts, tokens)
    if sizes.pp > 1:
        crossings = 2 * per_rank - (1 if first else 0) - (1 if last else 0)
        sent = crossings * micro_batches * tokens * E * config.hidden_size
        traffic["pp"] = point_to_point(sizes, hardware.gpus_per_node, sent)
    seconds = {a: t.intra / hardware.intra_bytes + t.inter / hardware.inter_bytes for a, t in traffic.items()}
    sharding = seconds.get("dp", 0.0) + seconds.get("edp", 0.0)
    compute = flops / (hardware.peak_flops * hardware.efficiency)
    return Stage(total, experts, memory, flops, traffic, compute, sum(seconds.values()) - sharding, sharding)


def _experts(part: Layer, sizes: ParallelSizes) -> float:
    return part.experts / (sizes.ep * sizes.etp)


def _saved(block: Layer, sizes: ParallelSizes) -> float:
    """Per token: the inner width is divided by etp and the tokens of its ranks are gathered, so only rows grow."""
    return block.saved + block.saved_rows * sizes.etp + block.saved_inner


def _traffic(
    config: ModelConfig,
    sizes: ParallelSizes,
    job: Job,
    hardware: Hardware,
    micro_batches: int,
    parts: list[Layer],
    dense: float,
    experts: float,
    tokens: int,
) -> dict[str, Traffic]:
    node, forwards = hardware.gpus_per_node, 2 if job.recompute else 1
    gathers = 2 * micro_batches if job.zero == 3 else 1
    reduces = micro_batches if job.zero >= 2 else 1
    once = gathers * BYTES["parameters"] + reduces * BYTES["gradients"]
    found = {"dp": ring(sizes, "fsdp", node, once * dense), "edp": ring(sizes, "edp", node, once * experts)}
    # Gather before and scattered sum after matrices; backward the same, and the gathered input again.
    sums = sum(p.sums for p in parts) * (2 * forwards + 3) * micro_batches
    found["tp"] = ring(sizes, "tp", node, sums * tokens * sizes.tp * E * config.hidden_size)
    # Keys and values go round; back they go again, with their gradients.
    channels = sum(p.exchanged for p in parts) / sizes.tp * (forwards + 2) * micro_batches
    found["cp"] = ring(sizes, "cp", node, channels * tokens * sizes.tp * sizes.cp * E)
    sparse = sum(p.experts > 0 for p in parts) * micro_batches
    if config.moe is not None and sparse:
        experts_too = {"top_k": config.moe.top_k, "num_experts": config.moe.num_experts}
        found["ep"] = exchange(
            sizes, node, tokens=tokens, hidden_size=config.hidden_size, element_size=E,
            forwards=forwards * sparse, backwards=sparse, **experts_too,
        )  # fmt: skip
        # Rows to all slices of their expert in bfloat16, sums back in float32; the backward mirrors that.
        rows = tokens * config.moe.top_k * sizes.etp * config.hidden_size * (E + 4)
        found["etp"] = ring(sizes, "etp", node, rows * (forwards + 1) * sparse)
    return {axis: t for axis, t in found.items() if t.intra or t.inter}


def _misfit(number: int, stage: Stage, room: float, job: Job) -> str:
    part, size = max(stage.memory.items(), key=lambda item: item[1])
    if part == "activations":
        fix = "a smaller micro_batch, more cp or tp" if job.recompute else "recompute, a smaller micro_batch, more cp"
    elif part == "gathered":
        fix = "more tp, ep or etp"
    elif part.startswith("expert"):
        fix = "more ep, etp or pp" if job.zero == 3 else f"zero=3 instead of {job.zero}, more ep, etp or pp"
    else:
        fix = "more ranks, tp or pp" if job.zero == 3 else f"zero=3 instead of {job.zero}, more tp or pp"
    return (
        f"stage {number} needs {stage.bytes / 1e9:.1f} GB of {room / 1e9:.1f} GB; "
        f"the largest part is {part}, {size / 1e9:.1f} GB: give {fix}"
    )
