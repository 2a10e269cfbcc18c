"""The ranks of a training run: what each takes of a batch, and what all must agree on. One process is one rank."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guide_code.parallel.data import clip_gradients_, gradient_norm, set_last_micro_batch
from guide_code.parallel.mesh import ParallelSizes, build_meshes, check_world_size
from guide_code.parallel.parallelize import parallelize
from guide_code.training.config import TrainConfig
from guide_code.transformer import Transformer


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that train one model."""

    rank: int = 0
    size: int = 1
    """Ranks that train on data of their own: all of them, under dp and ep."""
    zero: int = 3
    """ZeRO stage, see ``parallel.data``."""

    def check(self, config: TrainConfig) -> None:
        """Raise a ValueError unless every micro-batch can be dealt out evenly."""
        if config.batch_size % (config.accumulate * self.size):
            raise ValueError(
                f"batch_size={config.batch_size} must be a multiple of accumulate={config.accumulate} x "
                f"dp={self.size}: give {config.accumulate * self.size} or a multiple of it"
            )

    def share(self, part_BS: Tensor) -> Tensor:
        """The sequences of a micro-batch that this rank trains on."""
        return part_BS.chunk(self.size)[self.rank]

    def begin_micro_batch(self, model: nn.Module, last: bool) -> None:
        """Let gradients be added up until the ``last`` micro-batch where the ZeRO stage wants it so."""
        if self.size > 1:
            set_last_micro_batch(model, self.zero, last)

    def agree(self, loss: Tensor, interrupted: bool) -> tuple[Tensor, bool]:
        """The mean loss over ranks, and whether any of them was interrupted: all end after the same step."""
        if self.size == 1:
            return loss, interrupted
        both = torch.stack([loss.double(), torch.tensor(float(interrupted), device=loss.device).double()])
        dist.all_reduce(both)
        return (both[0] / self.size).to(loss.dtype), bool(both[1] > 0)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip the gradients of the whole model by their norm over all ranks, and return it as it was before."""
        if self.size == 1:
            return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norm = gradient_norm(model.parameters())
        clip_gradients_(model.parameters(), max_norm, norm)
        return norm


def start_ranks(sizes: ParallelSizes, device: torch.device, zero: int) -> tuple[Ranks, torch.device]:
    """Join the processes that ``torchrun`` started; alone without it. Returns the device of this rank as well.

    Raises:
        ValueError: their number is not that of the sizes; or sizes need several and there is no ``torchrun``.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_world_size(sizes, world_size)
    if world_size == 1:
        return Ranks(zero=zero), device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=10))
    return Ranks(dist.get_rank(), world_size, zero), device


def spread(model: Transformer, ranks: Ranks, sizes: ParallelSizes) -> Transformer:
    """The model over the ranks; as it is on one."""
    if ranks.size == 1:
        return model
    device = next(model.parameters()).device
    return parallelize(model, sizes, build_meshes(sizes, device.type), zero=ranks.zero)
