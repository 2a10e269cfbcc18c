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
#     timeout: 300
# ---

# %% [markdown]
# # Your first Mixture of Experts
#
# A Transformer spends most of its parameters in feed-forward layers, and every token pays for all of them.
# A **Mixture of Experts (MoE)** replaces such a layer by many small ones, the *experts*, and a *router* that picks
# a few of them for each token. The model gets larger; the work per token does not.
#
# In this tutorial you build that layer by hand in a dozen lines. Then you train it inside a small language model, next
# to a dense model that does the same work per token, and look at what the experts have learned.
#
# You need a laptop and a minute or two. The text is the source code of Python's own standard library, so nothing
# is downloaded.

# %%
import matplotlib.pyplot as plt
import torch

from guide_code.balance import load_balancing_loss, max_violation
from guide_code.build import build_model, build_moe, parameter_counts
from guide_code.config import dense_twin, override
from guide_code.corpus import CLASSES, classify, load_corpus
from guide_code.generate import stream
from guide_code.presets import preset
from guide_code.training.config import TrainConfig
from guide_code.training.loop import train

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
plt.rcParams.update({"figure.figsize": (7, 3.6), "figure.dpi": 120})
plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3})
colours = {"MoE": "#0072b2", "MoE, no balancing": "#d55e00", "dense": "#555555"}

# %% [markdown]
# ## 1. The layer by hand
#
# Take 5 tokens of width 8, and 4 experts. Each token shall use 2 of them. A name such as `x_TD` tells the shape of
# its tensor: `T` tokens by `D` numbers. `E` counts experts and `K` choices per token.

# %%
T, D, E, K = 5, 8, 4, 2
x_TD = torch.randn(T, D)

# %% [markdown]
# **The router** is one linear layer. It gives every token a score for every expert; a softmax turns the scores of
# a token into shares that sum to 1.

# %%
router_ED = torch.randn(E, D) / D**0.5
scores_TE = (x_TD @ router_ED.T).softmax(dim=-1)
print(scores_TE.numpy().round(2))

# %% [markdown]
# **The choice**: keep the 2 best experts of each token, and divide their shares by their sum. These are the
# *combine weights*.

# %%
weights_TK, ids_TK = scores_TE.topk(K, dim=-1)
weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
for token in range(T):
    (first, second), (w1, w2) = (
        ids_TK[token].tolist(),
        weights_TK[token].tolist(),
    )
    print(
        f"token {token}: {w1:.2f} x expert {first} + {w2:.2f} x expert {second}"
    )

# %% [markdown]
# **The experts** are ordinary feed-forward layers. An expert computes only the tokens that chose it, and its result is
# multiplied by the combine weight of the token:
#
# $$y_t = \sum_{i \in \mathrm{chosen}(t)} w_{t,i} \, \mathrm{expert}_i(x_t)$$


# %%
def make_expert():
    up, down = torch.nn.Linear(D, 16), torch.nn.Linear(16, D)
    return torch.nn.Sequential(up, torch.nn.SiLU(), down).requires_grad_(False)


experts = [make_expert() for _ in range(E)]
y_TD = torch.zeros(T, D)
for expert in range(E):
    tokens, slots = (ids_TK == expert).nonzero(as_tuple=True)
    print(f"expert {expert} computes {len(tokens)} tokens: {tokens.tolist()}")
    weights = weights_TK[tokens, slots, None]
    y_TD[tokens] += weights * experts[expert](x_TD[tokens])

# %% [markdown]
# That is the whole idea. The layer of this guide does the same, and adds what training needs: padding masks, exact
# ties, one matrix product for all experts, and losses that keep the load even. Here it is, as the small
# language model below uses it:

# %%
config = preset("tiny")
moe = build_moe(config.moe)
print(moe)

out, routing, _ = moe(torch.randn(1, 64, config.hidden_size))
print("output", tuple(out.shape))
print("experts of the first token:", routing.ids[0].tolist())

# %% [markdown]
# ## 2. Two models that cost the same
#
# `tiny` has 2 layers with 16 experts each, and a token uses 2. Its **dense twin** has feed-forward layers as wide as
# 2 experts. Both multiply a token by the same number of parameters (but for the router, which is small).

# %%
off = {"load_balancing_coef": 0.0, "z_loss_coef": 0.0}
models = {
    "MoE": config,
    "MoE, no balancing": override(config, off),
    "dense": dense_twin(config),
}
for name, model_config in models.items():
    total, active = parameter_counts(build_model(model_config))
    print(f"{name:18} {total:9,} parameters, {active:,} used per token")

