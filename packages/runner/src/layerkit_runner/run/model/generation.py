"""Parts of the calls of a loaded model: token ids, options, padded batches and tokenizers."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from layerkit.config import build, is_config
from layerkit.config.checks import check_integers, check_non_negative, require
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import SampleDecoder, SampledRows
from layerkit_inputs.base.tokenizer_interface import Tokenizer, first_ids
from layerkit_inputs.packing.model_features import as_array, as_tokens, prompt_features
from layerkit_runner.config.config_tree import field_value
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.text import check_utf8
from layerkit_runner.partitioning import Partitioner

Ids = Sequence[int] | np.ndarray
"""Token ids of one text, `[tokens]`."""

_SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Rounding of batches up, so that calls of similar sizes share compiled functions.

    Attributes:
      row_multiple: Divisor of the number of rows.
      max_positions: Number of positions of the model; None for no limit.
    """

    row_multiple: int = 1
    max_positions: int | None = None

    def rows(self, count: int) -> int:
        """Return the rows of a batch for `count` texts."""
        return self.row_multiple * _power_of_two(-(-count // self.row_multiple))

    def length(self, tokens: int) -> int:
        """Return the length of a row for `tokens` tokens."""
        size = max(_SHORTEST, _power_of_two(tokens))
        return size if self.max_positions is None else max(tokens, min(size, self.max_positions))

    def prompt_and_steps(self, tokens: int, new_tokens: int) -> tuple[int, int]:
        """Return the width of prompts and the number of steps, whose sum the model must have."""
        width, steps = self.length(tokens), max(_SHORTEST, _power_of_two(new_tokens))
        if self.max_positions is None or width + steps <= self.max_positions:
            return width, steps
        if width + new_tokens <= self.max_positions:
            return width, self.max_positions - width
        return tokens, max(new_tokens, self.max_positions - tokens)


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def token_rows(rows: Iterable[Any], field: str, *, vocab_size: int | None) -> list[np.ndarray]:
    """Return the token ids of several texts, each int32 `[tokens]`; `field` is for messages."""
    arrays = [as_tokens(ids, where=f"{field}[{row}]") for row, ids in enumerate(rows)]
    for row, ids in enumerate(arrays):
        check_vocabulary(ids, f"{field}[{row}]", vocab_size=vocab_size)
    return arrays


def token_array(ids: Any, field: str, *, vocab_size: int | None) -> np.ndarray:
    """Return token ids int32 `[rows, length]` or `[length]`."""
    array = as_array(ids)
    if array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "iu":
        shown, expected = (
            f"{array.dtype}{list(array.shape)}",
            "token ids [rows, length] or [length]",
        )
        raise UsageError(field=field, value=shown, expected=expected)
    check_vocabulary(array, field, vocab_size=vocab_size)
    return array.astype(np.int32)


def check_vocabulary(ids: np.ndarray, field: str, *, vocab_size: int | None) -> None:
    """Raise `UsageError` for an id that the model has no embedding of, whose logits are NaN."""
    if vocab_size is not None and (unknown := ids[(ids < 0) | (ids >= vocab_size)]).size:
        expected = f"ids from 0 to {vocab_size - 1}"
        raise UsageError(field=field, value=int(unknown[0]), expected=expected)


def text_list(texts: Any, field: str) -> list[str]:
    """Return a text, or several, as a list; `field` is for messages."""
    listed = [texts] if isinstance(texts, str) else list(texts)
    for row, text in enumerate(listed):
        name = field if isinstance(texts, str) else f"{field}[{row}]"
        if not isinstance(text, str):
            raise UsageError(field=name, value=text, expected="a text")
        check_utf8(text, field=name)
    return listed


def prompt_ids(
    text: str, tokenizer: Tokenizer, *, is_source: bool, following: Ids = ()
) -> list[int]:
    """Return the ids of a prompt with the special ids of training data.

    Args:
      text: The prompt, which may be empty.
      tokenizer: Tokenizer of the prompt.
      is_source: True for a source of an encoder-decoder, which has the end id. Another prompt has
        the first ids of a text.
      following: Token ids that follow the prompt in the same text.
    """
    ids = tokenizer.encode(text).tolist()
    if is_source:
        return ids if tokenizer.eos_id is None else [*ids, tokenizer.eos_id]
    ids = [*first_ids([*ids, *following], tokenizer), *ids]
    if ids or len(following) or tokenizer.start_id is None:
        return ids
    return [tokenizer.start_id]  # A model needs one id to continue. `transformers` takes BOS.


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Options of `LoadedModel.generate`; None takes the value of the model's decoder.

    Attributes:
      max_length: Largest number of tokens of prompt and continuation, which the decoder may limit
        if `max_new_tokens` is None.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    max_length: int | None = None

    def filled(self, decoder: Any) -> GenerateOptions:
        """Return the options with those of a decoder in place of None.

        A decoder of another class than `SampleDecoder` gives greedy decoding.
        """
        sampling = decoder if isinstance(decoder, SampleDecoder) else SampleDecoder(temperature=0.0)
        values = {
            "max_new_tokens": decoder.max_decode_steps,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        }
        values |= {name: v for name in values if (v := getattr(self, name)) is not None}
        top_p = values["top_p"]
        check_integers(None, minimum=1, max_new_tokens=values["max_new_tokens"])
        check_integers(None, minimum=0, top_k=values["top_k"], seed=self.seed)
        check_non_negative(None, temperature=values["temperature"])
        require(0 < top_p <= 1, None, "top_p", top_p, "a number above 0 and at most 1")
        values["max_new_tokens"] = int(values["max_new_tokens"])  # NumPy's integers lack methods
        max_length = decoder.max_length if self.max_new_tokens is None else None
        return dataclasses.replace(self, **values, max_length=max_length)

    def limit(self, prompt_length: int) -> int:
        """Return the largest number of new tokens; not positive after a prompt that is too long."""
        assert self.max_new_tokens is not None
        if self.max_length is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.max_length - prompt_length)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely tokens are chosen."""
        return self.temperature == 0


def prompt_batch(
    prompts: Sequence[Any], options: GenerateOptions, buckets: Buckets, *, are_sources: bool
) -> tuple[NestedMap, int]:
    """Return the batch of prompts and the number of decoding steps, both rounded up.

    Args:
      prompts: Token ids of each prompt.
      options: Options, all set.
      buckets: Rounding of the batch.
      are_sources: True if the encoder of an encoder-decoder reads the prompts.

    Raises:
      UsageError: A prompt is empty, or longer than the decoder's `max_length`.
    """
    limits = [options.limit(1 if are_sources else len(prompt)) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UsageError(field=f"prompts[{row}]", value=[], expected="at least one token id")
        if limits[row] <= 0:
            expected = f"less than the default max_length={options.max_length}, or max_new_tokens"
            raise UsageError(
                field=f"length of prompts[{row}]", value=len(prompt), expected=expected
            )
    rows, widest = buckets.rows(len(prompts)), max(map(len, prompts))
    width, steps = buckets.prompt_and_steps(widest, max(limits))
    batch = prompt_features([*prompts, *[[]] * (rows - len(prompts))], length=width)
    if are_sources:
        batch = NestedMap(src=NestedMap(ids=batch.ids, paddings=batch.paddings))
    else:
        del batch["paddings"]
    batch.max_steps = np.array([*limits, *[0] * (rows - len(limits))], np.int32)
    if not options.is_greedy:
        batch.row_ids = _row_ids(prompts, rows)
        batch.temperature = np.full(rows, options.temperature, np.float32)
        batch.top_k = np.full(rows, options.top_k, np.int32)
        batch.top_p = np.full(rows, options.top_p, np.float32)
    return batch, steps


def _row_ids(prompts: Sequence[Any], rows: int) -> np.ndarray:
    """Return the ids that seed the samples of prompts, int32 `[rows]`.

    They depend on the tokens of a prompt and on the number of equal prompts before it, so that a
    prompt has the same samples among any others, and equal prompts have different ones.
    """
    counts: dict[bytes, int] = {}
    row_ids = np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens = np.asarray(prompt, np.int32).tobytes()
        counts[tokens] = count = counts.get(tokens, -1) + 1
        row_ids[row] = np.uint32(zlib.crc32(tokens, count)).astype(np.int32)
    return row_ids


class NoTokenizerError(UsageError):
    """An experiment whose data sets have no tokenizer."""


def find_tokenizer(
    resolved: ResolvedExperiment, partitioner: Partitioner, *, key: str | None = None
) -> Tokenizer:
    """Return the tokenizer of an experiment's data sets, or else of the experiment.

    The config of a data set that has a tokenizer is enough; other data sets are opened.

    Args:
      resolved: The experiment.
      partitioner: Started partitioner.
      key: `src` or `tgt` for data sets with two vocabularies; None for others.
    """
    configs = [*resolved.decode_datasets, *resolved.datasets]
    with as_usage_error():
        for config in configs:
            if is_config(tokenizer := field_value(config, "tokenizer")):
                return build(tokenizer)
        for config in configs:
            source = make_input(config, partitioner)
            with contextlib.closing(source):
                opened = source.text_tokenizer(key)
            if opened is not None:
                return opened
        if (tokenizer := resolved.experiment.tokenizer()) is not None:
            return build(tokenizer)
    expected = "a data set with a tokenizer, or a method tokenizer() of the experiment; a Hugging"
    expected += " Face folder needs tokenizer.json, tokenizer.model or spiece.model"
    hint = "Call generate_ids, score_ids and logits with token ids."
    raise NoTokenizerError("no tokenizer", owner=resolved.name, expected=expected, hint=hint)


def fetch_array(array: jax.Array) -> np.ndarray:
    """Return an array on the host of every process, whatever its layout."""
    if jax.process_count() == 1:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def cut_new_ids(rows: SampledRows, count: int) -> list[np.ndarray]:
    """Return the new ids of the first `count` rows, int32 `[tokens]` each."""
    outputs = map(fetch_array, (rows.ids, rows.prompt_lengths, rows.lengths))
    return [ids[start:end] for _, ids, start, end in zip(range(count), *outputs, strict=False)]
