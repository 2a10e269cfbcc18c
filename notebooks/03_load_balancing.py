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
#     timeout: 240
# ---

# %% [markdown]
# # Keeping the load even
#
# A router that is left alone prefers the experts that it has already trained. This tutorial trains the same small model
# several times. Only the means of balancing changes. You will see what each one does to the load, to the loss, and to
# the tokens that a system with fixed capacity would have to drop.
#
# It takes about a minute on a laptop.

# %%
import matplotlib.pyplot as plt
import torch

from guide_code.balance import load_balancing_loss
from guide_code.build import build_model
from guide_code.capacity import expert_capacity
from guide_code.config import override
from guide_code.conventions import layer_values
from guide_code.corpus import load_corpus
from guide_code.load_metrics import dead_experts, load_entropy, max_violation
from guide_code.presets import preset
from guide_code.training.config import TrainConfig
from guide_code.training.loop import train

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
plt.rcParams.update({"figure.dpi": 120, "axes.grid": True, "grid.alpha": 0.3})
corpus = load_corpus(vocab_size=1024)
config = override(
    preset("tiny"), {"load_balancing_coef": 0.0, "z_loss_coef": 0.0}
)
E, K = config.moe.num_experts, config.moe.top_k

# %% [markdown]
# ## Seven ways to train
#
# 1. **nothing**: only the language-model loss.
# 2. **loss**: the load-balancing loss of Switch (Fedus et al. 2021, arXiv:2101.03961) in Megatron-LM's convention, with
#    coefficient 0.01.
# 3. **loss, too strong**: the same with coefficient 1, as if it had been copied from another system.
# 4. **loss, too weak**: the same with coefficient 0.0001.
# 5. **per sequence**: the same loss taken in every sequence on its own (DeepSeek-V3, arXiv:2412.19437, eq. 17-20).
# 6. **bias**: no loss at all. After each step a bias for the choice rises for experts with too few tokens and falls
#    for those with too many (Wang et al. 2024, arXiv:2408.15664). Scores are sigmoids, as in DeepSeek-V3.
# 7. **expert choice**: experts take tokens (Zhou et al. 2022, arXiv:2202.09368). The load cannot be uneven.

# %%
variants = {
    "nothing": {},
    "loss": {"load_balancing_coef": 0.01},
    "loss, too strong": {"load_balancing_coef": 1.0},
    "loss, too weak": {"load_balancing_coef": 0.0001},
    "per sequence": {
        "load_balancing_coef": 0.01,
        "load_balancing_convention": "sequence",
    },
    "bias": {"score_fn": "sigmoid", "expert_bias_rate": 0.01},
    "expert choice": {"router": "expert_choice", "norm_topk_prob": False},
}
palette = "#d55e00 #0072b2 #56b4e9 #e69f00 #cc79a7 #009e73 #555555".split()
colours = dict(zip(variants, palette, strict=True))
run = TrainConfig(steps=150, validate_every=150, validation_batches=8)
models, histories = {}, {}
for name, changes in variants.items():
    torch.manual_seed(0)
    models[name] = build_model(override(config, changes)).to(device)
    histories[name] = train(models[name], corpus, run)
    print(
        f"{name:17} validation loss {histories[name][-1]['validation_loss']:.3f}"
    )

# %% [markdown]
# Expert choice looks at the whole sequence, later tokens included, when it decides which tokens an expert takes. Its loss
# is therefore not comparable: the model has seen a hint of the future that it would not have when it writes. Look at its
# load, not at its loss.
#
# ## The load over time
#
# **Max violation** is how far the busiest expert is above an even share: 0 is even, 1 is twice the share. It is
# what the slowest device waits for.

# %% alt="Line chart of max violation over training steps for seven ways of balancing: without any it rises high, with loss or bias it falls, with expert choice it is zero."
figure, axes = plt.subplots(figsize=(7, 3.6))
for name, history in histories.items():
    worst = torch.tensor([step["max_violation"] for step in history])
    smooth = worst.unfold(0, 10, 1).mean(dim=1)
    axes.plot(
        range(10, 10 + len(smooth)), smooth, color=colours[name], label=name
    )
axes.set(xlabel="step (mean of ten)", ylabel="max violation, worst layer")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Tokens that would be dropped
#
# A system with fixed capacity drops what exceeds its slots. From the counts of every step we can say how much that would
# have been. With factor 1.0 there are just enough slots for an even load; 1.25 is the factor of Switch.


# %% alt="Line chart of the share of assignments beyond capacity at factor 1.25 over training steps for the seven ways of balancing."
def beyond(history, factor):
    counts = torch.tensor([step["counts"] for step in history]).float()
    tokens = int(counts[0, 0].sum()) // K
    slots = expert_capacity(tokens, E, K, factor)
    lost = (counts - slots).clamp_min(0).sum(dim=(1, 2))
    return lost / counts.sum(dim=(1, 2))


