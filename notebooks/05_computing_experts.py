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
#     timeout: 180
# ---

# %% [markdown]
# # Computing experts
#
# A layer of experts is a few matmuls and a lot of moving rows about. The same numbers can be had many times faster or
# slower. This tutorial goes from the loop that everybody writes first to the fused kernel. Each step is compared with
# the loop, then timed on *this* machine against a floor that no layer of experts can beat.
#
# It takes under a minute on a laptop. Sizes are letters: T tokens, K choices per token, E experts, D the width of a
# token, I the width inside an expert.

# %%
import os
import subprocess
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from guide_code.benchmarks.candidates import Weights, parts
from guide_code.benchmarks.shapes import Shape, choices
from guide_code.benchmarks.timing import take_turns
from guide_code.experts.auto import auto_experts, choose
from guide_code.experts.blocked import blocked_experts
from guide_code.experts.fused import fused_experts, fused_obstacle
from guide_code.experts.gathered import gathered_experts
from guide_code.experts.grouped import grouped_experts
from guide_code.experts.loop import loop_experts
from guide_code.experts.padded import padded_experts
from guide_code.figures.style import LIGHT

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
tolerance = 2e-2 if dtype == torch.bfloat16 else 5e-6  # relative RMS
SIZE = dtype.itemsize
torch.manual_seed(0)
torch.set_grad_enabled(False)
plt.rcParams.update({"figure.dpi": 120, "axes.grid": True, "grid.alpha": 0.3})
blue, orange, green, violet = LIGHT.experts

shape = Shape("tutorial", 64, 8, 512, 256)
E, K, D, I = shape[1:]  # noqa: E741
weights = Weights.random(shape, dtype, device)
print(f"{device.type}, {dtype}, {torch.get_num_threads()} threads")
print(
    f"E={E} K={K} D={D} I={I}: {shape.numbers * SIZE / 1e6:.0f} MB of weights"
)

# %% [markdown]
# ## The floor
#
# Two things cannot be avoided. Every assignment, T x K of them, costs 3 x D x I multiplications: no layer is faster
# than one *dense* matmul of that size. And every expert that was chosen has to be read from memory once: no layer is
# faster than *streaming* those bytes. With many tokens the first is the larger, with one token the second.
#
# We time both cases: 1 token and 256. Functions take turns, so that a busy moment of the machine hits all of them,
# and a large buffer is read before each call, so that nobody finds the weights in the cache.

# %%
FEW, MANY = 1, 256


def tokens_for(num_tokens, shape):
    generator = torch.Generator().manual_seed(num_tokens)
    x_TD = torch.randn(num_tokens, shape.hidden_size, generator=generator)
    ids_TK = choices(num_tokens, shape, "balanced", generator)
    weights_TK = torch.rand(ids_TK.shape, generator=generator).softmax(dim=1)
    return x_TD.to(device, dtype), ids_TK.to(device), weights_TK.to(device)


inputs = {T: tokens_for(T, shape) for T in (FEW, MANY)}
expected = {T: loop_experts(*inputs[T], *weights) for T in inputs}
floors = {
    T: parts(weights, shape, inputs[T][1])[name].run
    for T, name in ((FEW, "stream"), (MANY, "dense"))
}
results = {}


def step(name, function, sizes=(FEW, MANY)):
    for T in sizes:
        wanted = expected[T].double()
        error = (function(*inputs[T], *weights).double() - wanted).norm()
        assert error <= tolerance * wanted.norm(), f"{name} differs"
        times = take_turns(
            {
                name: lambda turn, T=T: function(*inputs[T], *weights),
                "floor": lambda turn, T=T: floors[T](),
            },
            repeats=11 if T == FEW else 4,
            device=device,
        )
        took, floor = times[name].median_ms, times["floor"].median_ms
        results[name, T] = took / floor
        print(
            f"{name:10} T={T:<5} equal to the loop, {took:8.2f} ms, "
            f"floor {floor:6.2f} ms, ratio {took / floor:5.1f}"
        )


# %% [markdown]
# ## 1. A loop over all experts
#
# The version that everybody writes first, and that shipped in libraries for years: for each expert, find its tokens,
# compute them, add the result. With one token, 56 of the 64 visits find nobody, and each still pays for a mask, a
# search and two matmuls of no rows.


