"""What balancers gathered in a step, as metrics; then the step of their biases."""

from typing import Any

from guide_code.balance import max_violation
from guide_code.balancer import Balancer
from guide_code.moe import MoE


def step_balancers(layers: list[MoE]) -> dict[str, Any]:
    """Balancing losses, load and bias update of the step that ended."""
    balancers = [layer.balancer for layer in layers if isinstance(layer.balancer, Balancer)]
    if not balancers:
        return {}
    losses = [balancer.losses() for balancer in balancers]
    for layer in layers:
        if isinstance(layer.balancer, Balancer):
            layer.balancer.step(layer.router)
    metrics = {name: sum(values[name].item() for values in losses) / len(losses) for name in losses[0]}
    counts = [balancer.last_counts for balancer in balancers]
    metrics["max_violation"] = max(max_violation(counts_E).item() for counts_E in counts)
    return metrics | {"counts": [counts_E.tolist() for counts_E in counts]}
