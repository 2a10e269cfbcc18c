"""Router replay: force the choices that another run made, while the weights follow the present router.

Two engines round differently, so a token near a tie goes to other experts in training than it did in serving. Rollout
routing replay (R3), Ma et al. 2025 (arXiv:2510.11370), records the choices of one and replays them in the other.
Copy with top_k.py into one package: needs torch only.

T tokens, E experts, K choices per token, D hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from .top_k import Routing, TopKRouter, top_k_routing


class ReplayRouter(nn.Module):
    """A router whose choice is given. Scores, weights and their gradients are those of the router inside.

    A recording is the ``ids`` of the ``Routing`` that a forward returned. Every forward uses the one it was made with,
    also the recompute of activation checkpointing. Empty slots of the recording stay empty.

    Args:
        router: what gives the logits, and how scores become weights.
        ids_TK: the recorded experts of every token, int64; an id outside [0, E) is an empty slot.
    """

    def __init__(self, router: TopKRouter, ids_TK: Tensor):
        super().__init__()
        self.router = router
        self.ids = ids_TK

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, tokens_T: Tensor | None = None) -> Routing:
        """Route tokens ``x_TD`` as recorded.

        Raises:
            ValueError: the recording has another number of tokens.
        """
        logits_TE = self.router(x_TD, mask_T, tokens_T).logits
        return top_k_routing(
            logits_TE, self.router.top_k, ids_TK=self.ids.to(x_TD.device), mask_T=mask_T, **self.router.options
        )


@contextmanager
def replay_routing(model: nn.Module, recorded: Sequence[Routing | None]) -> Iterator[None]:
    """Inside the ``with`` block every MoE layer of ``model`` routes as recorded.

    Keep the backward pass inside, for the recompute of activation checkpointing; step balancers, and save
    checkpoints, outside.

    Args:
        model: its layers with a submodule called ``router`` are taken in the order of ``model.modules()``.
        recorded: one ``Routing`` per layer, as a forward of the model returned them; None for a dense layer.

    Raises:
        ValueError: there is not one recording per layer.
    """
    layers = [(module, getattr(module, "router", None)) for module in model.modules()]
    layers = [(layer, router) for layer, router in layers if isinstance(router, TopKRouter)]
    sparse = [routing for routing in recorded if routing is not None]
    if len(layers) != len(sparse):
        raise ValueError(f"{len(sparse)} recordings for {len(layers)} MoE layers")
    try:
        for (layer, router), routing in zip(layers, sparse, strict=True):
            layer.router = ReplayRouter(router, routing.ids)
        yield
    finally:
        for layer, router in layers:
            layer.router = router
