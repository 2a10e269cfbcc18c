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
# # Offload experts
#
# A token uses few experts, yet all of them must be *somewhere*. They need not be on the device that computes. Leave them
# in the CPU's memory or on disk, keep a few on the device in a cache, and fetch the others when a token asks for them
# ([@eliseev2023]). You trade time for memory. This tutorial measures both.
#
# Without a GPU, "device" below means memory that belongs to this process, and fetching is a copy into it from files. The
# mechanism is the same, the link is faster. Everything is random or trained here, so no network is needed, and it takes
# about half a minute.

# %%
import ctypes
import json
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import save_file

from guide_code.build import build_model
from guide_code.config import override, to_dict
from guide_code.conversion.measure import peak_memory
from guide_code.corpus import load_corpus
from guide_code.decoding import decode
from guide_code.experts.expert_cache import MemoryStore
from guide_code.experts.loop import loop_experts
from guide_code.experts.offloaded import OffloadedExperts
from guide_code.figures.style import LIGHT
from guide_code.offload import load_model, offload_experts_, offload_stats
from guide_code.presets import preset
from guide_code.training.config import TrainConfig
from guide_code.training.loop import train

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
plt.rcParams.update({"figure.dpi": 120, "axes.grid": True, "grid.alpha": 0.3})
blue, orange, green, violet = LIGHT.experts
torch.manual_seed(0)

# %% [markdown]
# ## 1. One layer, the same bits
#
# A layer of 32 experts, of which a token uses 2. The weights lie in a *store* in CPU memory. The cache has room for 4
# experts on the device. What comes out does not depend on the cache, bit by bit: each expert multiplies the same rows,
# and results are added in the same order.

# %%
E, K, D, I = 32, 2, 512, 384  # noqa: E741
gate_up = torch.randn(E, 2 * I, D) / D**0.5
down = torch.randn(E, D, I) / I**0.5
store = MemoryStore({"gate_up_proj": gate_up, "down_proj": down})


def layer(slots):
    experts = OffloadedExperts(E, D, I, store=store, cache_experts=slots)
    return experts.to(device)


x_TD = torch.randn(6, D, device=device)
ids_TK = torch.rand(6, E, device=device).topk(K).indices
weights_TK = torch.rand(6, K, device=device).softmax(dim=1)
with torch.no_grad():
    outputs = [layer(slots)(x_TD, ids_TK, weights_TK) for slots in (1, 2, 4, E)]
print("equal:", all(torch.equal(out, outputs[0]) for out in outputs))
assert all(torch.equal(out, outputs[0]) for out in outputs)
one = sum(t.nbytes for t in store.read(0).values())
print(f"one expert {one / 1e6:.1f} MB, all {E * one / 1e6:.0f} MB")

# %% [markdown]
# With room for one expert the layer works in waves: fetch, compute, fetch, compute.
#
# ## 2. Why sparse layers and offloading belong together
#
# Some code calls *all* experts for each token and multiplies by zero what was not chosen. With resident experts this
# wastes work. With offloaded ones every expert that is called has to be moved, too. So computing only what is
# active should gain more when experts are offloaded. We measure one token at a time, four ways, and all must give the
# same output:

# %%
all_1E = torch.arange(E, device=device)[None]
on_device = gate_up.to(device), down.to(device)
experts = layer(4)
tokens = []
for _ in range(8):
    ids_1K = torch.rand(1, E, device=device).topk(K).indices
    weights_1K = torch.full((1, K), 1 / K, device=device)
    weights_1E = torch.zeros(1, E, device=device).scatter(1, ids_1K, weights_1K)
    tokens.append((torch.randn(1, D, device=device), ids_1K, weights_1K))
    tokens[-1] += (weights_1E,)


