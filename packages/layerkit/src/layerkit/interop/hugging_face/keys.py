"""Two-way tables between keys of config.json and fields of configs.

Import reads each entry of a family's table (key → field), and export writes it (field → key). Each
key of a config.json is read by an entry, known not to change the computation, or an error.

A path such as `stack_tpl.remat` leads from the config of the network to a field. The prefix
`layer.` stands for the templates of all layers of the stack.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from layerkit.config import Config, field_names
from layerkit.errors import ConfigError

REQUIRED = object()
# Largest size of an axis in JAX.
_LARGEST_SIZE = 2**31 - 1

# Keys of any config.json that do not change the computation of logits, whatever their value: names,
# token ids, initialization, training, and generation. So are all that begin with an underscore, in
# which Transformers keeps notes.
# fmt: off
NEUTRAL = frozenset({
    "architectures", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "cls_token_id",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing",
    "id2label", "initializer_factor", "initializer_range", "is_llama_config", "label2id",
    "length_penalty", "max_length", "max_sequence_length", "min_length", "model_type", "n_ctx",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_past", "output_router_logits",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache",
})

# Keys that versions of Transformers spell differently. Export writes the older ones, which all
# versions read. The newer dtype takes precedence in a file with both.
NEWER_SPELLINGS = {"rope_scaling": "rope_parameters", "torch_dtype": "dtype"}

# Options that our families lack, with the value that has no effect. That of any other option is
# null, false, 0 or empty.
WITHOUT_EFFECT = {
    "causal": True, "embedding_multiplier": 1, "extra_pos_embeddings": 2, "full_attn_mod": 1,
    "interpolate_factor": 1, "is_causal": True, "logit_scale": 1, "logits_scaling": 1,
    "norm_topk_prob": True, "normalize_embedding": True,
    "residual_multiplier": 1, "scale_emb": 1, "use_rope": True,
}
# fmt: on


# Keys of weights that other libraries have compressed; the second is MLX's.
_QUANTIZATION = {"quantization_config", "quantization"}
QUANTIZED_HINT = (
    "Use the folder of the same model in float16, bfloat16 or float32, or dequantize it: "
    "model.dequantize().save_pretrained(…) in Transformers."
)
"""Remedy for weights whose compression is not supported."""


class UnsupportedModelError(ConfigError):
    """An error about a model that import or export would change."""


class ConfigFile:
    """The content of a config.json, which records the keys that were read.

    Attributes:
      owner: Owner of the keys in errors.
      last_key: Key that was read last, to be named if its value is of a wrong type.
    """

    def __init__(self, content: Mapping[str, Any], *, owner: str, neutral: frozenset[str]):
        """Keep the content; `neutral` are the keys that need not be read."""
        self._content, self.owner = dict(content), owner
        self.last_key: str | None = None
        inert = NEUTRAL | neutral
        self._unread = {key for key in content if key not in inert and not key.startswith("_")}

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        """Return the value of a key, or the default of Transformers if the file leaves it out.

        Raises:
          UnsupportedModelError: The key is left out and has no default, or its value is a number
            that is negative or too large for a size.
        """
        self._unread.discard(key)
        self.last_key = key
        value = self._content.get(key, default)
        if value is REQUIRED:
            raise UnsupportedModelError(
                "missing key", owner=self.owner, value=key, choices=self._content
            )
        if isinstance(value, (int, float)) and value < 0:
            raise self.invalid(key, "a number of 0 or more")
        if isinstance(value, int) and value > _LARGEST_SIZE:
            raise self.invalid(key, f"at most {_LARGEST_SIZE}")
        return value

    def invalid(
        self,
        key: str,
        expected: str | None = None,
        *,
        value: Any = None,
        choices: Collection[str] = (),
        hint: str | None = None,
    ) -> UnsupportedModelError:
        """Return the error about an unsupported value of a key; None is the value in the file."""
        return UnsupportedModelError(
            owner=self.owner,
            field=key,
            value=self._content.get(key) if value is None else value,
            expected=expected,
            choices=choices,
            hint=hint,
        )

    def require_all_read(self) -> None:
        """Raise `UnsupportedModelError` for unread keys whose value changes the computation."""
        rest = {
            key: value
            for key in sorted(self._unread)
            if (value := self._content[key]) is not None
            and (value != WITHOUT_EFFECT[key] if key in WITHOUT_EFFECT else value)
        }
        if rest:
            raise UnsupportedModelError(
                "unsupported options, which may change the computation",
                owner=self.owner,
                value=rest,
                hint=QUANTIZED_HINT if _QUANTIZATION & set(rest) else None,
            )


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of a family's table of keys.

    Attributes:
      read: Function (file, network) that sets fields of the config from keys of a config.json.
      write: Function from the config to the keys of its fields.
    """

    read: Callable[[ConfigFile, Config], None]
    write: Callable[[Config], dict[str, Any]] = lambda network: {}


