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
# # Load a real model
#
# A published model is a `config.json` and some files of numbers. In this tutorial you read the first, count
# parameters before there are any, load the second into the code of this guide, prove that the model is the same as
# in transformers, and look at where its routers send a real text.
#
# The model is OLMoE-1B-7B ([@olmoe2024]): 64 experts in each of 16 layers, of which a token uses 8. Its weights are
# 14 GB. If they are on this machine already, the tutorial uses them. If not, it makes a checkpoint of the same
# architecture, an eighth as wide, with random weights, and needs no network at all. It takes well under a minute.

# %%
import filecmp
import json
import re
import tempfile
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, OlmoeConfig, logging

from guide_code.balance import expert_counts, max_violation
from guide_code.conversion.reader import FolderSource
from guide_code.conversion.registry import read_config
from guide_code.convert import load_hf, save_hf
from guide_code.corpus import load_corpus
from guide_code.generate import stream
from guide_code.load_metrics import load_entropy
from guide_code.models import cost
from guide_code.presets import preset
from guide_code.verify import verify

REPOSITORY = "allenai/OLMoE-1B-7B-0924"
DOWNLOAD = False  # True fetches 14 GB; comparing then takes 28 GB of memory
torch.manual_seed(0)
torch.set_grad_enabled(False)
logging.disable_progress_bar()
plt.rcParams.update({"figure.dpi": 120})
work = Path(tempfile.mkdtemp())

# %% [markdown]
# ## 1. From the configuration to the costs
#
# `preset` has the published values, each with its source, as a frozen `ModelConfig`. To count, the model is built on
# PyTorch's *meta* device, where tensors have shapes and no memory. So this works on a laptop for a model of any size:

# %%
config = preset("olmoe-1b-7b")
counted = cost("olmoe-1b-7b", config)
print(f"{counted.total_parameters / 1e9:.2f} billion parameters")
print(f"{counted.active_parameters / 1e9:.2f} billion used per token")
print(f"{counted.bytes['bfloat16'] / 1e9:.1f} GB in bfloat16")
print(f"{counted.flops_per_token / 1e9:.2f} GFLOP per token")

# %% [markdown]
# `moe-guide models` prints this for all presets. Do not build a preset from the class defaults of transformers. They
# rarely are a released model:

# %%
default = OlmoeConfig()
print("width inside an expert")
print("  published:    ", config.moe.moe_intermediate_size)
print("  class default:", default.intermediate_size)

# %% [markdown]
# ## 2. A checkpoint
#
# The cell below looks for the real one, and says what it found.


# %%
def find():
    try:
        return Path(
            snapshot_download(
                REPOSITORY,
                allow_patterns=["*.safetensors", "*.json"],
                local_files_only=not DOWNLOAD,
            )
        )
    except OSError:  # not here, or no network
        return None


def make_random():
    sizes = {"hidden_size": 256, "intermediate_size": 128, "vocab_size": 1024}
    tiny = OlmoeConfig(
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        eos_token_id=None,
        pad_token_id=None,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(tiny)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.06)
        else:
            parameter.uniform_(0.5, 1.5)  # norms: every weight shall matter
    folder = work / "random"
    model.save_pretrained(folder, max_shard_size="40MB")
    load_corpus(vocab_size=1024).tokenizer.save(str(folder / "tokenizer.json"))
    return folder


found = find()
folder = found or make_random()
if found:
    print(f"the real weights of {REPOSITORY}")
else:
    print(f"{REPOSITORY} is not here: a small model with RANDOM weights.")
    print("Parity means the same, but its text and its routing mean nothing.")

# %% [markdown]
# What is in the files? Numbers in names stand for layers and experts; here they are replaced by `*`.

# %%
source = FolderSource(folder)
kinds = Counter(re.sub(r"\d+", "*", name) for name in source.tensors)
for name, count in kinds.items():
    print(f"{count:5} x {name}")
print(f"in {len(source.files)} files")

# %% [markdown]
# Every expert has three matrices of its own. Fast code wants one *stack* per layer, with gate and up projection in one.
# That is a step where conversions go wrong in silence: swap the halves, or transpose across the axis of experts, and all
# shapes still fit.
#
# ## 3. Load it
#
# `load_hf` builds the model without memory and fills it one tensor at a time. It is strict in both directions. A tensor
# that is missing, or one too many, is an error with its name, and so is a field of `config.json` that nobody read.

# %%
ours = load_hf(folder)
experts = ours.blocks[0].ffn.experts
print("gate and up, stacked:", tuple(experts.gate_up_proj.shape))
print("down, stacked:       ", tuple(experts.down_proj.shape))

layer = "model.layers.0.mlp.experts.7"
gate = source.read(f"{layer}.gate_proj.weight")
up = source.read(f"{layer}.up_proj.weight")
print(
    "expert 7 is", torch.equal(torch.cat([gate, up]), experts.gate_up_proj[7])
)

