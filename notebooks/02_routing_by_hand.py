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
# # Routing by hand
#
# A router answers one question for every token: which experts, and how much does each one count? There are
# many answers in use. This tutorial puts them all to the same eight tokens and four experts, so that you can see
# what each rule changes. No training; it runs in seconds.

# %%
import matplotlib.pyplot as plt
import torch

from guide_code.balance import expert_counts, max_violation
from guide_code.capacity import apply_capacity, expert_capacity
from guide_code.routers import (
    HashRouter,
    QuantileRouter,
    ReplayRouter,
    TopKRouter,
    expert_choice_routing,
    hash_table,
    sinkhorn_plan,
    top_k_routing,
)

torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 120, "font.size": 9})

# %% [markdown]
# ## The example
#
# A *logit* is the raw number that the router's matrix gives for a token and an expert. Here most tokens like expert 0:
# that is what an untrained or collapsing router looks like.

# %%
T, E, K = 8, 4, 2
logits_TE = torch.tensor(
    [
        [2.0, 1.0, 0.0, -1.0],
        [2.5, 0.5, 1.0, -0.5],
        [1.5, 1.4, -1.0, 0.0],
        [3.0, 0.0, 0.5, 0.2],
        [0.2, 1.8, 0.1, 0.0],
        [1.0, -0.5, 1.2, 0.6],
        [2.2, 0.3, -0.2, 1.1],
        [0.4, 0.0, 0.3, 0.2],
    ]
)


def show(routings, columns=3):
    """Combine weights as tiles: rows are tokens, columns are experts."""
    rows = -(-len(routings) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(7, 2.9 * rows))
    for axes in panels.flat[len(routings) :]:
        axes.remove()
    for axes, (title, routing) in zip(
        panels.flat, routings.items(), strict=False
    ):
        tiles = torch.zeros(len(routing.ids), E + 1)
        tiles = tiles.scatter(1, routing.ids, routing.weights.float())[:, :E]
        axes.imshow(
            tiles.numpy(), cmap="Blues", vmin=0, vmax=1.2, aspect="auto"
        )
        for token, expert in tiles.nonzero().tolist():
            weight = tiles[token, expert].item()
            colour = "white" if weight > 0.7 else "black"
            axes.text(
                expert,
                token,
                f"{weight:.2f}",
                color=colour,
                ha="center",
                va="center",
            )
        load = expert_counts(routing.ids, E).tolist()
        axes.set(title=title, xticks=range(E), yticks=range(len(tiles)))
        axes.set_xlabel("expert\nload " + " ".join(map(str, load)))
    panels.flat[0].set_ylabel("token")
    figure.tight_layout()
    plt.show()


# %% [markdown]
# ## Softmax, then the best K
#
# The commonest rule. A softmax turns the logits of a token into scores that sum to 1; the K best experts are chosen.
# Their scores become *combine weights*, divided by their sum (Mixtral, Qwen3) or as they are (OLMoE, DeepSeek-V2).

# %% alt="Three panels of combine weights for eight tokens and four experts: top-2 with weights that sum to 1, top-2 with the raw scores, and top-1."
show(
    {
        "top-2, sums to 1": top_k_routing(logits_TE, 2),
        "top-2, raw scores": top_k_routing(logits_TE, 2, norm_topk_prob=False),
        "top-1 (Switch)": top_k_routing(logits_TE, 1, norm_topk_prob=False),
    }
)

# %% [markdown]
# With K = 1 the raw score must stay. Divided by itself it would always be 1, and the router would get no gradient from the
# language-model loss:

# %%
for norm in (False, True):
    x_TE = logits_TE.clone().requires_grad_()
    top_k_routing(x_TE, 1, norm_topk_prob=norm).weights.sum().backward()
    print(
        f"norm_topk_prob={norm!s:5}  largest gradient {x_TE.grad.abs().max():.4f}"
    )

# %% [markdown]
# Some models (gpt-oss, and Megatron-LM by default) first take the K best *logits* and then a softmax over those. It looks
# like another rule. It is the same one, because the softmax is exponentials divided by a sum, and the sum cancels:

# %%
before = top_k_routing(logits_TE, 2).weights
after = logits_TE.topk(2).values.softmax(dim=-1)
print("largest difference:", (before - after).abs().max().item())

