"""Our experts inside transformers: ``register()``, then ``experts_implementation="guide"`` in any model.

transformers 5 lets models whose experts are decorated with ``use_experts_implementation`` choose a function for them by
name; this file adds one. The parameters stay transformers' own, so checkpoints, optimizers and adapters do not
change. Switch models take no part in that interface: :func:`speed_up_switch` is for them.
"""

from types import MethodType
from typing import Any

from torch import Tensor, nn

from guide_code.experts.grouped import grouped_experts
from guide_code.hf_flags import activation, flag, interface, obstacle, takes_part, up_name, what_is_unknown
from guide_code.hf_generic import generic_experts

NAME = "guide"


def register() -> None:
    """Add the experts implementation "guide" to transformers, for this process. Calling it again changes nothing.

    >>> register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="guide")

    or ``model.set_experts_implementation("guide")`` at any time. transformers ignores the choice without a word in
    models that have no place for it: :func:`explain` says what runs.

    Raises:
        ImportError: transformers is missing, or too old to have an experts interface.
    """
    interface().ExpertsInterface.register(NAME, guide_experts)


def guide_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls in place of the forward of an experts module; (T, D) in the dtype of ``hidden_states``.

    Args:
        self: the experts module; its flags say how its parameters are to be read.
        hidden_states: (T, D).
        top_k_index: (T, K) expert ids. An id outside [0, E) contributes exactly 0; expert parallelism gives such ids
            to the experts of other ranks.
        top_k_weights: (T, K).

    Raises:
        NotImplementedError: the module asks for what neither path computes; the message names class and flag.
    """
    if reason := obstacle(self):
        raise NotImplementedError(reason)
    up, down = getattr(self, up_name(self)), self.down_proj
    if flag(self, "is_transposed"):
        up, down = up.mT, down.mT  # views: no weight is copied
    has_bias, gated = flag(self, "has_bias"), flag(self, "has_gate")
    up_bias, down_bias = (getattr(self, f"{up_name(self)}_bias"), self.down_proj_bias) if has_bias else (None, None)
    arguments = (hidden_states, top_k_index, top_k_weights, up, down)
    if name := activation(self):
        biases = {"gate_up_proj_bias": up_bias, "down_proj_bias": down_bias}
        return grouped_experts(*arguments, **biases, activation=name, gated=gated)
    norm = self.post_expert_norm if flag(self, "has_post_expert_norm") else None
    between = self._apply_gate if gated else self.act_fn
    return generic_experts(*arguments, up_proj_bias=up_bias, down_proj_bias=down_bias, activate=between, norm=norm)


def explain(model: nn.Module) -> dict[str, str]:
    """What computes each experts module of a transformers model, by the module's name.

    Raises:
        ValueError: no module takes part in the experts interface, so ``experts_implementation`` is without effect.
    """
    found = {name: _explain(module) for name, module in model.named_modules() if takes_part(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that take part in transformers' experts interface: "
            "experts_implementation changes nothing in it (speed_up_switch is for Switch models)"
        )
    return found


def speed_up_switch(model: nn.Module) -> int:
    """Sort the tokens of each MoE layer of a Switch model once, in place of one search for every expert in use.

    Values, gradients and the numbers that dropout draws stay the same, on a CPU to the bit. Parameters, their names,
    the router and its capacity are untouched. Experts run as the modules that they are, so that hooks and adapters
    act. Call it before a model is wrapped for data parallelism.

    Returns:
        The number of layers changed by this call; 0 when all were changed before.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: the model has no such layer, or the experts of one are not as transformers made them. Nothing is
            changed then.
    """
    interface()
    from guide_code.hf_switch import SortedSwitchExperts, SwitchTransformersExperts

    found = {name: module for name, module in model.named_modules() if isinstance(module, SwitchTransformersExperts)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no SwitchTransformersSparseMLP: there is nothing to speed up")
    found = {name: module for name, module in found.items() if not isinstance(module, SortedSwitchExperts)}
    for name, module in found.items():
        replaced = "forward" in vars(module) and "_old_forward" not in vars(module)  # accelerate keeps the old one
        if replaced or type(module) is not SwitchTransformersExperts:
            raise ValueError(f"{name} ({type(module).__name__}) has another forward: call speed_up_switch before that")
    for module in found.values():
        module.__class__ = SortedSwitchExperts
        if "_old_forward" in vars(module):
            vars(module)["_old_forward"] = MethodType(SortedSwitchExperts.forward, module)
    return len(found)


def _explain(experts: Any) -> str:
    chosen = getattr(experts.config, "_experts_implementation", None)
    if chosen != NAME:
        return f"experts_implementation={chosen!r}, not {NAME!r}"
    if reason := obstacle(experts):
        return f"refused: {reason}"
    if name := activation(experts):
        return f"grouped_experts, activation {name!r}"
    return f"generic_experts, for {what_is_unknown(experts)}"
