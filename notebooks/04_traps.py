# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   guide:
#     timeout: 120
# ---

# %% [markdown]
# # Ten traps
#
# Each section runs a mistake that has been made in public code, shows what it does, and then runs what is right. None of
# them raises an error. The model trains, a little worse than it could, and that is why they survive for months.
#
# Every right value below is also a test of this guide.

# %%
import torch
import torch.nn.functional as F

from guide_code.balance import (
    expert_counts,
    load_balancing_loss,
    max_violation,
    model_load_balancing_loss,
    update_expert_bias_,
)
from guide_code.capacity import apply_capacity
from guide_code.routers import Routing, TopKRouter, top_k_routing

torch.manual_seed(0)

# %% [markdown]
# ## 1. Pooling layers before the product
#
# The load-balancing loss multiplies, for every expert, the fraction of tokens that it got by its mean score. Some
# libraries first pool tokens of *all layers* and then multiply. Take two layers and two experts. Layer 1 sends everything to
# expert 0, layer 2 everything to expert 1. Each layer has collapsed; pooled, the load looks perfect.

# %%
layers = [
    Routing(
        weights=torch.ones(8, 1),
        ids=torch.full((8, 1), expert),
        scores=torch.tensor([[0.75, 0.25]] * 8).roll(expert, 1),
        logits=torch.zeros(8, 2),
    )
    for expert in (0, 1)
]
pooled = model_load_balancing_loss(layers, convention="hf")
apart = [load_balancing_loss(layer.scores, layer.ids) for layer in layers]
print(f"pooled    {pooled:.2f}   (1.00 is perfect balance)")
print(f"per layer {apart[0]:.2f} and {apart[1]:.2f}")

# %% [markdown]
# ## 2. Copying a coefficient
#
# The same number means different pressure in different systems, because they scale the loss differently. At the same
# coefficient, the pooled convention of transformers pushes a router K / L times as hard as Megatron-LM's sum over layers.
# With K = 8 and L = 48 (Qwen3-30B) that is a sixth.

# %%
from guide_code.balance import equivalent_coefficient

same = equivalent_coefficient(
    0.001, source="hf", target="megatron", top_k=8, num_layers=48
)
print(f"0.001 in transformers pushes like {same:.2e} in Megatron-LM")

# %% [markdown]
# ## 3. Counting first choices only
#
# Several losses count only the first of a token's K choices. Here the second choice is always expert 3. The loss is
# content (below 1!); expert 3 has half of all assignments.

# %%
first = torch.arange(32) % 3
ids_TK = torch.stack([first, torch.full((32,), 3)], dim=1)
scores_TE = torch.full((32, 4), 0.075)
scores_TE.scatter_(1, ids_TK, torch.tensor([0.45, 0.4]).expand(32, 2))
counts_E = expert_counts(ids_TK, 4)
for name in ("gshard", "megatron"):
    loss = load_balancing_loss(scores_TE, ids_TK, convention=name)
    print(f"{name:9} {loss:.3f}")
print(f"load {counts_E.tolist()}, max violation {max_violation(counts_E):.2f}")

# %% [markdown]
# ## 4. Counting after the drop
#
# With a capacity, the full experts drop tokens. Count what is left, and the load looks even exactly when it is worst.

# %%
scores_TE = torch.tensor([[0.6, 0.3, 0.1]] * 3 + [[0.2, 0.5, 0.3]])
routing = Routing(
    torch.ones(4, 1),
    torch.tensor([[0], [0], [0], [1]]),
    scores_TE,
    scores_TE.log(),
)
kept = apply_capacity(routing, capacity=2)
after_E = expert_counts(kept.ids, 3)
wrong = 3 * (after_E / 4) @ scores_TE.mean(dim=0)
print(f"after the drop  {after_E.tolist()} -> loss {wrong:.4f}")
right = load_balancing_loss(scores_TE, routing.ids)
print(
    f"before the drop {expert_counts(routing.ids, 3).tolist()} -> loss {right:.4f}"
)

# %% [markdown]
# ## 5. Padding that votes
#
# A batch of sentences of different length is filled up with padding. Padding tokens are all alike, so they choose the same
# experts, and a loss that counts them works against experts that are not busy at all.

# %%
logits_TE = torch.randn(512, 8) * 0.1
logits_TE[384:] = torch.tensor([3.0, 2.0] + [0.0] * 6)  # a quarter is padding
mask_T = torch.arange(512) < 384
for mask in (None, mask_T):
    routing = top_k_routing(logits_TE, 2, mask_T=mask)
    loss = load_balancing_loss(routing.scores, routing.ids, mask_T=mask)
    counts_E = expert_counts(routing.ids, 8)
    print(
        f"mask {'used' if mask is not None else 'none'}: loss {loss:.3f}, load {counts_E.tolist()}"
    )

# %% [markdown]
# ## 6. Masking with 0 what should be minus infinity
#
# Group-limited routing forbids the groups that were not chosen. If their scores are set to 0, they are the *best* as soon as
# the allowed scores are negative, and a bias for the choice makes them so.

