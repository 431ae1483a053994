"""Scores of texts, and the batches that compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.packing.model_features import encoder_decoder_features, lm_features
from layerkit_runner.run.model.generation import Buckets, Ids


@dataclasses.dataclass(frozen=True)
class Score:
    """The log-likelihood of a text under a model.

    Attributes:
      ids: Scored token ids of the text, int32 `[tokens]`.
      token_log_probs: log p of each token given those before it, in nats, float32 `[tokens]`.
      is_most_likely: Whether the model ranks each token first, bool `[tokens]`.
    """

    ids: np.ndarray
    token_log_probs: np.ndarray
    is_most_likely: np.ndarray

    @property
    def log_likelihood(self) -> float:
        """Sum of `token_log_probs`."""
        return float(np.sum(self.token_log_probs, dtype=np.float64))

    @property
    def num_tokens(self) -> int:
        """Number of scored tokens."""
        return len(self.ids)


@dataclasses.dataclass(frozen=True)
class ScoredRows:
    """A batch of texts, and the positions of the labels of each text.

    Attributes:
      batch: Arrays of the model, `[rows, length]`.
      ids: Scored token ids of each text.
      starts: Position of the first scored label of each text.
    """

    batch: NestedMap
    ids: Sequence[Ids]
    starts: Sequence[int]

    def scores(self, log_probs: np.ndarray, is_most_likely: np.ndarray) -> list[Score]:
        """Return the score of each text from the arrays `[rows, length]` of all labels."""
        scores = []
        for row, (ids, start) in enumerate(zip(self.ids, self.starts, strict=True)):
            part = slice(start, start + len(ids))
            scores.append(
                Score(np.asarray(ids, np.int32), log_probs[row, part], is_most_likely[row, part])
            )
        return scores


def source_rows(
    sources: Sequence[Ids], targets: Sequence[Ids], buckets: Buckets, *, start_id: int
) -> ScoredRows:
    """Return the rows of an encoder-decoder, whose targets begin with `start_id`."""
    blank: list[Ids] = [[]] * (buckets.rows(len(targets)) - len(targets))
    batch = encoder_decoder_features(
        [*sources, *blank],
        [*targets, *blank],
        inputs_length=buckets.length(max(map(len, sources))),
        targets_length=buckets.length(max(map(len, targets))),
        bos_id=start_id,
    )
    return ScoredRows(batch, targets, [0] * len(targets))


def text_rows(
    prompts: Sequence[Ids], texts: Sequence[Ids], buckets: Buckets, *, is_prefix: bool
) -> ScoredRows:
    """Return the rows of a language model.

    The first id of a row is only read. It is not scored, if it is the first one of a text.

    Args:
      prompts: Token ids before each text.
      texts: Token ids of each text.
      buckets: Rounding of the batch.
      is_prefix: Whether all positions of a prompt attend to each other.
    """
    # The first id of each text without a prompt is read as its prompt.
    split = [
        (before, after) if len(before) else (after[:1], after[1:])
        for before, after in zip(prompts, texts, strict=True)
    ]
    inputs: list[Any] = [before for before, _ in split]
    targets: list[Any] = [after for _, after in split]
    longest = max(len(before) + len(after) - 1 for before, after in split)
    blank: list[Ids] = [[]] * (buckets.rows(len(texts)) - len(texts))
    batch = lm_features(
        [*inputs, *blank],
        [*targets, *blank],
        length=buckets.length(max(longest, 0)),
        bos_id=None,
    )
    if not is_prefix:
        del batch.inputs_indicator
    return ScoredRows(batch, targets, [max(len(before) - 1, 0) for before in inputs])