# %% [markdown]
# ## Sigmoid, and a bias that moves the choice
#
# DeepSeek-V3 scores each expert on its own with a sigmoid. It adds a *bias* to the scores **for the choice only**. An
# expert with too much load gets a lower bias and is chosen less often; the combine weights never see it. Here the bias
# pushes expert 0 down:

# %% alt="Two panels: sigmoid scores with top-2, where most tokens choose expert 0, and the same with a bias against expert 0, which spreads the load."
bias_E = torch.tensor([-0.35, 0.05, 0.15, 0.15])
sigmoid = {"score_fn": "sigmoid"}
show(
    {
        "sigmoid": top_k_routing(logits_TE, 2, **sigmoid),
        "sigmoid + bias": top_k_routing(
            logits_TE, 2, expert_bias_E=bias_E, **sigmoid
        ),
    },
    columns=2,
)

# %% [markdown]
# ## Groups
#
# When experts live on several machines, each extra machine that a token visits costs traffic. So DeepSeek puts the experts
# into groups, one per machine, and lets a token choose from the best groups only. How good is a group? V2 takes its best
# score, V3 the sum of its two best. With two groups, experts (0, 1) and (2, 3), the rules disagree about token 5:

# %% alt="Two panels of group-limited routing with one of two groups per token: the best score of a group, and the sum of its two best; they differ for token 5."
groups = {"num_groups": 2, "top_k_groups": 1, "score_fn": "sigmoid"}
close_TE = logits_TE.clone()
close_TE[5] = torch.tensor([1.3, -2.0, 1.2, 0.6])
by_max = top_k_routing(close_TE, 2, group_score="max", **groups)
by_sum = top_k_routing(close_TE, 2, group_score="top2_sum", **groups)
show({"best score (V2)": by_max, "two best (V3)": by_sum}, columns=2)

# %% [markdown]
# A checkpoint must be run with the rule that it was trained with. For 160 experts in 8 groups of which a token may use 3,
# and random logits, the two rules choose different experts for this share of tokens:

# %%
many_TE = torch.randn(5000, 160)
shape = {"num_groups": 8, "top_k_groups": 3}
chosen = [
    top_k_routing(many_TE, 6, group_score=rule, **shape).ids.sort().values
    for rule in ("max", "top2_sum")
]
print(f"{(chosen[0] != chosen[1]).any(dim=1).float().mean():.0%}")

# %% [markdown]
# ## Experts choose tokens
#
# Turn the question round: every expert takes its best tokens (Zhou et al. 2022, arXiv:2202.09368). The load is
# even by construction. A token may get many experts or none. And the choice depends on the other tokens of the batch, later
# ones included, so a language model that decodes one token at a time cannot use it as it is.