# %%
def swiglu(hidden):
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


def visit_all(x_TD, ids_TK, weights_TK, up, down, act=swiglu):
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in range(len(up)):
        tokens_N, slots_N = torch.where(ids_TK == expert)
        hidden_NI = act(x_TD[tokens_N] @ up[expert].T)
        y_ND = (hidden_NI @ down[expert].T).float()
        y_ND = y_ND * weights_TK[tokens_N, slots_N, None]
        out_TD.index_add_(0, tokens_N, y_ND)
    return out_TD.to(x_TD.dtype)


step("visit all", visit_all)

# %% [markdown]
# With many tokens every expert has work, and even this loop can come near the floor on a CPU: a matmul of some dozens
# of rows takes far longer than the search for them. On a GPU, where such a matmul takes microseconds, the visits
# themselves are what one waits for.

# %% [markdown]
# ## 2. Only the experts that were chosen
#
# `loop_experts` is the reference of this guide: it asks once which experts occur and never touches the others. It is
# still a loop in Python, and on a GPU it has to wait for the answer before it can go on.

# %%
step("loop", loop_experts)

# %% [markdown]
# ## 3. Sort, then one grouped matmul
#
# Sort the assignments by expert. Now each expert's rows lie together, and one *grouped* matmul takes all experts:
# rows `ends[e-1]:ends[e]` times weight `e`. Nothing is padded and nothing dropped, however uneven the load
# ([@megablocks2022, section 5]). At the end, the K results of a token are added in a fixed order, so the result is
# the same on every run. That is `grouped_experts`, the default. The whole idea is short:


