"""``config.json`` read strictly: a field that nobody looked at, and that could change the numbers, is an error."""

from collections.abc import Iterable
from typing import Any

from guide_code.config import nearest

HARMLESS = frozenset({
    # who wrote it, and how
    "_attn_implementation_autoset", "_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype",
    "transformers_version",
    # the tokenizer's and generation's affair
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cache_implementation",
    # training only
    "attention_dropout", "aux_loss_alpha", "embd_pdrop", "ep_size", "hidden_dropout", "initial_context_length",
    "initializer_range", "input_jitter_noise", "output_router_logits", "pretraining_tp", "resid_pdrop",
    "router_aux_loss_coef", "router_z_loss_coef", "seq_aux", "gradient_checkpointing",
    # what a call returns, and whether it keeps a cache
    "output_attentions", "output_hidden_states", "return_dict", "use_cache", "is_encoder_decoder",
    "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    # what transformers 4 wrote into every nested configuration
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "is_decoder", "length_penalty", "max_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "prefix", "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
    "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16",
})  # fmt: skip
"""Fields of no influence on the logits of one forward."""

REQUIRED = object()


class Fields:
    """The fields of a ``config.json``, each to be taken, expected or skipped.

    Args:
        values: the JSON object.
    """

    def __init__(self, values: dict[str, Any]):
        self._values, self._seen = values, set(HARMLESS)

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field.

        Args:
            name: of the field.
            default: what the model's class takes when config.json has no such field; a null is a value.

        Raises:
            ValueError: the field is missing and has no default.
        """
        self._seen.add(name)
        if name in self._values:
            return self._values[name]
        if default is REQUIRED:
            raise ValueError(f"config.json lacks {name}{nearest(name, self._values)}")
        return default

    def expect(self, name: str, *allowed: Any) -> None:
        """Accept a field only if it is missing or has a value that we compute.

        Raises:
            ValueError: it has another value.
        """
        value = self.take(name, allowed[0])
        if value not in allowed:
            shown = " or ".join(repr(one) for one in allowed)
            raise ValueError(f"config.json has {name}={value!r}; only {shown} is supported")

    def skip(self, names: Iterable[str]) -> None:
        """Fields that this family writes and that change nothing."""
        self._seen.update(names)

    def rope(self, theta: float) -> dict[str, Any]:
        """``rope_parameters``, or the older ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor``, as one.

        Args:
            theta: what the class takes when none is given.

        Returns:
            At least ``rope_theta`` and ``rope_type`` ("default", "yarn", ...).
        """
        scaling = dict(self.take("rope_scaling", None) or {})
        merged = {"rope_theta": self.take("rope_theta", theta), "rope_type": "default"}
        factor = self.take("partial_rotary_factor", None)
        if factor is not None:
            merged["partial_rotary_factor"] = factor
        merged |= scaling | dict(self.take("rope_parameters", None) or {})
        merged["rope_type"] = merged.pop("type", None) or merged["rope_type"]
        return merged

    def finish(self) -> None:
        """Refuse what was not looked at.

        Raises:
            ValueError: a field is left over.
        """
        left = sorted(self._values.keys() - self._seen)
        if left:
            shown = ", ".join(f"{name}={self._values[name]!r}"[:80] for name in left)
            raise ValueError(f"config.json has fields whose effect is unknown here: {shown}")