# %% alt="One panel: expert choice with four tokens per expert; every expert has load 4 and the tokens have between zero and four experts."
choice = expert_choice_routing(logits_TE, capacity=T * K // E)
show({"expert choice": choice}, columns=2)
print("experts per token:", (choice.ids < E).sum(dim=1).tolist())

# %% [markdown]
# ## A table, and no learning
#
# Hash routing looks the expert up by the token's id (Roller et al. 2021, arXiv:2106.04426). Nothing can collapse because
# nothing is learned; but a frequent word is always the same expert's work.

# %%
table_VK = hash_table(vocab_size=10, num_experts=E, top_k=K, seed=3)
router = HashRouter(16, E, table_VK)
tokens_T = torch.tensor([7, 3, 7, 7, 1, 3, 7, 9])
ids_TK = router(torch.randn(T, 16), tokens_T=tokens_T).ids
for token, ids in zip(tokens_T.tolist(), ids_TK.tolist(), strict=True):
    print(f"token id {token} -> experts {sorted(ids)}")

# %% [markdown]
# ## Solving for balance
#
# Two routers compute an even assignment instead of waiting for a loss to bring it about. **Sinkhorn** (Clark et al. 2022,
# arXiv:2202.01169) rescales rows and columns of the exponentials until every expert has the same mass, and chooses from
# that. **Quantile balancing** solves for the bias that would have made the load even, and uses it in the next step.

# %%
plan_TE = sinkhorn_plan(logits_TE)
print(
    "mass per expert, softmax: ", logits_TE.softmax(-1).mean(0).numpy().round(2)
)
print("mass per expert, Sinkhorn:", plan_TE.sum(0).numpy().round(2))

router = QuantileRouter(16, E, K, score_fn="sigmoid")
x_TD = torch.randn(512, 16) + 0.7  # a shift, so that some experts are favoured
with torch.no_grad():
    router.weight.copy_(torch.randn(E, 16) * 0.3)
for step in range(5):
    counts_E = expert_counts(router(x_TD).ids, E)
    print(
        f"step {step}: load {counts_E.tolist()}, max violation {max_violation(counts_E):.2f}"
    )
    router.step()

# %% [markdown]
# ## What must not go wrong
#
# **Ties** go to the lowest expert id, on every device. `torch.topk` promises no order, so two machines could
# choose differently. **A row that is not finite** reaches no expert at all: it gets the *sentinel* id E (one past the last)
# and weight 0, and it harms no other row.

# %%
strange_TE = torch.tensor(
    [[0.0] * 4, [torch.nan] * 4, [1.0, torch.inf, 0.0, 0.0]]
)
routing = top_k_routing(torch.cat([strange_TE, logits_TE[:1]]), 2)
for name, ids, weights in zip(
    ("all equal", "all NaN", "one infinity", "ordinary"),
    routing.ids.tolist(),
    routing.weights.tolist(),
    strict=True,
):
    print(f"{name:13} ids {ids} weights {[round(w, 2) for w in weights]}")

# %% [markdown]
# **Replay.** Two programs that compute the same model round differently, and near a tie a token then goes to another
# expert. Reinforcement learning meets this when one program samples and another trains. The cure is to record the choice
# of the first and force it on the second; the weights still follow the second's own router.

# %%
router = TopKRouter(1024, 64, 8)
x_TD = torch.randn(4000, 1024)
exact = router(x_TD)
rounded = router(x_TD.bfloat16().float())
moved = (exact.ids.sort().values != rounded.ids.sort().values).any(dim=1)
replayed = ReplayRouter(router, exact.ids)(x_TD.bfloat16().float())
print(f"rounding to bfloat16 moves {moved.float().mean():.1%} of the tokens")
print("replayed choices equal:", torch.equal(replayed.ids, exact.ids))

# %% [markdown]
# ## Capacity: when an expert is full
#
# Some systems give each expert a fixed number of slots, its *capacity*, so that tensors have fixed shapes. What does not fit
# is dropped. With factor 1.0 there are exactly enough slots for an even load. Who is dropped depends on the order:

# %% alt="Four panels of top-2 routing under capacity 4: by arrival, by token, by probability and at random; in each, expert 0 keeps four tokens and drops others."
capacity = expert_capacity(T, E, K, capacity_factor=1.0)
full = top_k_routing(logits_TE, K)
names = {
    "arrival": "first choices first",
    "tokens": "token order",
    "probability": "largest weight first",
    "random": "random",
}
kept = {
    title: apply_capacity(full, capacity, priority=name)
    for name, title in names.items()
}
show(kept, columns=2)

# %%
routed_E = expert_counts(full.ids, E)
kept_E = expert_counts(kept["random"].ids, E)
print(
    f"capacity {capacity}: routed {routed_E.tolist()}, kept {kept_E.tolist()}"
)
for title, routing in kept.items():
    dropped = ((routing.ids == E) & (full.ids == 0)).any(dim=1).nonzero()
    print(f"{title:21} drops expert 0 from tokens {dropped.flatten().tolist()}")

# %% [markdown]
# Most systems of today drop nothing (*dropless*): they sort the tokens by expert and let the groups have any size.
#
# ## In three lines
#
# - A router is a score, a choice and a weight. Models differ in all three, and a checkpoint needs its own combination.
# - A bias for the choice, a plan or a table can make the load even without touching the weights.
# - Ties, rows that are not finite and full experts need a rule; here each has one, and a test.
#
# ## Try it
#
# 1. Raise the logit of expert 3 for all tokens by 1. Which panels change, and which do not?
# 2. Set K = 3 in the group example. Why is it refused with one group of two experts?
# 3. Find a capacity factor at which nothing is dropped. How many slots stay empty?
