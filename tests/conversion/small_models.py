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
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-4,
}
QWEN = {"intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
MODELS = {
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 6, "head_dim": 12, "rms_norm_eps": 1e-4}),
    "mixtral_window": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 6, "sliding_window": 5}),
    "olmoe": (
        "Olmoe",
        {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True},
    ),
    "qwen3_moe": ("Qwen3Moe", QWEN | {"head_dim": 12, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2_moe": (
        "Qwen2Moe",
        QWEN | {"shared_expert_intermediate_size": 36, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT
        | {"n_routed_experts": 12, "n_shared_experts": 2, "q_lora_rank": 18, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT
        | {"n_routed_experts": 12, "n_shared_experts": 2, "q_lora_rank": 18, "n_group": 4, "topk_group": 2}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v2_lite": ("DeepseekV2", LATENT | {"n_routed_experts": 6, "n_shared_experts": 1, "q_lora_rank": None}),
    "glm4_moe": (
        "Glm4Moe",
        {key: LATENT[key] for key in ("intermediate_size", "moe_intermediate_size", "num_experts_per_tok")}
        | {"first_k_dense_replace": 1, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "head_dim": 12}
        | {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
    ),
    "gpt_oss": (
        "GptOss",
        {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12}
        | {"sliding_window": 5, "rope_parameters": YARN | {"truncate": False}},
    ),
    "llama4_text": (
        "Llama4",
        {"intermediate_size": 24, "intermediate_size_mlp": 56, "num_local_experts": 6, "num_experts_per_tok": 2}
        | {"head_dim": 12, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1], "attention_chunk_size": 8}
        | {"floor_scale": 4, "attn_scale": 0.3},
    ),
    "phimoe": (
        "Phimoe",
        {"intermediate_size": 24, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True}
        | {"router_jitter_noise": 0.2, "rms_norm_eps": 1e-4},
    ),
    "llama": (
        "Llama",
        {"intermediate_size": 56, "head_dim": 12, "tie_word_embeddings": True, "attention_bias": True}
        | {"rope_parameters": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ),
    "mistral": ("Mistral", {"intermediate_size": 56, "sliding_window": 7}),
    "qwen2": ("Qwen2", {"intermediate_size": 56}),
    "qwen3": ("Qwen3", {"intermediate_size": 56, "head_dim": 12}),
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
