"""Tensor and sequence parallelism over torch's DTensor: every rank computes a part of each dense matrix product.

Megatron-LM, Shoeybi et al. 2019 (arXiv:1909.08053), section 3: the first product of a pair is split by columns, the
second by rows, and one sum over ranks ends attention or feed-forward. Sequence parallel: Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.2: the sum leaves every rank a part of the sequence, which is all that norms, residuals
and experts need.

B batch, S sequence, D hidden size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from guide_code.attention import GroupedQueryAttention
from guide_code.balancer import Balancer
from guide_code.layers import HeadNorm
from guide_code.moe import MoE
from guide_code.parallel.expert import ScaleGradient
from guide_code.transformer import Transformer


def tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence: bool = False) -> Transformer:
    """Split attention, dense feed-forward layers and vocabulary over ranks, in place; all ranks get the same tokens.

    Every rank returns all logits and takes the loss of all tokens. No gradient is left to sum afterwards. MoE layers
    stay whole: without ``sequence`` each rank computes them for all tokens, with it for its part of the sequence; give
    ``ExpertParallel`` over the same ranks to hold a part of the experts only.

    Args:
        model: the same on every rank. ``gate_up_proj`` becomes :class:`GateUp`, for a split of the stacked rows would
            give the first ranks all gates and the last all ups.
        mesh: one dimension.
        sequence: keep a part of the sequence, which the ranks must divide, between the layers.

    Raises:
        ValueError: the ranks do not divide heads, a width or the vocabulary, or an attention cannot be split by heads.
    """
    _check(model, mesh.size())
    blocks: list[Any] = list(model.blocks)
    tied = model.head.weight is model.embedding.weight
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
        model.register_forward_pre_hook(lambda _, args: _check_length(args[0], mesh.size()))
    for index, block in enumerate(blocks):
        at = f"blocks.{index}"
        if sequence:
            plan[f"{at}.attention_norm"] = plan[f"{at}.ffn_norm"] = SequenceParallel(use_local_output=True)
            plan[f"{at}.attention"] = PrepareModuleInput(
                input_layouts=(between, None, None, None),  # hidden states; the other arguments are for all tokens
                desired_input_layouts=(Replicate(), None, None, None),
                use_local_output=True,
            )
        for name in ("q_proj", "k_proj", "v_proj"):
            plan[f"{at}.attention.{name}"] = ColwiseParallel()
        plan[f"{at}.attention.o_proj"] = RowwiseParallel(output_layouts=between)
        block.attention.num_heads //= mesh.size()
        block.attention.num_kv_heads //= mesh.size()
        for name in ("q_norm", "k_norm"):
            if isinstance(getattr(block.attention, name), HeadNorm):  # every rank has other heads of all tokens
                plan[f"{at}.attention.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        if not isinstance(block.ffn, MoE):
            dense, path = block.ffn.feed_forward, f"{at}.ffn.feed_forward"
            if dense.gated:
                dense.gate_up_proj = GateUp(dense.gate_up_proj)
            if sequence:
                path = f"{at}.ffn.layer.feed_forward"
                plan[path] = PrepareModuleInput(
                    input_layouts=between, desired_input_layouts=Replicate(), use_local_output=True
                )
            for name in ("gate_up_proj.gate", "gate_up_proj.up") if dense.gated else ("up_proj",):
                plan[f"{path}.{name}"] = ColwiseParallel()
            plan[f"{path}.down_proj"] = RowwiseParallel(output_layouts=between)
        elif sequence and isinstance(block.ffn.balancer, Balancer):
            block.ffn.balancer.set_groups(token_group=mesh.get_group())
        if sequence:
            block.ffn = OwnTokens(block.ffn, mesh, share=isinstance(block.ffn, MoE))
    parallelize_module(model, mesh, plan)
    for path, style in plan.items():
        for parameter in model.get_submodule(path).parameters() if isinstance(style, SequenceParallel) else ():
            parameter.register_hook(_sum_gradient)
    if tied:
        model.head.weight = model.embedding.weight
    return model


class GateUp(nn.Module):
    """The two halves of a ``gate_up_proj`` as two products, whose outputs stand one after the other again."""

    def __init__(self, both: nn.Linear):
        super().__init__()
        width, hidden_size = both.out_features // 2, both.in_features
        self.gate, self.up = (nn.Linear(hidden_size, width, both.bias is not None, "meta") for _ in range(2))
        for name, value in both.named_parameters():
            for half, part in zip((self.gate, self.up), value.detach().chunk(2), strict=True):
                setattr(half, name, nn.Parameter(part.clone(), requires_grad=value.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., 2 x width of this rank), the gate's first."""
        return torch.cat([self.gate(x), self.up(x)], dim=-1)


