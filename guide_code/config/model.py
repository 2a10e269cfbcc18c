"""What a model is made of: a frozen dataclass in the words of published ``config.json`` files."""

from dataclasses import dataclass

from guide_code.config.checks import at_least, one_of
from guide_code.config.moe import MoEConfig
from guide_code.rotary import RopeScaling

QK_NORMS = ("none", "head", "full", "l2")
NORMS = ("rms", "layer")
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Transformer. ``moe=None`` makes every layer dense.

    Raises:
        ValueError: a field is out of range, or fields contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense feed-forward layers."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    """Width of a query; with latent attention ``qk_nope_head_dim + qk_rope_head_dim``."""
    max_length: int
    """Most positions of a sequence."""
    moe: MoEConfig | None = None
    first_k_dense: int = 0
    """Layers at the bottom that stay dense (DeepSeek)."""
    moe_layer_step: int = 1
    """Every how many layers one is sparse; with 2, layers 1, 3, 5, ... (Llama-4 Maverick, ``decoder_sparse_step``)."""
    dense_layers: tuple[int, ...] = ()
    """Further layers that stay dense, counted from 0 (``mlp_only_layers`` of Qwen)."""
    norm: str = "rms"
    """"rms", or "layer": LayerNorm with a bias (Phi-3.5-MoE)."""
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """Whether the output projection is the embedding."""
    head_bias: bool = False
    """A bias on the logits (``lm_head_bias`` of Phi-3.5-MoE)."""
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    attention_out_bias: bool = False
    """A bias on the output projection of attention (gpt-oss)."""
    qk_norm: str = "none"
    """RMSNorm of queries and keys: "head" of each head apart (Qwen3), "full" over all heads together (OLMoE), "l2"
    of each head and without weights, in layers with rotary positions only (Llama-4)."""
    attention_sinks: bool = False
    """A learned logit per head that takes part in every softmax and gives nothing (gpt-oss)."""
    layer_types: tuple[str, ...] | None = None
    """One of ``LAYER_TYPES`` per layer; None: "full_attention" everywhere."""
    sliding_window: int | None = None
    """Keys that a query of a "sliding_attention" layer sees, its own included."""
    attention_chunk_size: int | None = None
    """Positions of a block, within which "chunked_attention" layers look (Llama-4)."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
    """Turn the pairs (2i, 2i + 1), not (i, i + half) (DeepSeek, Llama-4)."""
    partial_rotary_factor: float = 1.0
    """The part of every head that is turned (GLM-4.5: 0.5)."""
    nope_layers: tuple[int, ...] = ()
    """Layers without positions, counted from 0. ``no_rope_layers`` of Llama-4 has a 1 for every *other* layer."""
    attn_temperature_tuning: bool = False
    """Sharpen the queries of layers without positions as the text grows (Llama-4)."""
    floor_scale: float = 8192.0
    """Tokens for each step of that."""
    attn_scale: float = 0.1
    """Its strength."""
    kv_lora_rank: int | None = None
    """Width of the latent of keys and values in multi-head latent attention (DeepSeek); None: grouped queries."""
    q_lora_rank: int | None = None
    """Width of the latent of queries; None: queries are projected directly (DeepSeek-V2-Lite)."""
    qk_nope_head_dim: int | None = None
    """Channels of a latent-attention head without positions."""
    qk_rope_head_dim: int | None = None
    """Channels with rotary positions; the keys of all heads share them."""
    v_head_dim: int | None = None
    """Channels of a value."""

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts, counted from 0."""
        if self.moe is None:
            return ()
        layers = range(self.first_k_dense, self.num_layers)
        return tuple(n for n in layers if (n + 1) % self.moe_layer_step == 0 and n not in self.dense_layers)

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are turned."""
        return self.qk_rope_head_dim or int(self.head_size * self.partial_rotary_factor)

    def __post_init__(self):
        at_least(self, 1, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        at_least(self, 1, "num_kv_heads", "head_size", "max_length", "moe_layer_step", "floor_scale")
        at_least(self, 1, "sliding_window", "attention_chunk_size", "kv_lora_rank", "q_lora_rank", *_LATENT)
        one_of(self, "qk_norm", QK_NORMS)
        one_of(self, "norm", NORMS)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor={self.partial_rotary_factor} must be in (0, 1]")
        if self.rotary_width % 2:
            part = f" x partial_rotary_factor={self.partial_rotary_factor}" * (self.partial_rotary_factor != 1)
            raise ValueError(f"head_size={self.head_size}{part} must be even: rotary positions turn pairs")
        if not 0 <= self.first_k_dense <= self.num_layers:
            raise ValueError(f"first_k_dense={self.first_k_dense} must be in [0, num_layers={self.num_layers}]")
        for name in ("dense_layers", "nope_layers"):
            if any(not 0 <= layer < self.num_layers for layer in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, num_layers={self.num_layers})")
        if self.moe is not None and self.moe.hidden_size != self.hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} differs from moe.hidden_size={self.moe.hidden_size}; "
                "set both, as override() does"
            )
        if self.moe is not None and self.moe.router == "hash" and self.moe.vocab_size != self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} differs from moe.vocab_size={self.moe.vocab_size}; "
                "set both, as override() does"
            )
        if self.tie_embeddings and self.head_bias:
            raise ValueError(f"head_bias={self.head_bias} cannot be had with tie_embeddings={self.tie_embeddings}")
        self._check_reach()
        self._check_latent()

    def _check_reach(self):
        """Refuse layer types that lack their size, and sizes that no layer uses."""
        types = self.layer_types or ()
        if self.layer_types is not None and len(types) != self.num_layers:
            raise ValueError(f"layer_types has {len(types)} entries but num_layers={self.num_layers}")
        unknown = sorted(set(types) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"layer_types has {', '.join(map(repr, unknown))}; valid: {', '.join(LAYER_TYPES)}")
        sizes = (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size"))
        for kind, name in sizes:
            if (kind in types) != (getattr(self, name) is not None):
                raise ValueError(
                    f"{name}={getattr(self, name)} and layer_types with {types.count(kind)} of {kind!r}: "
                    "one needs the other"
                )
        if self.attn_temperature_tuning and not self.nope_layers:
            raise ValueError(f"attn_temperature_tuning=True acts in nope_layers only, got nope_layers={()}")

    def _check_latent(self):
        """Refuse half of latent attention, and what it does not have."""
        if self.kv_lora_rank is None:
            for name in ("q_lora_rank", *_LATENT):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)} needs kv_lora_rank, got None")
            return
        missing = [name for name in _LATENT if getattr(self, name) is None]
        if missing:
            raise ValueError(f"kv_lora_rank={self.kv_lora_rank} needs {', '.join(missing)} as well")
        assert self.qk_nope_head_dim is not None and self.qk_rope_head_dim is not None
        if self.head_size != self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise ValueError(
                f"head_size={self.head_size} must be qk_nope_head_dim={self.qk_nope_head_dim} + "
                f"qk_rope_head_dim={self.qk_rope_head_dim}"
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must be num_heads={self.num_heads} with kv_lora_rank")
        unsupported = {
            "attention_bias": False, "attention_out_bias": False, "qk_norm": "none", "attention_sinks": False,
            "layer_types": None, "partial_rotary_factor": 1.0, "nope_layers": (),
        }  # fmt: skip
        for name, only in unsupported.items():
            if getattr(self, name) != only:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be {only!r} with kv_lora_rank={self.kv_lora_rank}"
                )
