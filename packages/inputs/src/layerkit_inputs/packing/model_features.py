"""Conversion of examples of token ids to the arrays that models read, in plain NumPy.

An example is a sequence of targets, or of inputs and targets. A decoder-only model reads both as
one sequence (`lm_features`), an encoder-decoder model as two (`encoder_decoder_features`). A row
holds one or several examples, which `segment_ids` distinguish; see `packing`.

The layout is that of SeqIO's feature converters and of Pax's models, so a data set from there
trains the same way. `labels` are the predicted tokens. `ids` are the tokens that they are predicted
from: `labels` shifted by one position, with `bos_id` first. Padding is determined by lengths and
never by an id, so id 0 may be a real token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap

Tokens = Sequence[int] | np.ndarray
"""Token ids of one example, `[tokens]`."""


NegativeIds = Literal["error", "no_weight", "weight"]
"""Meaning of negative ids: an error, or absolute values with weight 0 or with their weight."""


class Segment(NamedTuple):
    """A stretch of an example within a row."""

    tokens: np.ndarray
    """Predicted tokens, int32 `[tokens]`."""
    num_inputs: int = 0
    """Number of input tokens at the beginning; negative if the inputs ended before the stretch."""
    first_id: int = 0
    """Id that the first token is predicted from."""

    @classmethod
    def of(cls, inputs: np.ndarray, targets: np.ndarray, first_id: int | None) -> Segment:
        """Return the segment of an example; without `first_id`, its first token is only read."""
        tokens = np.concatenate([inputs, targets])
        if first_id is not None or not len(tokens):
            return cls(tokens, len(inputs), first_id or 0)
        return cls(tokens[1:], max(len(inputs) - 1, 0), int(tokens[0]))


def lm_features(
    inputs: Sequence[Tokens] | None,
    targets: Sequence[Tokens],
    *,
    length: int,
    rows: Iterable[Iterable[int]] | None = None,
    bos_id: int | None = 0,
    pad_id: int = 0,
    weights_on_targets_only: bool = False,
    negative_ids: NegativeIds = "error",
) -> NestedMap:
    """Return rows for a decoder-only model, with inputs and targets as one sequence.

    >>> batch = lm_features([[7, 8, 1]], [[3, 1]], length=6, weights_on_targets_only=True)
    >>> batch.ids.tolist(), batch.labels.tolist(), batch.weights.tolist()
    ([[0, 7, 8, 1, 3, 1]], [[7, 8, 1, 3, 1, 0]], [[0.0, 0.0, 0.0, 1.0, 1.0, 0.0]])

    Without packing, `ids` is `labels` shifted by one, so the first padded position of a short row
    holds the last token. In packed rows all padding is `pad_id`.

    Args:
      inputs: Input ids of each example, or None if there are only targets.
      targets: Target ids of each example. The caller adds end-of-sequence ids.
      length: Positions of a row.
      rows: Numbers of the examples in each row. None: one example a row.
      bos_id: Id that an example's first token is predicted from. None: the first token is only
        read, and the second one is predicted from it.
      pad_id: Id of padded positions.
      weights_on_targets_only: Whether inputs have weight 0, for example to score continuations
        (LAMBADA).
      negative_ids: Meaning of negative ids. With `no_weight` a negative id stands for its absolute
        value without loss, as in Praxis' `LanguageModelFeatures`.

    Returns:
      `ids`, `labels`, `segment_ids`, `segment_pos` int32 `[rows, length]`, `weights`, `paddings`
      float32 `[rows, length]`. With `inputs` also `inputs_indicator` int32 `[rows, length]`, 1 on
      the inputs and on the position that reads the last of them. In a prefix LM, all queries attend
      to these positions.

    Raises:
      ConfigError: The examples of a row are longer than the row, or not token ids.
    """
    has_inputs = inputs is not None
    if inputs is None:
        inputs = [()] * len(targets)
    may_be_negative = negative_ids != "error"
    segments = []
    for number, (before, after) in enumerate(zip(inputs, targets, strict=True)):
        where = f"example {number}"
        before = as_tokens(before, where=f"{where}, inputs", may_be_negative=may_be_negative)
        after = as_tokens(after, where=f"{where}, targets", may_be_negative=may_be_negative)
        segments.append(Segment.of(before, after, bos_id))
    batch = segment_features(
        _rows_of(segments, rows),
        length=length,
        pad_id=pad_id,
        has_inputs=has_inputs,
        weights_on_targets_only=weights_on_targets_only,
    )
    if rows is None:
        batch.ids[:, 1:] = batch.labels[:, :-1]
    is_negative = batch.labels < 0
    if is_negative.any():
        if negative_ids == "no_weight":
            batch.weights[is_negative] = 0
        batch.ids, batch.labels = np.abs(batch.ids), np.abs(batch.labels)
    return batch


def segment_features(
    rows: Sequence[Sequence[Segment]],
    *,
    length: int,
    pad_id: int = 0,
    has_inputs: bool = False,
    weights_on_targets_only: bool = False,
) -> NestedMap:
    """Return packed rows for a decoder-only model from the segments of each row.

    The arguments but `rows` and the arrays are those of `lm_features`. With `has_inputs` there is
    an `inputs_indicator`.

    Raises:
      ConfigError: The segments of a row are longer than the row.
    """
    segments = [segment for row in rows for segment in row]
    sizes = _sizes_that_fit(rows, length=length)
    labels = _end_to_end([segment.tokens for segment in segments])
    first_ids = np.array([segment.first_id for segment in segments], np.int32)
    return stretch_features(
        _predicted_from(labels, sizes, first_ids),
        labels,
        rows=np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
        sizes=sizes,
        num_rows=len(rows),
        length=length,
        pad_id=pad_id,
        num_inputs=np.array([segment.num_inputs for segment in segments], np.int64)
        if has_inputs
        else None,
        weights_on_targets_only=weights_on_targets_only,
    )


def stretch_features(
    ids: np.ndarray,
    labels: np.ndarray,
    *,
    rows: np.ndarray,
    sizes: np.ndarray,
    num_rows: int,
    length: int,
    pad_id: int = 0,
    num_inputs: np.ndarray | None = None,
    weights_on_targets_only: bool = False,
) -> NestedMap:
    """Return packed rows for a decoder-only model from concatenated segments, row after row.

    Args:
      ids: Ids that labels are predicted from, int `[tokens]`.
      labels: Predicted tokens, int `[tokens]`.
      rows: Row of each segment, int `[segments]`, in ascending order.
      sizes: Tokens of each segment, int `[segments]`. Those of a row sum to at most `length`.
      num_rows: Number of rows.
      length: Positions of a row.
      pad_id: Id of padded positions.
      num_inputs: Input tokens of each segment, int `[segments]`, as in `Segment`. None: no inputs,
        and no `inputs_indicator`.
      weights_on_targets_only: Whether inputs have weight 0.

    Returns:
      The arrays of `lm_features`.
    """
    totals = np.bincount(rows, sizes, minlength=num_rows).astype(np.int32)
    valid = np.arange(length, dtype=np.int32) < totals[:, None]
    numbers = np.arange(len(rows)) - np.searchsorted(rows, rows) + 1
    begins = (np.cumsum(sizes) - sizes).astype(np.int32)
    positions = np.arange(len(labels), dtype=np.int32) - np.repeat(begins, sizes)
    weights = valid
    if num_inputs is not None:
        inputs_end = np.repeat(num_inputs, sizes)
        if weights_on_targets_only:
            weights = fill_rows(positions >= inputs_end, valid, bool)
    batch = NestedMap(
        ids=fill_rows(ids, valid, np.int32, fill=pad_id),
        labels=fill_rows(labels, valid, np.int32, fill=pad_id),
        weights=weights.astype(np.float32),
        paddings=(~valid).astype(np.float32),
        segment_ids=fill_rows(np.repeat(numbers.astype(np.int32), sizes), valid, np.int32),
        segment_pos=fill_rows(positions, valid, np.int32),
    )
    if num_inputs is not None:
        batch.inputs_indicator = fill_rows(positions <= inputs_end, valid, np.int32)
    return batch


def fill_rows(
    values: np.ndarray, valid: np.ndarray, dtype: npt.DTypeLike, *, fill: int = 0
) -> np.ndarray:
    """Return a new array with `values` at the valid positions, in order, and `fill` elsewhere.

    Args:
      values: One value for each valid position, `[tokens]`.
      valid: bool `[rows, length]`.
      dtype: Dtype of the array.
      fill: Value at the other positions.
    """
    if values.size == valid.size:
        return values.reshape(valid.shape).astype(dtype)
    placed = np.full(valid.shape, fill, dtype)
    placed[valid] = values
    return placed


def encoder_decoder_features(
    inputs: Sequence[Tokens],
    targets: Sequence[Tokens],
    *,
    inputs_length: int,
    targets_length: int,
    rows: Iterable[Iterable[int]] | None = None,
    bos_id: int = 0,
    pad_id: int = 0,
) -> NestedMap:
    """Return rows for an encoder-decoder model, with inputs in `src` and targets in `tgt`.

    In packed rows an example has the same number in `segment_ids` of both sides.

    Args:
      inputs: Ids of each example for the encoder.
      targets: Ids to predict of each example.
      inputs_length: Positions of a row of `src`.
      targets_length: Positions of a row of `tgt`.
      rows: Numbers of the examples in each row. None: one example a row.
      bos_id: Id that an example's first target is predicted from.
      pad_id: Id of padded positions.

    Returns:
      `src` with `ids`, `segment_ids` int32 and `paddings` float32 `[rows, inputs_length]`, and
      `tgt` with the same and `labels` int32, `weights` float32 `[rows, targets_length]`. In packed
      rows both also have `segment_pos` int32.

    Raises:
      ConfigError: The examples of a row are longer than the row, or not token ids.
    """
    if rows is not None:
        rows = [list(numbers) for numbers in rows]
    sides = []
    for side, examples, length in (
        ("inputs", inputs, inputs_length),
        ("targets", targets, targets_length),
    ):
        segments = [
            Segment(as_tokens(tokens, where=f"example {number}, {side}"), first_id=bos_id)
            for number, tokens in enumerate(examples)
        ]
        sides.append(segment_features(_rows_of(segments, rows), length=length, pad_id=pad_id))
    return _two_sides(*sides, is_packed=rows is not None)


def stretch_pair_features(
    inputs: np.ndarray,
    targets: np.ndarray,
    *,
    rows: np.ndarray,
    sizes: np.ndarray,
    num_rows: int,
    lengths: tuple[int, int],
    is_packed: bool,
    bos_id: int = 0,
    pad_id: int = 0,
) -> NestedMap:
    """Return rows for an encoder-decoder model from concatenated examples, row after row.

    `sizes` int `[examples, 2]` and `lengths` are those of `stretch_features` for the two sides. The
    arrays are those of `encoder_decoder_features`.
    """
    first_ids = np.full(len(rows), bos_id)
    sides = ((inputs, inputs), (_predicted_from(targets, sizes[:, 1], first_ids), targets))
    source, target = (
        stretch_features(
            ids,
            labels,
            rows=rows,
            sizes=sizes[:, side],
            num_rows=num_rows,
            length=lengths[side],
            pad_id=pad_id,
        )
        for side, (ids, labels) in enumerate(sides)
    )
    return _two_sides(source, target, is_packed=is_packed)


def _two_sides(source: NestedMap, target: NestedMap, *, is_packed: bool) -> NestedMap:
    source.ids = source.pop("labels")
    del source.weights
    if not is_packed:
        target.ids[:, 1:] = target.labels[:, :-1]
        # Rows of one example need no positions. A model that decodes takes positions for packing.
        del source.segment_pos, target.segment_pos
    return NestedMap(src=source, tgt=target)


def _predicted_from(labels: np.ndarray, sizes: np.ndarray, first_ids: np.ndarray) -> np.ndarray:
    """Return labels shifted by one, with the first id of each stretch at its beginning."""
    ids = np.roll(labels, 1)
    is_there = sizes > 0
    ids[(np.cumsum(sizes) - sizes)[is_there]] = first_ids[is_there]
    return ids


def prompt_features(
    prompts: Sequence[Tokens], *, length: int, bos_id: int | None = None, pad_id: int = 0
) -> NestedMap:
    """Return prompts for a model to continue.

    Args:
      prompts: Ids of each prompt.
      length: Positions of a row.
      bos_id: Id to put before every prompt, or None for no id.
      pad_id: Id of padded positions.

    Returns:
      `ids` int32 and `paddings` float32 `[rows, length]`, filled from the left, and
      `prompt_lengths` int32 `[rows]`, `bos_id` included.

    Raises:
      ConfigError: A prompt is longer than a row, or not token ids.
    """
    begin = np.array([] if bos_id is None else [bos_id], np.int32)
    rows = []
    for number, prompt in enumerate(prompts):
        tokens = as_tokens(prompt, where=f"prompt {number}")
        rows.append([Segment(np.concatenate([begin, tokens]))])
    sizes = _sizes_that_fit(rows, length=length)
    valid = np.arange(length) < sizes[:, None]
    tokens = _end_to_end([segment.tokens for (segment,) in rows])
    return NestedMap(
        ids=fill_rows(tokens, valid, np.int32, fill=pad_id),
        paddings=(~valid).astype(np.float32),
        prompt_lengths=valid.sum(axis=1, dtype=np.int32),
    )


def as_array(values: Any) -> np.ndarray:
    """Return an array of any values; of objects if nested lists differ in length."""
    try:
        return np.asarray(values)
    except ValueError:
        return np.asarray(values, object)


def as_tokens(tokens: Tokens, *, where: str, may_be_negative: bool = False) -> np.ndarray:
    """Return tokens as int32 `[tokens]`.

    Args:
      tokens: Token ids.
      where: Name of the tokens in messages.
      may_be_negative: Whether negative ids are valid.

    Raises:
      ConfigError: The tokens are not integers in one dimension, or not in the range of ids.
    """
    array = as_array(tokens)
    if array.ndim == 1 and not array.size:
        return np.zeros(0, np.int32)
    is_ids = array.ndim == 1 and array.dtype.kind in "iu"
    shown = f"{array.dtype.name}{list(array.shape)}"
    require(is_ids, None, where, shown, "token ids, integers in one dimension")
    least, most = int(array.min()), int(array.max())
    in_range = most < 2**31 and least > -(2**31) and (least >= 0 or may_be_negative)
    require(in_range, None, where, f"ids from {least} to {most}", "token ids in [0, 2**31)")
    return array.astype(np.int32)


def _rows_of(
    segments: Sequence[Segment], rows: Iterable[Iterable[int]] | None
) -> list[list[Segment]]:
    if rows is None:
        return [[segment] for segment in segments]
    return [[segments[number] for number in numbers] for numbers in rows]


def _sizes_that_fit(rows: Sequence[Sequence[Segment]], *, length: int) -> np.ndarray:
    """Return the sizes of segments, int64, and raise if a row has more than `length` tokens."""
    sizes = [[len(segment.tokens) for segment in row] for row in rows]
    for number, in_row in enumerate(sizes):
        expected = f"at most {length}; its examples have {in_row}"
        require(sum(in_row) <= length, None, f"tokens of row {number}", sum(in_row), expected)
    return np.array([size for in_row in sizes for size in in_row], np.int64)


def _end_to_end(tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Return concatenated tokens, int32 `[tokens]`."""
    return np.concatenate([np.zeros(0, np.int32), *tokens])