# %%
def sort_and_group(x_TD, ids_TK, weights_TK, up, down):
    expert_N, order_N = ids_TK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(
        expert_N, torch.arange(len(up), device=device), right=True
    ).int()
    rows_ND = x_TD[order_N // ids_TK.shape[1]]
    hidden_NI = swiglu(F.grouped_mm(rows_ND, up.mT, offs=ends_E))
    y_ND = F.grouped_mm(hidden_NI, down.mT, offs=ends_E)
    y_TKD = y_ND[order_N.argsort()].view(*ids_TK.shape, -1)
    return (y_TKD * weights_TK[..., None]).sum(dim=1).to(x_TD.dtype)


step("sketch", sort_and_group)
step("grouped", grouped_experts)

# %% [markdown]
# What the sketch lacks is what costs users their days: ids that mean "no expert", widths that `F.grouped_mm` refuses,
# biases, autocast, a backward pass. [Ten traps](04_traps.py) has relatives of these.
#
# ## 4. Padded
#
# Give every expert a box of equal height and multiply all boxes at once ([@gshard2020, section 2.2]; [@switch2021]).
# Shapes are fixed, which compilers and older accelerators like. But all boxes are as high as the fullest one, and
# with one token, 64 boxes of one row each mean that *all* weights are read:

# %%
step("padded", padded_experts)

# %% [markdown]
# Here the load was even. Let a few experts be popular (Zipf's law), and most of the boxes hold air:

# %%
generator = torch.Generator().manual_seed(0)
for routing in ("balanced", "zipf"):
    ids_TK = choices(MANY, shape, routing, generator)
    fullest = int(torch.bincount(ids_TK.flatten(), minlength=E).max())
    print(
        f"{routing:9} fullest expert {fullest:4} rows, so {E * fullest:6} rows "
        f"are computed for {MANY * K} that are needed"
    )

# %% [markdown]
# ## 5. Gathered, for a few tokens
#
# With one token there is nothing to sort. `gathered_experts` fetches a copy of the weights for each assignment and
# does two batched matmuls: no search, no wait, fixed shapes. The copy is the price: it moves the weights three times
# (read, write, read), and at many tokens it does not fit into memory.

# %%
step("gathered", gathered_experts, sizes=[FEW])
copies = MANY * K * 3 * D * I * SIZE
print(f"at {MANY} tokens the copies would take {copies / 1e9:.1f} GB")

# %% [markdown]
# ## 6. Blocked, in the cache
#
# On a CPU, a grouped matmul is a loop inside. Then it pays to loop on the outside: take the rows of a few experts
# through up projection, activation and down projection while they are in the cache, instead of writing all T x K x 2
# x I of them to memory and reading them again. `blocked_experts` does that; it matters the more, the more cores share
# the memory, and in training, where it also saves copies.

# %%
step("blocked", blocked_experts)

# %% [markdown]
# ## 7. Let the sizes decide
#
# No single way wins everywhere, and all of them share one set of parameters. `auto_experts` looks at the sizes, the
# dtype and the device, and can say why:

# %%
for T in inputs:
    choice = choose(T, K, E, dtype=dtype, device=device)
    print(f"T={T}: {choice.backend} because {choice.reason}")
step("auto", auto_experts)

# %% alt="Horizontal bars for each way to compute experts, with 1 token and with 256 tokens: time as a multiple of the floor, which is a vertical line at 1."
names = list(dict.fromkeys(name for name, _ in results))
figure, panels = plt.subplots(1, 2, figsize=(7, 3.2), sharey=True)
for axes, T in zip(panels, inputs, strict=True):
    ratios = [results.get((name, T)) for name in names]
    for row, ratio in enumerate(ratios):
        axes.barh(
            row, ratio or 0, color=green if names[row] == "auto" else blue
        )
        label = f" {ratio:.1f}" if ratio else " too large"
        axes.text(ratio or 1, row, label, va="center", fontsize=8)
    axes.axvline(1, color=LIGHT.ink, linewidth=1)
    top = max(ratio for ratio in ratios if ratio)
    axes.set(xlim=(0, top * 1.2), xlabel="times the floor")
    axes.set_axisbelow(True)
    axes.set_title(f"{T:,} token{'s' if T > 1 else ''}", fontsize=10)
panels[0].set_yticks(range(len(names)), names)
panels[0].invert_yaxis()
figure.tight_layout()
plt.show()

# %% [markdown]
# With one token the ways differ by a large factor, since some read weights that nobody asked for, or read them twice.
# With many, a CPU spends most of its time in matmuls whichever way is taken. Run the notebook twice: what changes
# between runs is noise.
#
# ## 8. One kernel that does it all
#
# On a GPU, what is left is memory traffic between kernels: the sorted copy of the tokens, the activation, the K
# results per token. The Triton kernels of this guide gather rows while loading them ([@scattermoe2024]), apply SwiGLU
# before anything is written, and keep little for the backward pass ([@sonicmoe2025]). With at most 16 tokens another
# path reads each chosen weight once.
#
# Without a GPU, Triton's interpreter runs the same kernels line by line in Python. That shows that the values are
# right and says nothing about speed, so no time is given. It has to be asked for before Triton is imported, hence a
# new process.

# %%
TOY = """
import torch
from guide_code.benchmarks.candidates import Weights
from guide_code.benchmarks.shapes import Shape, choices
from guide_code.experts.fused import fused_experts
from guide_code.experts.loop import loop_experts
from guide_code.kernels.layer import saved_values

shape = Shape("toy", 4, 2, 32, 16)
weights = Weights.random(shape, torch.float32, torch.device("cpu"))
for T in (3, 19):
    generator = torch.Generator().manual_seed(T)
    x_TD = torch.randn(T, 32, generator=generator, requires_grad=True)
    ids_TK = choices(T, shape, "zipf", generator)
    weights_TK = torch.rand(T, 2, generator=generator)
    grads = []
    for function in (loop_experts, fused_experts):
        out_TD = function(x_TD, ids_TK, weights_TK, *weights)
        wanted = [x_TD, *weights]
        grads.append([out_TD, *torch.autograd.grad(out_TD.sum(), wanted)])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
    print(f"T={T}: output and gradients equal to the loop")
kept = saved_values(2048, 1024, 8)
print("kept per token for the backward pass, D=2048, I=1024, K=8:")
print(f"  {kept['ours']:,} values instead of {kept['everything']:,}")
"""


def in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TOY]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


obstacle = fused_obstacle(device)
if not obstacle:
    print(f"on the GPU: {torch.cuda.get_device_name()}")
    step("fused", fused_experts)
