"""What the papers say, one token at a time in float64. Slow, obvious, and independent of the rest of the package."""

import math

import torch
from torch import Tensor


def oracle_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """Weighted sum of the chosen experts (Shazeer et al. 2017, arXiv:1701.06538, eq. 1), differentiable, (T, D)."""
    num_experts, hidden_size = down_proj.shape[:2]
    rows = []
    for token, ids in enumerate(ids_TK.tolist()):
        row_D = torch.zeros(hidden_size, dtype=torch.float64)
        for slot, expert in enumerate(ids):
            if not 0 <= expert < num_experts:
                continue
            up = gate_up_proj[expert].double() @ x_TD[token].double()
            if gate_up_proj_bias is not None:
                up = up + gate_up_proj_bias[expert].double()
            if activation == "swigluoai":  # gpt-oss: rows of gate and up alternate
                gate, linear = up[0::2].clamp(max=7), up[1::2].clamp(-7, 7)
                hidden_I = gate / (1 + torch.exp(-1.702 * gate)) * (linear + 1)
            elif gated:
                half = len(up) // 2
                hidden_I = _activation(up[:half], activation) * up[half:]
            else:
                hidden_I = _activation(up, activation)
            y_D = down_proj[expert].double() @ hidden_I
            if down_proj_bias is not None:
                y_D = y_D + down_proj_bias[expert].double()
            row_D = row_D + weights_TK[token, slot].double() * y_D
        rows.append(row_D)
    return torch.stack(rows) if rows else torch.zeros(0, hidden_size, dtype=torch.float64)


def oracle_routing(
    logits_TE: Tensor,
    top_k: int,
    *,
    score_fn: str = "softmax",
    norm_topk_prob: bool = True,
    routed_scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_k_groups: int = 1,
    group_score: str = "top2_sum",
    expert_bias_E: Tensor | None = None,
) -> tuple[list[list[float]], list[list[int]], list[list[float]]]:
    """Weights, ids and scores of every token in plain Python (DeepSeek-V3, arXiv:2412.19437, eq. 12-16)."""
    all_weights, all_ids, all_scores = [], [], []
    for logits in logits_TE.double().tolist():
        if score_fn == "softmax":
            top = max(logits)
            total = sum(math.exp(v - top) for v in logits)
            scores = [math.exp(v - top) / total for v in logits]
        elif score_fn == "sigmoid":
            scores = [1 / (1 + math.exp(-v)) for v in logits]
        else:
            scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
        bias = [0.0] * len(scores) if expert_bias_E is None else expert_bias_E.double().tolist()
        choice = [s + b for s, b in zip(scores, bias, strict=True)]
        size = len(scores) // num_groups
        groups = []
        for group in range(num_groups):
            best = sorted(choice[group * size : (group + 1) * size], reverse=True)
            groups.append((-(best[0] if group_score == "max" else sum(best[:2])), group))
        allowed = {group for _, group in sorted(groups)[:top_k_groups]}
        order = sorted((-value, expert) for expert, value in enumerate(choice) if expert // size in allowed)
        ids = [expert for _, expert in order[:top_k]]
        weights = [scores[expert] for expert in ids]
        total = sum(weights) if norm_topk_prob else 1.0
        all_weights.append([routed_scaling_factor * w / total for w in weights])
        all_ids.append(ids)
        all_scores.append(scores)
    return all_weights, all_ids, all_scores


def oracle_expert_choice(logits_TE: Tensor, capacity: int) -> tuple[list[list[float]], list[list[int]]]:
    """Weights and ids of every token in plain Python, E slots each (Zhou et al. 2022, arXiv:2202.09368, eq. 1)."""
    _, _, scores = oracle_routing(logits_TE, 1)
    num_experts = logits_TE.shape[1]
    chosen_by: list[list[tuple[float, int]]] = [[] for _ in scores]
    for expert in range(num_experts):
        best = sorted((-row[expert], token) for token, row in enumerate(scores))
        for value, token in best[:capacity]:
            chosen_by[token].append((value, expert))
    all_weights, all_ids = [], []
    for choices in chosen_by:
        empty = num_experts - len(choices)
        all_weights.append([-value for value, _ in sorted(choices)] + [0.0] * empty)
        all_ids.append([expert for _, expert in sorted(choices)] + [num_experts] * empty)
    return all_weights, all_ids


def oracle_kept(
    ids: list[list[int]], weights: list[list[float]], num_experts: int, capacity: int, *, priority: str
) -> list[list[bool]]:
    """Which assignments find a slot when they come to the experts one after the other (GShard, section 2.2)."""
    places = [(token, slot) for token, row in enumerate(ids) for slot in range(len(row))]
    if priority == "arrival":
        places.sort(key=lambda place: (place[1], place[0]))
    elif priority == "probability":
        places.sort(key=lambda place: -weights[place[0]][place[1]])
    else:
        assert priority == "tokens"
    used = [0] * num_experts
    kept = [[False] * len(row) for row in ids]
    for token, slot in places:
        expert = ids[token][slot]
        if 0 <= expert < num_experts and used[expert] < capacity:
            used[expert] += 1
            kept[token][slot] = True
    return kept


def oracle_load_balancing_loss(scores, ids, num_experts: int, *, convention: str) -> float:
    """E times the sum over experts of (fraction of assignments) x (mean share of the score); K times that for "hf".

    Switch (arXiv:2101.03961), eq. 4-6, with all K choices counted. ``scores`` and ``ids`` are lists over valid tokens.
    """
    top_k = len(ids[0])
    loss = 0.0
    for expert in range(num_experts):
        fraction = sum(row.count(expert) for row in ids) / (len(ids) * top_k)
        share = sum(row[expert] / sum(row) for row in scores) / len(scores)
        loss += num_experts * fraction * share
    return loss * top_k if convention == "hf" else loss


def _activation(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x.clamp_min(0)