class OwnTokens(nn.Module):
    """A feed-forward layer, dense or MoE, that gets this rank's part of the sequence, and of mask and token ids.

    An MoE layer works inside as under data parallelism, where gradients are averages over ranks: what comes in from
    the layers above is multiplied by their number, what goes out to those below divided. So balancers and expert
    parallelism, which count on that, need not know. Parameters that expert parallelism did not split are averaged
    here, in the backward.

    Args:
        layer: with the interface of ``MoE``.
        mesh: the ranks that share the sequence.
        share: whether it is an MoE layer; a dense one is split by DTensor, which adds up.
    """

    def __init__(self, layer: nn.Module, mesh: DeviceMesh, share: bool):
        super().__init__()
        self.layer, self.group, self.share = layer, mesh.get_group(), share
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.averaged = []
        for name, parameter in list(layer.named_parameters()) if share else ():
            if not isinstance(parameter, DTensor):
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()])
                owner, _, field = name.rpartition(".")
                whole = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                setattr(layer.get_submodule(owner), field, whole)
                self.averaged.append(name)

    def forward(self, x_BSD: Tensor, mask_BS: Tensor | None = None, tokens_BS: Tensor | None = None) -> Any:
        """An ``MoEOutput`` for the tokens of this rank."""
        parts = [None if given is None else given.chunk(self.ranks, 1)[self.rank] for given in (mask_BS, tokens_BS)]
        if not self.share:
            return self.layer(x_BSD, *parts)
        local = {name: _Average.apply(self.layer.get_parameter(name), self.group) for name in self.averaged}
        x_BSD = ScaleGradient.apply(x_BSD, 1 / self.ranks)
        result = torch.func.functional_call(self.layer, local, (x_BSD, *parts))
        return result._replace(out=ScaleGradient.apply(result.out, self.ranks))


class _Average(torch.autograd.Function):
    """A parameter that is whole on every rank, as a plain tensor; its gradient is the average over ranks."""

    @staticmethod
    def forward(ctx, parameter: DTensor, group):
        ctx.group, ctx.mesh = group, parameter.device_mesh
        return parameter.to_local().detach()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return DTensor.from_local(grad / dist.get_world_size(ctx.group), ctx.mesh, [Replicate()], run_check=False), None


def _sum_gradient(grad: DTensor) -> DTensor:
    """SequenceParallel leaves every rank its share of a norm's gradient, a Partial, of which norms would be wrong."""
    return grad.redistribute(placements=[Replicate()])


def _check(model: Transformer, ranks: int) -> None:
    embedding: Any = model.embedding
    sizes = {"vocab_size": embedding.weight.shape[0]}
    for index, block in enumerate(model.blocks):
        attention: Any = block.attention
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        if (
            not isinstance(attention, GroupedQueryAttention)
            or attention.sinks is not None
            or not all(isinstance(norm, (HeadNorm, nn.Identity)) for norm in norms)
        ):
            raise ValueError(
                f"the attention of block {index} cannot be split by heads: give kv_lora_rank=None, "
                'attention_sinks=False and qk_norm "head", "l2" or None'
            )
        sizes |= {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
        if not isinstance(block.ffn, MoE):
            sizes["intermediate_size"] = block.ffn.feed_forward.down_proj.in_features  # pyright: ignore
    for name, size in sizes.items():
        if size % ranks:
            possible = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(f"tp must divide {name}: tp={ranks} does not divide {size}. Possible: {possible}")


def _check_length(tokens_BS: Tensor, ranks: int) -> None:
    length = tokens_BS.shape[1]
    if length % ranks:
        raise ValueError(f"tp={ranks} must divide the sequence of {length} tokens: pad to {length + -length % ranks}")
