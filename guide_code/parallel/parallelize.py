"""One model onto two meshes: experts split over ``ep`` and sharded over their own copies, the rest sharded over data.

Expert parameters become DTensors, so that each knows its place among all experts: ``Shard(0)`` along ``ep``, then what
FSDP2 does along ``edp``. Their gradients are divided by the full data size, like everyone's: the sum over the tokens
that came to a rank holds those of ``ep`` ranks already.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from guide_code.balancer import Balancer
from guide_code.moe import MoE
from guide_code.parallel.data import shard
from guide_code.parallel.expert import ExpertParallel
from guide_code.parallel.mesh import ParallelSizes, check_experts
from guide_code.transformer import Transformer


def parallelize(
    model: Transformer,
    sizes: ParallelSizes,
    meshes: tuple[DeviceMesh, DeviceMesh],
    *,
    zero: int = 3,
    param_dtype: torch.dtype | None = None,
    variant: type[ExpertParallel] = ExpertParallel,
) -> Transformer:
    """Split and shard a model in place; every rank calls it with the same weights (or on the meta device).

    Every rank then trains on sequences of its own, with the mean loss of its own tokens; gradients are the averages
    over ranks.

    Args:
        model: as ``build_model`` made it, the same on every rank.
        sizes: dp and ep. The other axes are not made here.
        meshes: from ``build_meshes`` with these sizes.
        zero: ZeRO stage, see ``data.shard``.
        param_dtype: compute in this dtype; routers and combine weights stay in float32.
        variant: how tokens and experts come together.

    Raises:
        ValueError: an axis that is not for this function, or a layer whose experts ``ep`` does not divide.
    """
    for name in ("pp", "cp", "tp", "etp"):
        if getattr(sizes, name) != 1:
            raise ValueError(f"parallelize splits over dp and ep only, got {name}={getattr(sizes, name)}: give 1")
    dense, expert = meshes
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        check_experts(sizes, int(layer.experts.num_experts))  # pyright: ignore[reportArgumentType]
    for layer in layers:
        layer.experts = split_experts(layer.experts, expert, variant)
        shard([layer.experts], expert["edp"], zero=zero, param_dtype=param_dtype, cast_inputs=False)
        if param_dtype is not None:
            # A router in float32 of its own: the layer around it casts neither its parameters nor its output.
            shard([layer.router], dense["dp"], zero=zero)
        if isinstance(layer.balancer, Balancer):
            layer.balancer.set_groups(data_group=dense["dp"].get_group())
    shard([*model.blocks, model], dense["dp"], zero=zero, param_dtype=param_dtype, cast_inputs=False)
    return model


def split_experts(experts: nn.Module, mesh: DeviceMesh, variant: type[ExpertParallel]) -> ExpertParallel:
    """Keep this rank's experts of a module, as DTensors, behind ``variant``; names of parameters stay.

    Args:
        experts: a module whose parameters are stacked (E, ...), with ``num_experts``.
        mesh: the expert mesh, with axes "ep" and "edp".
        variant: how tokens and experts come together.
    """
    axis = mesh["ep"]
    for name, parameter in list(experts.named_parameters()):
        part = parameter.detach().chunk(axis.size())[axis.get_local_rank()].clone()
        local = DTensor.from_local(part, axis, [Shard(0)], run_check=False)
        owner, _, field = name.rpartition(".")
        setattr(experts.get_submodule(owner), field, nn.Parameter(local, requires_grad=parameter.requires_grad))
    experts.num_experts = int(experts.num_experts) // axis.size()  # pyright: ignore
    return variant(experts, axis.get_group(), gradient_scale=1 / axis.size())