# %% [markdown]
# ## 4. Is it the same model?
#
# Shapes that fit prove nothing. `verify` gives random tokens to both implementations, one after the other, and
# compares after every layer. In float32 the rest is rounding, which grows slowly with depth.

# %%
del ours
for row in verify(folder):
    print(f"{row.name:9} relative difference {row.relative_rms:.1e}")
    assert row.relative_rms < 2e-5

# %% [markdown]
# To see what a fault looks like, we change one field that has no weights. OLMoE does *not* divide the weights of the
# chosen experts by their sum (`norm_topk_prob=False`). Most models do, and a loader that assumes so fails without an
# error. We copy the folder, by links, with the other value:

# %%
wrong = work / "wrong"
wrong.mkdir()
for path in folder.iterdir():
    if path.name != "config.json":
        (wrong / path.name).symlink_to(path.resolve())
fields = json.loads((folder / "config.json").read_text())
(wrong / "config.json").write_text(
    json.dumps(fields | {"norm_topk_prob": True})
)

ours = load_hf(folder)
prompt = "def load(path):\n    with open(path) as file:\n"
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
ids = torch.tensor([tokenizer.encode(prompt).ids])
right_logits = ours(ids).logits
del ours
wrong_logits = load_hf(wrong)(ids).logits
difference = (wrong_logits - right_logits).norm() / right_logits.norm()
print(f"relative difference of the logits: {difference:.2f}")
assert difference > 1e-3

# %% [markdown]
# The model still loads, and still gives plausible numbers. Only a comparison finds it. On the command line this is
# `moe-guide verify FOLDER`.
#
# ## 5. Where do the tokens go?
#
# Now a real text: the source of a module of Python's standard library. Every layer returns its routing, so counting
# takes one line per layer.

# %%
ours = load_hf(folder)
text = Path(json.__file__).with_name("decoder.py").read_text()
ids = torch.tensor([tokenizer.encode(text).ids[:1024]])
routings = ours(ids).routings
E = ours.origin.config.moe.num_experts
counts_LE = torch.stack([expert_counts(r.ids, E) for r in routings])
print(f"{ids.numel()} tokens, {len(routings)} layers, {E} experts")
for index, counts_E in enumerate(counts_LE):
    print(
        f"layer {index:2}: busiest expert {max_violation(counts_E) + 1:4.1f} "
        f"times the mean, {int((counts_E == 0).sum()):2} idle, "
        f"entropy {load_entropy(counts_E):.2f}"
    )

# %% alt="Heat map of layers by experts: each expert's share of the assignments of a Python source file, as a multiple of an even share."
figure, axes = plt.subplots(figsize=(7, 1.2 + 0.25 * len(counts_LE)))
image = axes.imshow(
    (counts_LE / counts_LE.float().mean(dim=1, keepdim=True)).numpy(),
    aspect="auto",
    cmap="viridis",
    vmin=0,
    interpolation="nearest",
)
axes.set(xlabel="expert", ylabel="layer", yticks=range(len(counts_LE)))
figure.colorbar(image, label="times the mean")
figure.tight_layout()
plt.show()

# %% [markdown]
# Entropy is 1 when all experts get the same. A router that nobody trained is uneven too, since tokens of a text
# resemble each other. What differs in a trained one is *which* tokens go together.
#
# ## 6. Generate, and write it back
#
# The key-value cache of each layer is filled by the prompt; then every step computes one token.

# %%
pieces = stream(ours, tokenizer, "def load(", max_new_tokens=12)
print(repr("def load(" + "".join(pieces)))

# %% [markdown]
# `save_hf` reads the same table of names in the other direction. The files carry the same tensors, bit by bit, and
# transformers loads them:

# %%
if found:
    print("left out: it would write 14 GB")
else:
    save_hf(ours, work / "back")
    back = FolderSource(work / "back")
    assert back.tensors.keys() == source.tensors.keys()
    assert all(
        torch.equal(back.read(name), source.read(name)) for name in back.tensors
    )
    again = read_config(json.loads((work / "back/config.json").read_text()))
    assert again == ours.origin.config
    assert filecmp.cmp(work / "back/tokenizer.json", folder / "tokenizer.json")
    print(f"{len(back.tensors)} tensors are equal, and so is the configuration")

# %% [markdown]
# ## What to remember
#
# - Parameters, memory and work follow from the configuration. Count before you download.
# - A conversion is right when logits agree, not when shapes do. Compare layer by layer.
# - Strictness pays: what is missing, left over or unread should be an error.
#
# [Convert a checkpoint](../how-to/convert.md) has the families and what is refused.
#
# **Try it**: set `DOWNLOAD = True` on a machine with 30 GB of memory. Are the busiest experts of the real model the
# same for a text in English as for Python?
