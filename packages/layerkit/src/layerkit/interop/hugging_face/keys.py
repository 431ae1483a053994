"""The two-way table between the keys of a config.json and the fields of our configs.

Each entry of a family's table can be read (key → field) and written (field → key), so that import
and export cannot drift apart. Nothing is ignored in silence: a key of a config.json is read by an
entry, or known not to change the computation, or refused by name.

A path such as `stack_tpl.remat` leads from the config of the network to a field. It may begin with
`layer.`, for the templates of all layers of the stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from layerkit.config import Config, field_names, is_config
from layerkit.near_names import near_names

REQUIRED = object()
# The largest size of an axis in JAX.
_LARGEST_SIZE = 2**31 - 1

# Keys of any config.json that say nothing about the computation of logits: names, token ids,
# initialisation, and how to generate.
# fmt: off
NEUTRAL = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_from_model_config", "_name_or_path",
    "_num_labels", "architectures", "attn_implementation", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "cls_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "id2label", "initializer_factor",
    "initializer_range", "is_llama_config", "label2id", "length_penalty", "max_length",
    "min_length", "model_type", "n_ctx", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_past", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
})


# Keys whose false value says what is so anyway, and whose true value would change the computation.
NEUTRAL_WHERE_FALSE = frozenset({
    "add_cross_attention", "is_decoder", "is_encoder_decoder", "pruned_heads", "rope_interleaved",
    "tie_encoder_decoder", "use_bidirectional_attention", "use_mrope",
})
# fmt: on


class UnsupportedModelError(ValueError):
    """A model that cannot be read or written without changing what it computes."""


class ConfigFile:
    """The content of a config.json, which remembers what was read of it."""

    def __init__(self, content: Mapping[str, Any], *, neutral: frozenset[str]):
        self._content = dict(content)
        self._unread = set(content) - NEUTRAL - neutral

    @property
    def model_type(self) -> str:
        """Which family the model is of."""
        return str(self._content.get("model_type"))

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of a key; `default`, as Transformers has it, where the file leaves it out.

        Raises:
          UnsupportedModelError: left out and without default, or a number that no size can be.
        """
        self._unread.discard(key)
        value = self._content.get(key, default)
        if value is REQUIRED:
            raise UnsupportedModelError(
                f"config.json of a {self.model_type} model has no {key!r}"
                f"{near_names(key, self._content)}"
            )
        if isinstance(value, int) and abs(value) > _LARGEST_SIZE:
            raise self.refuse(key, f"is too large. Expected at most {_LARGEST_SIZE}.")
        return value

    def refuse(self, key: str, reason: str) -> UnsupportedModelError:
        """The error that says why the value of a key is not supported."""
        value = self._content.get(key)
        return UnsupportedModelError(
            f"config.json of a {self.model_type} model: {key}={value!r} {reason}"
        )

    def refuse_unread(self) -> None:
        """Refuses keys that nothing has read and that have a value.

        None asks for nothing. False or 0 may: it may switch off what is on by default.

        Raises:
          UnsupportedModelError: naming them all.
        """
        rest = {
            key: value
            for key, value in sorted(self._content.items())
            if key in self._unread
            and value is not None
            and not (key in NEUTRAL_WHERE_FALSE and not value)
        }
        if rest:
            raise UnsupportedModelError(
                f"config.json of a {self.model_type} model has options that layerkit does not know,"
                f" and which might change what it computes: {rest}"
            )


class Entry(Protocol):
    """A row of a family's table."""

    def read(self, file: ConfigFile, network: Config) -> None:
        """Sets fields of our config from keys of a config.json."""

    def write(self, network: Config) -> dict[str, Any]:
        """The keys of a config.json that say what fields of our config say."""


@dataclasses.dataclass(frozen=True)
class Key:
    """One key, for one field or for several that always agree.

    Attributes:
      name: The key.
      paths: The fields.
      default: What Transformers takes where the key is left out.
      to_ours, to_theirs: Turn a value of the key into one of the field, and back.
    """

    name: str
    paths: str | tuple[str, ...]
    default: Any = REQUIRED
    to_ours: Callable[[Any], Any] = lambda value: value
    to_theirs: Callable[[Any], Any] = lambda value: value

    def read(self, file: ConfigFile, network: Config) -> None:
        value = self.to_ours(file.get(self.name, self.default))
        for path in self._paths():
            set_field(network, path, value)

    def write(self, network: Config) -> dict[str, Any]:
        return {self.name: self.to_theirs(get_field(network, self._paths()[0]))}

    def _paths(self) -> tuple[str, ...]:
        return (self.paths,) if isinstance(self.paths, str) else self.paths


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A key of which one value alone is supported.

    Attributes:
      name: The key.
      value: What it must be, and what is written.
      default: What Transformers takes where it is left out; None for `value`.
    """

    name: str
    value: Any
    default: Any = None

    def read(self, file: ConfigFile, network: Config) -> None:
        del network
        default = self.value if self.default is None else self.default
        if file.get(self.name, default) != self.value:
            raise file.refuse(self.name, f"is not supported, only {self.value!r}")

    def write(self, network: Config) -> dict[str, Any]:
        del network
        return {self.name: self.value}


def layer_templates(network: Config) -> list[Config]:
    """The templates of the layers of a network: one a stack, or those of its pattern."""
    stacks = [getattr(network, name) for name in field_names(network) if name.endswith("stack_tpl")]
    return [template for stack in stacks for template in stack.block_tpls or [stack.layer_tpl]]


def set_field(network: Config, path: str, value: Any) -> None:
    """Sets a field by its path; `layer.…` in the templates of all layers."""
    for owner, name in _owners(network, path):
        setattr(owner, name, value)


def get_field(network: Config, path: str) -> Any:
    """Reads a field by its path; `layer.…` in the template of the first layer."""
    owner, name = next(_owners(network, path))
    return getattr(owner, name)


def _owners(network: Config, path: str) -> Iterator[tuple[Config, str]]:
    first, _, rest = path.partition(".")
    starts = [network] if first != "layer" else layer_templates(network)
    *parents, name = (path if first != "layer" else rest).split(".")
    for owner in starts:
        for parent in parents:
            owner = getattr(owner, parent)
            if not is_config(owner):
                raise UnsupportedModelError(f"{path}: {parent} is not set")
        yield owner, name