elif "TRITON_INTERPRET" in obstacle:
    print("no GPU: toy size, in Triton's interpreter")
    print(in_the_interpreter())
else:
    print(f"not run here: {obstacle}")

# %% [markdown]
# ## The roofline
#
# Why does one token cost so much? Two numbers describe a machine well enough: multiplications and additions per
# second (FLOP/s), and bytes per second from memory. What a layer reaches is limited by one or by the other, depending
# on its *arithmetic intensity*, the FLOPs that it does per byte it moves ([Williams et al.
# 2009](https://doi.org/10.1145/1498765.1498785)). Drawn over the intensity, the two limits look like a roof.
#
# We measure both limits with matmuls: a large square one, and one row times a large matrix.

# %%
side = 8192 if device.type == "cuda" else 1536
square = torch.randn(side, side, device=device, dtype=dtype)
column = torch.randn(1, 4096, device=device, dtype=dtype)
matrix = torch.randn(16384, 4096, device=device, dtype=dtype)
limits = take_turns(
    {
        "rate": lambda turn: square @ square,
        "bandwidth": lambda turn: F.linear(column, matrix),
    },
    repeats=9,
    device=device,
)
peak = 2 * side**3 / (limits["rate"].median_ms / 1e3)
bandwidth = matrix.numel() * SIZE / (limits["bandwidth"].median_ms / 1e3)
ridge = peak / bandwidth
print(f"{peak / 1e9:,.0f} GFLOP/s and {bandwidth / 1e9:.1f} GB/s from memory")
print(f"the roof bends at {ridge:.1f} FLOP per byte")


# %%
def work(num_tokens):
    """FLOPs of the layer, and the bytes that it must move at least."""
    active = min(E, num_tokens * K)
    flops = 2 * num_tokens * K * 3 * D * I
    return flops, (active * 3 * D * I + 2 * num_tokens * D) * SIZE


counts = [1, 4, 16, 64, 256]
calls = {T: tokens_for(T, shape) for T in counts}
for T in counts:
    auto_experts(*calls[T], *weights)
timings = take_turns(
    {
        f"{T}": lambda turn, T=T: auto_experts(*calls[T], *weights)
        for T in counts
    },
    repeats=5,
    device=device,
)
reached = {T: work(T)[0] / (timings[f"{T}"].median_ms / 1e3) for T in counts}
intensity = {T: work(T)[0] / work(T)[1] for T in counts}

# %% alt="Roofline on logarithmic axes: the measured memory limit rises to the measured matmul rate; points of the expert layer from 1 to 256 tokens lie under it, few tokens on the slope and many below the flat part."
figure, axes = plt.subplots(figsize=(7, 3.8))
left, right = min(intensity.values()) / 2, max(*intensity.values(), ridge) * 3
axes.plot(
    [left, ridge, right],
    [bandwidth * left / 1e9, peak / 1e9, peak / 1e9],
    color=LIGHT.ink,
    label="roof: memory, then matmul",
)
axes.plot(
    list(intensity.values()),
    [rate / 1e9 for rate in reached.values()],
    "o-",
    color=blue,
    label="experts, by tokens",
)
for T in counts:
    axes.annotate(
        f"{T:,}",
        (intensity[T], reached[T] / 1e9),
        xytext=(4, -12),
        textcoords="offset points",
        fontsize=8,
    )
axes.axvline(ridge, color=LIGHT.line, linestyle=":")
axes.set(
    xscale="log",
    yscale="log",
    xlabel="FLOP per byte",
    ylabel="GFLOP/s",
    xlim=(left, right),
)
axes.margins(y=0.15)
axes.legend(fontsize=8, loc="lower right")
for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
plt.show()

# %% [markdown]
# From 1 to 8 tokens the intensity hardly moves: each further token brings its own experts, so more work means more
# bytes. Once all experts are active, their weights are shared, and the intensity grows by T x K / E rows per expert.
# A dense layer grows by T. That is why a sparse model needs E / K times as many tokens in flight to keep a machine
# busy:

# %%
dense_tokens = ridge * SIZE / 2
print(f"tokens until the matmul is the limit: dense {dense_tokens:,.0f}")
print(f"  {E} experts, {K} per token: {dense_tokens * E / K:,.0f}")

