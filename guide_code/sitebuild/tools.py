"""What the tools in the pages know of the package, inlined into the page: a page opened from disk cannot fetch."""

import json
from dataclasses import asdict
from typing import Any

from guide_code.balance import CONVENTIONS
from guide_code.presets import preset

FAMILIES = {
    "Mixtral": "mixtral-8x7b",
    "Qwen1.5-MoE": "qwen1.5-moe-a2.7b",
    "Qwen3-MoE": "qwen3-30b-a3b",
    "OLMoE": "olmoe-1b-7b",
    "DeepSeek-V2": "deepseek-v2",
    "DeepSeek-V3": "deepseek-v3",
    "Kimi K2": "kimi-k2",
    "gpt-oss": "gpt-oss-20b",
}
MOST_CHOICES, GROUPS, KEPT_GROUPS = 4, 4, 2


def routing_families() -> dict[str, dict[str, Any]]:
    """How each family routes, cut down to the 8 experts of the playground: at most 4 choices, and 2 of 4 groups."""
    families = {}
    for family, name in FAMILIES.items():
        moe = preset(name).moe
        assert moe is not None
        grouped = moe.num_groups > 1
        families[family] = {
            "top_k": min(moe.top_k, MOST_CHOICES),
            "score_fn": moe.score_fn,
            "norm_topk_prob": moe.norm_topk_prob,
            "routed_scaling_factor": moe.routed_scaling_factor,
            "num_groups": GROUPS if grouped else 1,
            "top_k_groups": KEPT_GROUPS if grouped else 1,
            "group_score": moe.group_score,
        }
    return families


def routing_data() -> str:
    """The element that the routing playground reads: the rules of the conventions, and the families."""
    rules = {name: asdict(rule) for name, rule in CONVENTIONS.items()}
    return inline("routing-data", {"conventions": rules, "families": routing_families()})


def inline(name: str, data: Any) -> str:
    """A script element of data, which no text in it can end."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
