"""Routers: choose, for every token, the experts that will see it and how much each one counts.

One file per rule, each with the same ``forward(x_TD, mask_T, tokens_T) -> Routing``. ``top_k`` is the one to read
first, and the others need it beside them.
"""

from .expert_choice import ExpertChoiceRouter, expert_choice_routing
from .hashed import HashRouter, hash_table
from .quantile import QuantileRouter, quantile_bias
from .replay import ReplayRouter, replay_routing
from .sinkhorn import SinkhornRouter, sinkhorn_plan
from .sparse_mixer import SparseMixerRouter, sparse_mixer_ids, sparse_mixer_weights
from .top_k import GROUP_SCORES, SCORE_FNS, Routing, TopKRouter, top_k_routing

__all__ = [
    "GROUP_SCORES",
    "SCORE_FNS",
    "ExpertChoiceRouter",
    "HashRouter",
    "QuantileRouter",
    "ReplayRouter",
    "Routing",
    "SinkhornRouter",
    "SparseMixerRouter",
    "TopKRouter",
    "expert_choice_routing",
    "hash_table",
    "quantile_bias",
    "replay_routing",
    "sinkhorn_plan",
    "sparse_mixer_ids",
    "sparse_mixer_weights",
    "top_k_routing",
]
