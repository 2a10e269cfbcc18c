"""Context parallelism: every rank holds a part of each sequence, and attention gathers the keys of the parts before.

All-gather of keys and values, as in Llama 3, Grattafiori et al. 2024 (arXiv:2407.21783), section 3.3.2: they are few
where heads share them. To attention the other ranks look like a cache, so it needs no change. Parts are contiguous:
the last rank attends to most; the zigzag order of that paper, which evens this out, is not here.

B batch, S tokens of this rank, M tokens of this rank and those before it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from guide_code.balancer import Balancer
from guide_code.moe import MoE
from guide_code.transformer import Transformer


class GatheredKeys:
    """A cache for one call of a model: the past of this rank's part is on the ranks before it.

    Args:
        valid_BS: True where a token of this rank is real.
        layers: of the model.
        max_length: of the model.
        group: the ranks, in the order of their parts.
    """

    length = 0

    def __init__(self, valid_BS: Tensor, layers: int, max_length: int, group: dist.ProcessGroup):
        self.group, self.before = group, dist.get_rank(group) + 1
        self.layers, self.max_length = [self] * layers, max_length // dist.get_world_size(group)
        parts = [torch.empty_like(valid_BS) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, valid_BS.contiguous(), group=group)
        self.valid_BM = torch.cat(parts[: self.before], dim=1)

    def append(self, keys: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (B, U, M, A) from those of this rank; or validity (B, M) and the real past (B, 1)."""
        if values is None:
            return self.valid_BM, self.valid_BM[:, : -keys.shape[1]].sum(dim=1, keepdim=True)
        whole = [torch.cat(all_gather(part.contiguous(), self.group)[: self.before], dim=2) for part in (keys, values)]
        return whole[0], whole[1]


def context_parallel(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Let a model take this rank's part of every sequence and of its mask, from :func:`part_of`; in place.

    Gradients are to be averaged over the ranks, as under data parallelism; the loss: :func:`mean_over_tokens`.

    Raises:
        ValueError: a layer does not see its whole past.
    """
    if any(block.reach != (None, False) for block in model.blocks):
        raise ValueError("keys are gathered from the first token: give full_attention layers, not sliding or chunked")
    for module in model.modules():
        if isinstance(module, MoE) and isinstance(module.balancer, Balancer):
            module.balancer.set_groups(token_group=group)

    def with_cache(_, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        mask_BS = given.get("mask_BS")
        valid_BS = torch.ones_like(args[0], dtype=torch.bool) if mask_BS is None else mask_BS.bool()
        return args, given | {"cache": GatheredKeys(valid_BS, len(model.blocks), model.max_length, group)}

    model.register_forward_pre_hook(with_cache, with_kwargs=True)
    return model


def part_of(whole_BS: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of tokens, targets or a mask.

    Raises:
        ValueError: the ranks do not divide the length.
    """
    ranks, length = dist.get_world_size(group), whole_BS.shape[1]
    if length % ranks:
        raise ValueError(f"cp={ranks} must divide the sequence of {length} tokens: pad to {length + -length % ranks}")
    return whole_BS.chunk(ranks, dim=1)[dist.get_rank(group)]


def mean_over_tokens(losses: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From the losses of this rank's real tokens: what, averaged over ranks, is the mean over all their tokens."""
    total = torch.tensor(len(losses), device=losses.device)
    dist.all_reduce(total, group=group)
    return losses.sum() * dist.get_world_size(group) / total.clamp_min(1)