def key(
    name: str,
    paths: str | tuple[str, ...],
    default: Any = REQUIRED,
    *,
    to_ours: Callable[[Any], Any] = lambda value: value,
    to_theirs: Callable[[Any], Any] = lambda value: value,
    fallback: Callable[[Config], Any] = lambda network: None,
) -> Entry:
    """Return the entry of one key and one field, or several fields of equal value.

    Args:
      name: Name of the key.
      paths: Paths of the fields.
      default: Value of Transformers if the key is left out.
      to_ours: Function from a value of the key to a value of the field.
      to_theirs: Inverse of `to_ours`.
      fallback: Function from the config, with the fields of earlier entries, to the value that null
        stands for.
    """
    fields = (paths,) if isinstance(paths, str) else paths

    def read(file: ConfigFile, network: Config) -> None:
        value = to_ours(file.get(name, default))
        value = fallback(network) if value is None else value
        for path in fields:
            set_field(network, path, value)

    def write(network: Config) -> dict[str, Any]:
        value = get_field(network, fields[0])
        return {name: to_theirs(fallback(network) if value is None else value)}

    return Entry(read, write)


def fixed(name: str, value: Any) -> Entry:
    """Return the entry of a key with one supported value, which is its default."""

    def read(file: ConfigFile, network: Config) -> None:
        del network
        if file.get(name, value) != value:
            raise file.invalid(name, repr(value))

    return Entry(read, lambda network: {name: value})


NORM_EPSILONS = ("final_norm_tpl.epsilon", "layer.norm_tpl.epsilon")
"""Fields of families with one epsilon for all norms."""
BIASES = ("layer.attention_tpl.use_bias", "layer.feed_forward_tpl.has_bias")
"""Fields of families with one switch for the biases of all linear layers."""


def layer_templates(network: Config) -> list[Config]:
    """Return the templates of a network's layers: of its stacks, the first ones and the pattern."""
    stacks = [getattr(network, name) for name in field_names(network) if name.endswith("stack_tpl")]
    return [
        template
        for stack in stacks
        for template in (*(stack.first_tpls or ()), *(stack.block_tpls or [stack.layer_tpl]))
    ]


def all_layers(network: Config) -> list[Config]:
    """Return the template of each layer of a network with one stack."""
    templates = layer_templates(network)
    first = len(network.stack_tpl.first_tpls or ())
    pattern = itertools.cycle(templates[first:])
    return [*templates[:first], *itertools.islice(pattern, network.num_layers - first)]


def set_field(network: Config, path: str, value: Any) -> None:
    """Set a field by its path; `layer.…` sets it in the templates of all layers."""
    for owner, name in _owners(network, path):
        setattr(owner, name, value)


def get_field(network: Config, path: str) -> Any:
    """Return a field by its path; `layer.…` reads the template of the first layer."""
    owner, name = next(_owners(network, path))
    return getattr(owner, name)


def _owners(network: Config, path: str) -> Iterator[tuple[Config, str]]:
    first, _, rest = path.partition(".")
    starts = [network] if first != "layer" else layer_templates(network)
    *parents, name = (path if first != "layer" else rest).split(".")
    for owner in starts:
        yield functools.reduce(getattr, parents, owner), name