# %% [markdown]
# ## Latency and the number of experts
#
# Switch sends every token to one expert ([@switch2021]), so the work for one token is the same with 8 experts or
# 512. A loop over all experts does not know that. Nor, quite, does a grouped matmul on a CPU, which visits every
#    group inside, the empty ones too; in C++ that is cheap and not free. `gathered_experts` and `blocked_experts`
#    look at nothing but the experts that were chosen. Here is one token, with ReLU experts as in Switch:

# %%
counts = [8, 32, 128, 512]
width, inner = 256, 512
up = torch.randn(counts[-1], inner, width, device=device, dtype=dtype) / 16
down = torch.randn(counts[-1], width, inner, device=device, dtype=dtype) / 22
one = torch.randn(1, width, device=device, dtype=dtype)
share = torch.ones(1, 1, device=device)
relu = {"activation": "relu", "gated": False}
ways = {
    "all experts": visit_all,
    "grouped": grouped_experts,
    "blocked": blocked_experts,
    "gathered": gathered_experts,
}
if not obstacle:
    ways["fused"] = fused_experts


def one_token(function, count):
    sample = torch.Generator().manual_seed(count)
    experts = torch.randint(count, (16, 1, 1), generator=sample).to(device)
    options = {"act": F.relu} if function is visit_all else relu

    def call(turn):
        ids = experts[turn % 16]
        return function(one, ids, share, up[:count], down[:count], **options)

    return call


turns = {(n, c): one_token(f, c) for c in counts for n, f in ways.items()}
for (name, count), call in turns.items():
    wanted = turns["all experts", count](0).double()
    error = (call(0).double() - wanted).norm()
    assert error <= tolerance * wanted.norm(), f"{name} differs"
latency = take_turns(turns, repeats=11, device=device)

# %% alt="Line chart on logarithmic axes: latency of one token against 8 to 512 experts; the loop over all experts rises in proportion, grouped rises late, blocked and gathered stay nearly flat."
figure, axes = plt.subplots(figsize=(7, 3.4))
for name, colour in zip(
    ways, (orange, violet, blue, green, LIGHT.ink), strict=False
):
    times = [latency[name, count] for count in counts]
    axes.plot(
        counts, [t.median_ms for t in times], "o-", color=colour, label=name
    )
    axes.fill_between(
        counts,
        [t.low_ms for t in times],
        [t.high_ms for t in times],
        color=colour,
        alpha=0.15,
    )
axes.set(
    xscale="log",
    yscale="log",
    xlabel="experts",
    ylabel="latency of one token (ms)",
)
axes.set_xticks(counts, counts)
axes.yaxis.set_major_formatter("{x:g}")
axes.minorticks_off()
axes.legend(fontsize=8)
plt.show()

# %%
for name in ways:
    first, last = (latency[name, count].median_ms for count in (8, 512))
    print(
        f"{name:12} 8 experts {first:6.2f} ms, 512 experts {last:6.2f} ms: "
        f"{last / first:.1f} times"
    )

# %% [markdown]
# The band is where eight of ten calls lie: it says how much of a difference is noise.
#
# ## In three lines
#
# - Compare with a floor, not with a slow version: dense FLOPs for many tokens, bytes of the chosen experts for few.
# - Sort once and group. Pad only where shapes must be fixed; gather only for a handful of tokens.
# - Work may depend on the experts that were chosen, never on those that exist.
#
# ## Try it
#
# 1. Which ways get slower with `"zipf"` in `tokens_for`, and why does the floor stay where it is?
# 2. The floor of one training step contains something more. What?
# 3. At which T do `loop` and `grouped` meet on your machine? Add 16 and 128 to `inputs`.
#
# <details><summary>Answers</summary>
#
# 1. `padded`: its boxes are as high as the fullest expert. The floor counts assignments and active experts; with 256
#    tokens nearly all experts are active either way.
# 2. Writing a gradient for *all* E experts, also the idle ones, which is E / K times the weights that one token
#    reads.
# 3. It depends on the cost of one step in Python against one matmul of T x K / E rows. On a CPU they are close once
#    each expert has some dozens of rows; on a GPU the loop stays behind much longer.
#
# </details>