figure, axes = plt.subplots(figsize=(7, 3.6))
for name, history in histories.items():
    lost = 100 * beyond(history, 1.25).unfold(0, 10, 1).mean(dim=1)
    axes.plot(range(10, 10 + len(lost)), lost, color=colours[name], label=name)
axes.set(xlabel="step (mean of ten)", ylabel="% beyond capacity 1.25")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## The loss over time
#
# How far each run is from the run without balancing, on the same batches; below zero is better.

# %% alt="Line chart of the training loss of each way of balancing minus that without any, over training steps: only the too strong loss is clearly above zero."
figure, axes = plt.subplots(figsize=(7, 3.6))
nothing = torch.tensor([step["loss"] for step in histories["nothing"]])
for name, history in histories.items():
    loss = torch.tensor([step["loss"] for step in history])
    gap = (loss - nothing).unfold(0, 10, 1).mean(dim=1)
    axes.plot(range(10, 10 + len(gap)), gap, color=colours[name], label=name)
axes.set(xlabel="step (mean of ten)", ylabel="training loss - that of nothing")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## In numbers
#
# Over the last 50 steps, with the counts of both layers added up. **Load entropy** is 1 when the load is even;
# **dead experts** got nothing at all.

# %%
print(f"{'':17} loss  violation  entropy  dead  lost at 1.0 / 1.25")
for name, history in histories.items():
    counts = torch.tensor([step["counts"] for step in history[-50:]]).sum(dim=0)
    violation = max(max_violation(layer).item() for layer in counts)
    entropy = min(load_entropy(layer).item() for layer in counts)
    dead = sum(dead_experts(layer).item() for layer in counts)
    lost = [
        beyond(history[-50:], factor).mean().item() for factor in (1.0, 1.25)
    ]
    print(
        f"{name:17} {history[-1]['validation_loss']:.3f} {violation:7.2f} "
        f"{entropy:9.3f} {dead:5d}    {lost[0]:6.1%} / {lost[1]:.1%}"
    )

# %% [markdown]
# Read the table from its first line down. Nothing: the load collapses. The loss at 0.01: it stays even at little
# or no cost. A hundred times stronger: more even still, and the router has less freedom to learn what the language-model
# loss asks for. A hundred times weaker: hardly better than nothing. The bias: even load with no extra gradient at all. With
# so few steps differences in loss of 0.02 or so are noise; the differences in load are not.
#
# ## How strong is too strong?
#
# Compare the two gradients that reach a router: that of the language-model loss and that of the balancing loss.

# %%
tokens, _ = corpus.train.batch(8, 128, torch.Generator().manual_seed(1))
tokens = tokens.to(device)
model = models["loss"].train()
router = model.blocks[-1].ffn.router
balancer = model.blocks[-1].ffn.balancer


def router_gradient(coefficient):
    balancer.coefs["load_balancing"] = coefficient
    model.zero_grad()
    logits = model(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten()
    ).backward()
    return router.weight.grad.clone()


alone = router_gradient(0.0)
unit = router_gradient(1.0) - alone
for coefficient in (0.0001, 0.01, 1.0):
    ratio = coefficient * unit.norm() / alone.norm()
    print(
        f"coefficient {coefficient:<7} balancing / language model {ratio:.3f}"
    )

# %% [markdown]
# The useful range is where the balancing gradient is smaller than the other one, but not negligible.
#
# ## The same word, many losses
#
# "The" load-balancing loss exists in a dozen versions. This table is computed by the guide's own code: the value of each
# convention for routings of one layer that you can picture, with 8 experts and 2 choices. The reference has a page on it.

# %%
table = layer_values()
wanted = ["balanced", "all tokens on one pair", "each sequence on its own pair"]
where = [table.columns.index(name) for name in wanted]
print(f"{'':16} balanced  one pair  a pair per sequence")
for row in table.rows:
    print(
        f"{row[0]:16} {row[where[0]]:>8} {row[where[1]]:>9} {row[where[2]]:>20}"
    )

# %%
routing = models["loss"].eval()(tokens[:, :-1]).routings[-1]
for name in ("megatron", "hf", "gshard"):
    value = load_balancing_loss(routing.scores, routing.ids, convention=name)
    print(
        f"{name:9} {value.item():.3f} on the same routing of the trained model"
    )

# %% [markdown]
# ## In three lines
#
# - Without any means of balancing a few experts take over within a hundred steps.
# - A loss or a bias keeps the load even. A coefficient that is a hundred times off does not, or costs quality.
# - Always log max violation beside the loss: a balancing loss near its minimum can hide an uneven load.
#
# ## Try it
#
# 1. Use `"load_balancing_convention": "hf"` at the same coefficient. How does the load change, and why by so little?
# 2. Give the bias a rate of 0.1. What happens to the max violation?
# 3. Combine the bias with a loss of 0.0001, as DeepSeek-V3 does.