# %% [markdown]
# ## 3. The text
#
# The corpus is Python source, cut into tokens by a small BPE of 1,024 entries. Every token carries a *class* from
# Python's own tokenizer (keyword, name, string, ...). The models never see it. We will use it to ask what an
# expert is for.

# %%
corpus = load_corpus(vocab_size=config.vocab_size)
for name in ("train", "validation"):
    print(f"{name:10} {len(getattr(corpus, name).tokens):9,} tokens")

line = "def area(radius=1.0):  # of a disc"
ids = corpus.encode(line)
kinds, end = classify(line), 0
for token in ids:
    piece = corpus.decode(token[None])
    end += len(piece)
    print(f"{piece!r:10} {CLASSES[kinds[end - 1]]}")

# %% [markdown]
# ## 4. Training
#
# All three models see the same batches in the same order. The loss is the cross-entropy of the next token, in nats.
# The balanced model adds two small terms to the gradient of its routers: the *load-balancing loss*, which is lowest when
# all experts get the same number of tokens, and the *z-loss*, which keeps the router's logits small. Both are left out
# of the losses that we compare.

# %%
run = TrainConfig(
    steps=500,
    batch_size=8,
    sequence_length=128,
    validate_every=50,
    validation_batches=8,
)
trained, histories = {}, {}
for name, model_config in models.items():
    torch.manual_seed(0)
    trained[name] = build_model(model_config).to(device)
    histories[name] = train(trained[name], corpus, run)
    loss = histories[name][-1]["validation_loss"]
    speeds = sorted(step["tokens_per_second"] for step in histories[name])
    print(
        f"{name:18} validation loss {loss:.3f}, "
        f"{speeds[run.steps // 2]:,.0f} tokens/s on {device}"
    )

# %% [markdown]
# ### What more parameters buy at the same work per token

# %% alt="Line chart: validation loss in nats against training tokens for the balanced MoE, the MoE without balancing and the dense model."
figure, axes = plt.subplots()
for name, history in histories.items():
    points = [
        (step["tokens"] / 1000, step["validation_loss"])
        for step in history
        if "validation_loss" in step
    ]
    axes.plot(
        *zip(*points, strict=True),
        marker="o",
        markersize=3,
        color=colours[name],
        label=name,
    )
axes.set(
    xlabel="thousand training tokens", ylabel="validation loss (nats per token)"
)
axes.legend()
plt.show()

# %%
dense = histories["dense"][-1]["validation_loss"]
moe = histories["MoE"][-1]["validation_loss"]
if moe < dense:
    print(f"The MoE ends {dense - moe:.3f} nats below the dense model.")
else:
    print(
        f"In this run the MoE ends {moe - dense:.3f} nats ABOVE the dense model."
    )
reached = [
    step["tokens"]
    for step in histories["MoE"]
    if step.get("validation_loss", dense + 1) <= dense
]
if reached:
    print(
        f"It had reached the dense model's last loss by {reached[0]:,} tokens,"
    )
    print(f"of {histories['MoE'][-1]['tokens']:,}.")

# %% [markdown]
# Read this as one run of one setting, not as a law. The setting was picked, among about a dozen that we tried, so that the
# effect shows within a minute: narrow layers, this learning rate, this many steps. With fewer steps or wider layers the
# two ended level, and with a learning rate of 0.01 the MoE ended *above* the dense model.
#
# The price is memory: all experts must be stored, though a token uses only two of them. And a step takes longer than the
# dense one at this size, because sorting tokens and many small products cost time that a single product does not.
# Both prices are the subject of later pages.

# %% [markdown]
# ### Who does the work
#
# Each column below is a training step, each row an expert of the last layer; the colour is its share of all
# assignments. With 16 experts an even share is 1/16 = 6.25 %.

# %% alt="Two heat maps of the share of assignments per expert over training steps: even with the balancing loss, a few busy experts without it."
figure, panels = plt.subplots(1, 2, figsize=(7, 3.4), sharey=True)
for axes, name in zip(panels, ("MoE", "MoE, no balancing"), strict=True):
    counts = torch.tensor(
        [step["counts"][-1] for step in histories[name]], dtype=torch.float32
    )
    shares = (counts / counts.sum(dim=1, keepdim=True)).T
    image = axes.imshow(
        shares.numpy(),
        aspect="auto",
        cmap="viridis",
        vmin=0,
        vmax=0.25,
        interpolation="nearest",
    )
    axes.set(title=name, xlabel="step")
    axes.grid(False)
