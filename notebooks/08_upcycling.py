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
# # Upcycling a dense model
#
# Somebody has trained a dense model, and you want a larger one. Starting again throws that training away.
# **Upcycling** turns the feed-forward layers of the dense model into experts and goes on from there
# ([@upcycling2022]). Here you train a small dense model, upcycle it in two ways, check that the new models compute the
# same function, and train them further, next to the dense model and to an MoE that starts from nothing.
#
# It takes less than a minute on a laptop and needs no network: the text is the source of Python's standard library.

# %%
import copy
import dataclasses

import matplotlib.pyplot as plt
import torch

from guide_code.build import build_model, parameter_counts
from guide_code.convert import upcycle
from guide_code.corpus import load_corpus
from guide_code.figures.style import LIGHT
from guide_code.presets import preset
from guide_code.training.config import TrainConfig
from guide_code.training.loop import train
from guide_code.training.losses import validation_loss

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
plt.rcParams.update({"figure.dpi": 120, "axes.grid": True, "grid.alpha": 0.3})
blue, orange, green, violet = LIGHT.experts

# %% [markdown]
# ## 1. The dense model
#
# Two layers, each with a feed-forward layer of width 64: as much work per token as two experts of `tiny`. It gets 160
# steps.

# %%
corpus = load_corpus(vocab_size=1024)
config = dataclasses.replace(preset("tiny"), moe=None, intermediate_size=64)
first = TrainConfig(
    steps=160,
    batch_size=4,
    sequence_length=64,
    validate_every=160,
    validation_batches=8,
)


def score(model):
    return validation_loss(model, corpus, first)


torch.manual_seed(0)
dense = build_model(config).to(device)
train(dense, corpus, first)
print(f"{parameter_counts(dense)[0]:,} parameters")
print(f"validation loss {score(dense):.3f}")

# %% [markdown]
# ## 2. Copies
#
# Make every expert a copy of the layer and start the router at random. The weights of the chosen experts sum to 1 and
# all experts give the same, so the output stays the same, whatever the router says:
#
# $$\sum_{i \in \mathrm{chosen}} w_i \, E(x) = E(x) \sum_{i} w_i = E(x)$$
#
# With two copies per token the work of the layer doubles.
#
# ## 3. Slices
#
# To keep the work, cut each copy into four slices of its channels. The slices' outputs add up to the copy's, if a token
# gets *all* slices of one copy. The router starts with four equal rows per copy, so it picks all or none ([@nvidiaupcycling2024,
# section 3.2]).

# %%
dense = dense.to("cpu").eval()
balance = {"load_balancing_coef": 0.005, "z_loss_coef": 0.001}


def grow(top_k, granularity):
    return upcycle(
        dense,
        num_experts=8,
        top_k=top_k,
        granularity=granularity,
        config=config,
        generator=torch.Generator().manual_seed(0),
        **balance,
    )


copies, slices = grow(top_k=2, granularity=1), grow(top_k=1, granularity=4)
tokens_BS = next(corpus.validation.windows(4, 64))[0][:, :-1]
with torch.no_grad():
    expected = dense(tokens_BS).logits
    for name, model in {"copies": copies, "slices": slices}.items():
        output = model(tokens_BS)
        error = (output.logits - expected).norm() / expected.norm()
        total, active = parameter_counts(model)
        print(f"{name}: {total:,} parameters, {active:,} used per token")
        print(f"  relative difference of the logits {error:.0e}")
        print(f"  experts of a token: {output.routings[0].ids[0].tolist()}")
        assert error < 1e-5

# %% [markdown]
# Both are the dense model, up to rounding, before the first step. The slices of a token are neighbours: one whole copy.
#
# What breaks this? Weights that do not sum to 1. `upcycle` refuses such a router instead of starting worse:

# %%
try:
    upcycle(dense, num_experts=8, top_k=2, config=config, norm_topk_prob=False)
except ValueError as error:
    print(error)

# %% [markdown]
# ## 4. Train on
#
# Four models see the same 60 batches: the dense one goes on; the two upcycled ones; and an MoE of the same shape as
# *copies* whose weights are random. The learning rate starts again, with a warm-up for the new routers, at half of what
# it was.

# %%
further = TrainConfig(
    steps=60,
    batch_size=4,
    sequence_length=64,
    learning_rate=2e-3,
    validate_every=20,
    validation_batches=8,
    seed=1,
)
torch.manual_seed(0)
models = {
    "dense, continued": copy.deepcopy(dense),
    "copies": copies,
    "slices": slices,
    "MoE from nothing": build_model(copies.origin.config),
}
colours = dict(zip(models, (LIGHT.ink, blue, green, orange), strict=True))
curves = {}
for name, model in models.items():
    model.to(device)
    curve = [(0, score(model))]
    for step in train(model, corpus, further):
        if "validation_loss" in step:
            curve.append((step["step"], step["validation_loss"]))
    curves[name] = curve
    print(f"{name:17} {curve[0][1]:.3f} -> {curve[-1][1]:.3f}")

# %% alt="Line chart: validation loss over steps of continued training for the dense model, the two upcycled models and an MoE from nothing."
figure, axes = plt.subplots(figsize=(7, 3.6))
for name, curve in curves.items():
    axes.plot(
        *zip(*curve, strict=True),
        marker="o",
        markersize=3,
        color=colours[name],
        label=name,
    )
top = max(loss for name in list(models)[:3] for _, loss in curves[name])
axes.set(
    xlabel="further steps",
    ylabel="validation loss (nats)",
    ylim=(None, top + 0.6),
)
axes.legend()
plt.show()

# %%
last = {name: curve[-1][1] for name, curve in curves.items()}
for name in ("copies", "slices"):
    gain = last["dense, continued"] - last[name]
    print(f"{name}: {gain:+.3f} nats better than the dense model")
ahead = last["MoE from nothing"] - min(last["copies"], last["slices"])
print(f"the MoE from nothing is {ahead:.3f} nats behind the better of them")

# %% [markdown]
# Read the numbers above as one short run of one tiny model. Two things are general. The upcycled models start where the
# dense one ended, and the one from nothing has to earn that first. And early on more experts help little, since the
# copies are alike. Look at how far apart they are by now:

# %%
for name in ("copies", "slices"):
    experts = models[name].blocks[-1].ffn.experts
    up = experts.gate_up_proj.detach().flatten(1)
    step = 4 if name == "slices" else 1  # compare the first slice of each copy
    up = up[::step]
    apart = (up - up.mean(dim=0)).norm() / up.norm()
    print(f"{name}: experts differ from their mean by {apart:.0%}")
    assert apart > 0.01, "training moved them apart"

# %% [markdown]
# A model from nothing has experts without that likeness. With enough training it wins: for OLMoE the point was at about
# a quarter of the tokens that the dense model had seen ([@olmoe2024, section 4.1.5]).
#
# ## What to remember
#
# - Copies with weights that sum to 1 compute the same function. Check it before you train: any difference is a fault.
# - Slices keep the work per token; their router must start with equal rows.
# - Upcycle for a short budget. For a long one, start from nothing.
#
# [Upcycling](../learn/upcycling.md) has the background. For checkpoints on disk there is
# [`load_hf` and `upcycle`](../how-to/convert.md#upcycle-a-dense-model).
#
# **Try it**: train with `load_balancing_coef` 0 in `balance`. Which expert wins, and does the loss notice?