# %%
scores_TE = torch.rand(1000, 8)
biased_TE = scores_TE - 1.5  # the bias has drifted down
group_TG = biased_TE.unflatten(1, (4, 2)).sum(dim=2)
allowed = (
    F.one_hot(group_TG.argmax(dim=1), 4).bool().repeat_interleave(2, dim=1)
)
for fill in (0.0, -torch.inf):
    ids_TK = biased_TE.masked_fill(~allowed, fill).topk(2).indices
    forbidden = ~allowed.gather(1, ids_TK)
    print(
        f"fill {fill:4}: {forbidden.float().mean():.0%} of choices are forbidden"
    )

# %% [markdown]
# ## 7. An epsilon that lets the router cheat
#
# Sigmoid scores do not sum to 1, so the loss divides them by their sum. Add a small epsilon to that sum, and the router finds
# out that it can lower the loss by making *all* scores tiny.

# %%
base = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
for shift in (0, -30, -60):
    logits_TE = torch.stack([base.roll(r) for r in range(4)]) + shift
    routing = top_k_routing(logits_TE, 1, score_fn="sigmoid")
    total = routing.scores.sum(dim=1, keepdim=True)
    wrong = 4 * (
        torch.full((4,), 0.25) @ (routing.scores / (total + 1e-20)).mean(0)
    )
    right = load_balancing_loss(routing.scores, routing.ids)
    print(f"logits {shift:+3}: with epsilon {wrong:.6f}, guarded {right:.6f}")

# %% [markdown]
# ## 8. Jitter that reaches the experts
#
# Switch multiplies the router's *input* by noise. Done in place, or on the tensor that is handed on, the noise also reaches
# the experts; left on in evaluation, two runs give two answers.

# %%
x_TD = torch.randn(4, 8)
before = x_TD.clone()
noisy = x_TD  # no copy is made ...
noisy *= torch.empty_like(noisy).uniform_(0.9, 1.1)  # ... and this changes it
print("in place:   the experts' input changed:", not torch.equal(x_TD, before))

router = TopKRouter(8, 4, 2, jitter=0.1)
x_TD = before.clone()
router(x_TD)
print("this guide: the experts' input changed:", not torch.equal(x_TD, before))
router.eval()
print(
    "two evaluations agree:",
    torch.equal(router(x_TD).logits, router(x_TD).logits),
)

# %% [markdown]
# ## 9. Softmax of a softmax
#
# A router returns scores; a library expects logits and applies a softmax again. The result still sums to 1 and
# has the same order, so nothing looks wrong. But it is nearly flat.

# %%
logits_TE = torch.randn(1000, 16) * 2
once = top_k_routing(logits_TE, 2, norm_topk_prob=False)
twice = top_k_routing(logits_TE.softmax(dim=1), 2, norm_topk_prob=False)
print("same experts:", torch.equal(once.ids, twice.ids))
for name, routing in (("once", once), ("twice", twice)):
    print(
        f"{name:5} mean weight of the first choice {routing.weights[:, 0].mean():.2f}"
    )
print(f"an even share is {1 / 16:.2f}")

# %% [markdown]
# ## 10. A bias that cannot move, and a choice that moves by itself
#
# The correction bias moves by 0.001 per step. In bfloat16 the numbers near 1 are 0.004 or 0.008 apart, so the step is
# rounded away: the bias is frozen, and no one is told. Here 100 steps of +0.001 from 1.0:

# %%
for dtype in (torch.bfloat16, torch.float32):
    bias_E = torch.ones(2, dtype=dtype)
    for _ in range(100):
        update_expert_bias_(bias_E, torch.tensor([0, 2]), rate=0.001)
    print(f"{dtype!s:15} {bias_E[0].item():.4f}")

router = TopKRouter(8, 4, 2, use_expert_bias=True).bfloat16()
print("the bias of a router that was cast:", router.expert_bias.dtype)

# %% [markdown]
# Rounding hurts the choice as well. With bfloat16 logits, experts that were apart become equal or change places:

# %%
router = TopKRouter(1024, 64, 8)
x_TD = torch.randn(4000, 1024)
exact = router(x_TD).ids.sort().values
narrow_TE = (x_TD.bfloat16() @ router.weight.T.bfloat16()).float()
flipped = (top_k_routing(narrow_TE, 8).ids.sort().values != exact).any(dim=1)
print(f"tokens with another set of experts: {flipped.float().mean():.1%}")
ninth = narrow_TE.topk(9).values
print(
    f"tokens with an exact tie at the border: {(ninth[:, 7] == ninth[:, 8]).float().mean():.1%}"
)

# %% [markdown]
# So the router's product is computed in float32 here, whatever the dtype of the model; and tests of experts fix the choice,
# so that they compare arithmetic and not coin tosses.
#
# ## In three lines
#
# - Balance is measured per layer, over all choices, before any drop, without padding.
# - A coefficient means nothing without its convention.
# - Scores, biases and choices live in float32; forbidden means minus infinity.
#
# ## Try it
#
# 1. In trap 1, give both layers the same collapse. What does the pooled loss say now?
# 2. In trap 5, how large must the share of padding be to double the loss?
# 3. Which of these traps would a test with zero biases, one group and K = 1 miss?