panels[0].set_ylabel("expert")
figure.colorbar(image, ax=panels, label="share of assignments")
plt.show()

# %%
for name in ("MoE", "MoE, no balancing"):
    last = [step["counts"][-1] for step in histories[name][-50:]]
    counts_E = torch.tensor(last).sum(dim=0)
    shares_E = counts_E / counts_E.sum()
    print(f"{name}, last 50 steps:")
    print(
        f"  busiest expert {shares_E.max():6.1%}, idlest {shares_E.min():6.1%}"
    )
    print(f"  max violation  {max_violation(counts_E):6.2f}")

# %% [markdown]
# *Max violation* is how far the busiest expert is above its even share: 0 is perfect, 1 means twice the share. On one
# device uneven load wastes parameters that few tokens train. On many devices, with experts spread over them, it also
# wastes time: everyone waits for the device of the busiest expert.
#
# The balancing loss itself is easy to read: 1 when the load is even, and the number of experts divided by K when all
# tokens choose the same K.

# %%
tokens, _ = next(corpus.validation.windows(16, 128))
for name in ("MoE", "MoE, no balancing"):
    routing = trained[name].eval()(tokens[:, :-1].to(device)).routings[-1]
    loss = load_balancing_loss(routing.scores, routing.ids)
    print(f"{name:18} load-balancing loss {loss.item():.3f}")

# %% [markdown]
# ### What an expert is for
#
# Nobody told the router what a keyword or a comment is. Here is where it sends them: for each class of token, the share
# of its assignments that each expert of the last layer gets, in percent.

# %% alt="Heat map: for each Python token class, the percentage of its assignments that each of the 16 experts takes; some experts take most of one class."
counts = torch.zeros(len(CLASSES), config.moe.num_experts)
with torch.no_grad():
    for tokens, classes in corpus.validation.windows(16, 128, limit=12):
        ids = trained["MoE"](tokens[:, :-1].to(device)).routings[-1].ids.cpu()
        kinds = classes[:, :-1].reshape(-1, 1).expand_as(ids)
        counts.index_put_(
            (kinds.flatten(), ids.flatten()),
            torch.ones(ids.numel()),
            accumulate=True,
        )
shown = [kind for kind in range(1, len(CLASSES)) if counts[kind].sum() > 100]
shares = 100 * counts[shown] / counts[shown].sum(dim=1, keepdim=True)

figure, axes = plt.subplots(figsize=(7, 3.6))
axes.imshow(shares.numpy(), aspect="auto", cmap="viridis")
for row, column in (shares >= 10).nonzero().tolist():
    share = shares[row, column].item()
    colour = "white" if share < shares.max() / 2 else "black"
    axes.text(
        column, row, f"{share:.0f}", color=colour, ha="center", va="center"
    )
axes.set(
    xlabel="expert",
    xticks=range(shares.shape[1]),
    yticks=range(len(shown)),
    yticklabels=[CLASSES[k] for k in shown],
)
axes.grid(False)
plt.show()

# %%
everyone = 100 * counts.sum(dim=0) / counts.sum()
for row, kind in enumerate(shown):
    expert = int((shares[row] / everyone).argmax())
    times = shares[row, expert] / everyone[expert]
    print(
        f"{CLASSES[kind]:12} {times:4.1f} times its even share in expert {expert}"
    )

# %% [markdown]
# Experts do not become "the keyword expert" in a clean way, here or in large models. But the split is far from random:
# the router groups tokens that need similar treatment.

# %% [markdown]
# ### What the model writes
#
# After this little training the text is not sense yet, but it is recognisably Python. Decoding is greedy: the most likely
# token each time.

# %%
for name in ("MoE", "dense"):
    print(f"--- {name} ---")
    print("def " + "".join(stream(trained[name], corpus.tokenizer, "def ", 60)))

# %% [markdown]
# ## In three lines
#
# - An MoE layer is a router, a choice of the K best experts per token, and a weighted sum of what they compute.
# - At equal work per token more experts mean more parameters, and here a lower loss; the price is memory.
# - Without a balancing loss a few experts take most of the tokens.
#
# ## Try it
#
# 1. Set `top_k` to 1 in `override(config, {...})`. What happens to loss and speed?
# 2. Train with 64 experts of the same width. Does the loss keep falling?
# 3. Raise `load_balancing_coef` to 1. The load becomes very even: what does it cost?