def timed(function):
    times = []
    for token in tokens:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = function(*token)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[len(times) // 2], out


ways = {
    ("resident", "all"): lambda x, i, w, v: loop_experts(
        x, all_1E, v, *on_device
    ),
    ("resident", "active"): lambda x, i, w, v: loop_experts(
        x, i, w, *on_device
    ),
    ("offloaded", "all"): lambda x, i, w, v: experts(x, all_1E, v),
    ("offloaded", "active"): lambda x, i, w, v: experts(x, i, w),
}
with torch.no_grad():
    for way in ways.values():
        way(*tokens[0])
    measured = {name: timed(way) for name, way in ways.items()}
expected = measured["resident", "active"][1]
for name, (milliseconds, out) in measured.items():
    assert (out - expected).norm() < 1e-5 * expected.norm(), name
    print(f"{name[0]:9} {name[1]:6} {milliseconds:7.2f} ms")
saved = {}
for place in ("resident", "offloaded"):
    of_all, active = (measured[place, way][0] for way in ("all", "active"))
    saved[place] = of_all - active
    print(
        f"{place}: active only is {of_all / active:.1f} times faster "
        f"and saves {saved[place]:.2f} ms per token"
    )
more = saved["offloaded"] > saved["resident"]
print("It saves more time when offloaded:", "yes" if more else "NOT HERE")

# %% [markdown]
# The *ratio* can be near E / K = 16 in both places, since in both the time is bytes that are touched. What differs is
# the time that is saved, because the bytes come over a slower way. The wider the gap between the device's memory and
# the link, the more this counts: on a GPU about a factor of 50 to 100 (some TB/s against some ten GB/s).
#
# ## 3. How often is an expert there already?
#
# That depends on the routing. Neighbouring tokens of a real text share experts more often than chance would have it. We
# train `tiny` for a moment, offload its 16 experts, and let it write 48 tokens for each size of the cache. Also, each
# layer *looks ahead*: it asks the next layer's router about its own tokens, and moves what it says meanwhile. That is right
# often, because a layer changes its tokens little ([@eliseev2023, section 3.2]).

# %%
corpus = load_corpus(vocab_size=1024)
torch.manual_seed(0)
small = build_model(preset("tiny")).to(device)
run = TrainConfig(steps=60, batch_size=4, sequence_length=64, validate_every=60)
history = train(small, corpus, run)
print(f"validation loss {history[-1]['validation_loss']:.2f}")

prompt_BS = corpus.encode("class Reader:\n    def read(self, ")[None].to(device)
hit_rates = {}
for slots in (2, 4, 8, 16):
    torch.manual_seed(0)
    offloaded = build_model(preset("tiny")).to(device)
    offloaded.load_state_dict(small.state_dict())
    offload_experts_(offloaded.eval(), "cpu", cache_experts=slots)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        steps = decode(
            offloaded, prompt_BS, 48, temperature=0.8, generator=generator
        )
        written = [int(token) for token in steps]
    stats = offload_stats(offloaded)
    hit_rates[slots] = stats.hit_rate
    print(
        f"{slots:2} slots: {stats.hit_rate:4.0%} of {stats.requests} found "
        f"theirs, {stats.prefetched:3} moved ahead, "
        f"{stats.bytes_moved / 1e6:5.1f} MB moved"
    )
print(repr(corpus.decode(torch.tensor(written))))

# %% [markdown]
# A cache smaller than the two experts that one token needs would miss at each step.
#
# ## 4. Memory and latency against the size of the cache
#
# For these we need experts of some size. This model has 300 MB of them in four layers, with random weights, in a
# file. What it writes means nothing, so its hit rates say nothing about real models; memory and time do. We
# generate 17 tokens for each size, and measure the memory that the process takes beyond what it had. (`RssAnon`
# on Linux: pages of the file, which the system can drop at any time, do not count.)

# %%
sizes = {"hidden_size": D, "moe_intermediate_size": I, "num_experts": E}
config = override(preset("tiny"), sizes | {"num_layers": 4})
folder = Path(tempfile.mkdtemp()) / "checkpoint"
folder.mkdir()
weights = build_model(config).state_dict()
weights.pop("head.weight")  # tied to the embedding
save_file(weights, folder / "model.safetensors")
(folder / "config.json").write_text(json.dumps(to_dict(config)))
(folder / "step.json").write_text('{"step": 0}')
del weights, small, offloaded


def give_back_freed_memory():
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def generate(slots):
    options = {"offload": "disk", "cache_experts": slots} if slots else {}
    model = load_model(folder, device=device, **options)
    times = []
    with torch.no_grad():
        start = time.perf_counter()
        for _ in decode(model, prompt_BS, 17):
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
    return 1000 * sorted(times[1:])[8], offload_stats(model)


rows = {}
for slots in (2, 4, 8, 16, 32, None):
    give_back_freed_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        latency, stats = generate(slots)
        peak = torch.cuda.max_memory_allocated() - before
    elif sys.platform == "linux":
        with peak_memory() as peaks:
            latency, stats = generate(slots)
        peak = peaks[0]
    else:
        (latency, stats), peak = generate(slots), float("nan")
    rows[slots] = peak / 1e6, latency, stats.hit_rate
    name = f"{slots:2} slots" if slots else "resident"
    rate = f"{stats.hit_rate:4.0%} hits" if slots else ""
    print(f"{name:8} {peak / 1e6:4.0f} MB, {latency:6.1f} ms per token {rate}")

# %% alt="Two line charts against the number of experts of a layer in the cache: memory rises with it, and time per token falls towards that of resident experts."
figure, panels = plt.subplots(1, 2, figsize=(7, 3.2))
cached = [slots for slots in rows if slots]
for axes, index, label in zip(
    panels, (0, 1), ("memory (MB)", "ms per token"), strict=True
):
    values = [rows[slots][index] for slots in cached]
    axes.plot(cached, values, "o-", color=blue, label="offloaded")
    axes.axhline(rows[None][index], color=LIGHT.ink, label="resident")
    axes.set(xlabel="experts in the cache", ylabel=label, ylim=(0, None))
    axes.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# Memory grows in a straight line with the cache. Time falls as more requests find their expert; a busy machine adds
# noise to it. Even with room for all
# of them the first use of each is a fetch; in 17 tokens that is much of what remains at the right end.
#
# ## What to remember
#
# - Offloading changes where weights are, and not a bit of the output.
# - Call only the experts that were chosen: each one more is a transfer.
# - Hit rates come from the routing of *your* text. Measure them before you buy memory.
# - It suits one user. In a batch, tokens ask for many experts at once, and the cache no longer helps.
#
# [Offload experts](../how-to/offload.md) has the commands. [Inference](../learn/inference.md#when-experts-do-not-fit)
# has the bound by the link.
#
# **Try it**: give `decode` a batch of 8 prompts. What happens to the hit rate with 8 slots?
