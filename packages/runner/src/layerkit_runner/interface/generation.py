"""Options, batches and streamed text of the continuation of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.decoding import SampleDecoder
from layerkit.nested_map import NestedMap
from layerkit_inputs.features import prompt_features
from layerkit_inputs.tokenizers import Tokenizer
from layerkit_runner.errors import UsageError
from layerkit_runner.interface.buckets import Buckets

# Text of bytes that are not yet a whole character.
_INCOMPLETE = "�"


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Options of `LoadedModel.generate`; None for those of the model's decoder.

    Attributes:
      max_new_tokens: Largest number of new tokens of each prompt.
      temperature: Divisor of the logits; 0 chooses the most likely tokens.
      top_k: Number of most likely tokens to sample from; 0 for all.
      top_p: Total probability of the fewest most likely tokens to sample from; 1 for all.
      seed: Seed of the random numbers.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def filled(self, decoder: Any) -> GenerateOptions:
        """Return the options with those of a decoder in place of None.

        A decoder of another class than `SampleDecoder` gives greedy decoding.
        """
        own = decoder if isinstance(decoder, SampleDecoder) else SampleDecoder(temperature=0.0)
        defaults = {
            "max_new_tokens": decoder.max_decode_steps,
            "temperature": own.temperature,
            "top_k": own.top_k or 0,
            "top_p": 1.0 if own.top_p is None else own.top_p,
        }
        given = {name: getattr(self, name) for name in defaults}
        values = {name: defaults[name] if given[name] is None else given[name] for name in given}
        for name, is_valid, expected in (
            ("max_new_tokens", _is_integer(values["max_new_tokens"], 1), "a positive integer"),
            ("temperature", 0 <= values["temperature"] < float("inf"), "a number of 0 or more"),
            ("top_k", _is_integer(values["top_k"], 0), "an integer of 0 or more"),
            ("top_p", 0 < values["top_p"] <= 1, "a number above 0 and at most 1"),
        ):
            if not is_valid:
                raise UsageError(field=name, value=values[name], expected=expected)
        if not _is_integer(self.seed, 0):
            expected = "an integer from 0 to 2**31 - 1"
            raise UsageError(field="seed", value=self.seed, expected=expected)
        return dataclasses.replace(self, **values)

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
      options: Options without None.
      buckets: Rounding of sizes.
      are_sources: True if the prompts are the sources of an encoder-decoder.
    """
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UsageError(field=f"prompts[{row}]", value=[], expected="at least one token id")
    assert options.max_new_tokens is not None
    rows, widest = buckets.rows(len(prompts)), max(map(len, prompts))
    width, steps = buckets.prompt_and_steps(widest, options.max_new_tokens)
    batch = prompt_features([*prompts, *[[]] * (rows - len(prompts))], length=width)
    if are_sources:
        batch = NestedMap(src=NestedMap(ids=batch.ids, paddings=batch.paddings))
    else:
        del batch["paddings"]
    batch.max_steps = np.full(rows, options.max_new_tokens, np.int32)
    if not options.is_greedy:
        batch.temperature = np.full(rows, options.temperature, np.float32)
        batch.top_k = np.full(rows, options.top_k, np.int32)
        batch.top_p = np.full(rows, options.top_p, np.float32)
    return batch, steps


def _is_integer(value: Any, least: int) -> bool:
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_number and least <= value < 2**31


class TextStream:
    """The text of a continuation, in pieces of whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start without tokens."""
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._num_returned = 0

    def add(self, token_id: int) -> str:
        """Add a token and return the text that it completes; empty if it completes none."""
        self.ids.append(token_id)
        text = self._tokenizer.decode(self.ids)
        if text.endswith(_INCOMPLETE):
            return ""
        return self._take(text)

    def rest(self) -> str:
        """Return the text of the last tokens, whose last character may be incomplete."""
        return self._take(self._tokenizer.decode(self.ids))

    def _take(self, text: str) -> str:
        piece = text[self._num_returned :]
        self._num_returned = len(text)
        return piece
