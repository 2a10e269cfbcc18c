"""Small models of every family, of transformers, with nothing left at a value that would hide a fault."""

import torch
import transformers

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS = {
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 6, "head_dim": 12, "rms_norm_eps": 1e-4}),
    "llama": ("Llama", {"intermediate_size": 56, "head_dim": 12, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"intermediate_size": 56, "sliding_window": None}),
}
"""By name: prefix of the classes, and the fields that differ from ``SHAPE``. Heads times their size, the widths of
experts and of dense layers all differ from the hidden size."""


def make(name: str, **changes) -> torch.nn.Module:
    """A model in evaluation mode; weights, norms, biases, sinks and the bias for choice are all at random."""
    prefix, fields = MODELS[name]
    config_name = f"{prefix}TextConfig" if name.startswith("llama4") else f"{prefix}Config"
    config = getattr(transformers, config_name)(**SHAPE | fields | changes)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.normal_(0.0, 0.4 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5, generator=generator)
            if "norm" in key and key.endswith("weight"):
                tensor += 1.0
    return model
