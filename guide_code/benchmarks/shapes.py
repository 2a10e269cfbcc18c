"""The layers that are measured, the tokens they get and the experts these choose.

T tokens, D hidden size, I expert intermediate size, E experts, K choices per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from guide_code.benchmarks.timing import available_bytes
from guide_code.config import nearest
from guide_code.presets import PRESETS, preset

ROUTINGS = ("balanced", "zipf")


class Shape(NamedTuple):
    """Sizes of a layer of experts."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def numbers(self) -> int:
        """Of all experts: 3 x E x I x D."""
        return 3 * self.num_experts * self.intermediate_size * self.hidden_size


SHAPES = {
    "fine": Shape("fine", 64, 8, 1024, 384),
    "coarse": Shape("coarse", 8, 2, 1024, 3584),
    "small": Shape("small", 16, 2, 256, 128),
    "tiny": Shape("tiny", 8, 2, 64, 32),
}
"""Many small experts; few large ones (Mixtral 8x7B with a quarter of its widths); one for a page; one for tests."""


def shape_of(name: str, budget: int | None = None) -> Shape:
    """The shape called ``name``: one of :data:`SHAPES`, or a preset with its widths halved until it fits.

    Args:
        name: of a shape or a preset with experts.
        budget: bytes that the float32 weights of one layer may take; ``None``: a thirty-second of the memory that is
            available, since a check in float64 and gradients come on top.

    Raises:
        ValueError: nothing has that name, or the preset has no experts.
    """
    if name in SHAPES:
        return SHAPES[name]
    if name not in PRESETS:
        raise ValueError(f"no shape or preset is called {name!r}{nearest(name, (*SHAPES, *PRESETS))}")
    config = preset(name)
    if config.moe is None:
        raise ValueError(f"preset {name!r} has no experts: there is nothing to measure")
    budget = available_bytes() // 32 if budget is None else budget
    moe, scale = config.moe, 1
    shape = Shape(name, moe.num_experts, moe.top_k, config.hidden_size, moe.moe_intermediate_size)
    while shape.numbers * 4 > budget and min(shape.hidden_size, shape.intermediate_size) >= 128:
        scale *= 2
        shape = shape._replace(hidden_size=shape.hidden_size // 2, intermediate_size=shape.intermediate_size // 2)
    return shape if scale == 1 else shape._replace(name=f"{name} / {scale}")


def choices(num_tokens: int, shape: Shape, routing: str, generator: torch.Generator) -> Tensor:
    """(T, K) expert ids, distinct within a token.

    Args:
        num_tokens: T.
        shape: of the layer.
        routing: "balanced": every expert gets as many tokens as every other, give or take one. "zipf": the r-th most
            popular expert is wanted 1/r as much as the first; which one that is changes with the generator.
        generator: of random numbers.

    Raises:
        ValueError: the routing is not known.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {list(ROUTINGS)}, got {routing!r}{nearest(routing, ROUTINGS)}")
    experts_E = torch.randperm(shape.num_experts, generator=generator)
    if routing == "balanced":
        places_N = torch.arange(num_tokens * shape.top_k) % shape.num_experts
        return experts_E[places_N].view(num_tokens, shape.top_k)[torch.randperm(num_tokens, generator=generator)]
    popularity_E = -torch.arange(1, shape.num_experts + 1).log()
    noise_TE = torch.empty(num_tokens, shape.num_experts).exponential_(generator=generator).log().neg()  # Gumbel
    return experts_E[(popularity_E + noise_TE).topk(shape.top_k, dim=1).indices]
