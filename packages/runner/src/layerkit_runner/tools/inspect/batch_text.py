"""Text of batches: a table of the fields, and the decoded text of a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import num_rows_of

_MOST_CHARACTERS = 160
UNWEIGHTED = "⟦{}⟧"
"""Mark of labels of weight 0."""
SPECIAL = "⟪{}⟫"
"""Mark of special ids, which distinguishes them from the same characters in the text."""


def real_rows(batch: NestedMap) -> np.ndarray:
    """Return bool `[batch]`: True for rows that hold data, False for padding."""
    if "provenance" in batch:
        return np.asarray(batch.provenance >= 0)
    if "eval_sample_weights" in batch:
        return np.asarray(batch.eval_sample_weights > 0)
    return np.ones(num_rows_of(batch), bool)


def summary(batch: NestedMap) -> str:
    """Return text such as `8 of 8 rows hold data | 3.1% padding | weights 1,987`."""
    rows = real_rows(batch)
    parts = [f"{rows.sum()} of {len(rows)} rows hold data"]
    for side, part in _sides(batch):
        label = f"{side}: " if side else ""
        valid = _valid(part)
        if valid is not None:
            parts.append(f"{label}{1 - valid.mean():.1%} padding")
        if "weights" in part:
            parts.append(f"{label}weights {np.sum(part.weights, dtype=np.float64):,.6g}")
    return " | ".join(parts)


def field_table(batch: NestedMap) -> list[str]:
    """Return a line for each field: shape, dtype, least and greatest value."""
    rows: list[tuple[str, ...]] = [("field", "shape", "dtype", "min", "max")]
    for path, value in batch.flatten_items():
        array = np.asarray(value)
        ends = (array.min(), array.max()) if array.size else ("", "")
        rows.append((path, str(list(array.shape)), array.dtype.name, *map(_number, ends)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def row_lines(dataset: BaseInput, batch: NestedMap, row: int) -> Iterator[str]:
    """Yield the text of each sequence of ids in a row, by segments."""
    number = f" (example {batch.provenance[row]})" if "provenance" in batch else ""
    if not real_rows(batch)[row]:
        yield f"row {row}: padding"
        return
    yield f"row {row}{number}"
    for side, part in _sides(batch):
        valid = _valid(part)
        length = part.ids.shape[1]
        here = np.ones(length, bool) if valid is None else valid[row]
        segments = part.segment_ids[row] if "segment_ids" in part else here.astype(np.int32)
        for segment in np.unique(segments[here]):
            where = here & (segments == segment)
            suffix = f"[{segment}]" if segments.max(initial=0) > 1 else ""
            prefix = f"{side}." if side else ""
            yield f"  {prefix}ids{suffix}: {_shown(_decode(dataset, part.ids[row][where], side))}"
            if "labels" in part and "weights" in part:
                text = _labels(dataset, part.labels[row][where], part.weights[row][where], side)
                yield f"  {prefix}labels{suffix}: {_shown(text)}"


def _sides(batch: NestedMap) -> Iterator[tuple[str, NestedMap]]:
    """Yield the parts of a batch that hold ids `[batch, length]`: itself, or `src` and `tgt`."""
    if "ids" in batch and np.ndim(batch.ids) == 2:
        yield "", batch
    for name in sorted(batch):
        part = batch[name]
        if isinstance(part, NestedMap) and "ids" in part and np.ndim(part.ids) == 2:
            yield name, part


def _valid(part: NestedMap) -> np.ndarray | None:
    """Return bool `[batch, length]`, True for tokens; None if the batch does not mark them."""
    if "paddings" in part:
        return np.asarray(part.paddings == 0)
    if "segment_ids" in part:
        return np.asarray(part.segment_ids > 0)
    if "prompt_lengths" in part:
        return np.arange(part.ids.shape[1]) < np.asarray(part.prompt_lengths)[:, None]
    return None


def _labels(dataset: BaseInput, labels: np.ndarray, weights: np.ndarray, side: str) -> str:
    """Return the text of labels, with pieces of weight 0 marked."""
    pieces = []
    for has_weight, piece in _runs(weights > 0, labels):
        text = _decode(dataset, piece, side)
        pieces.append(text if has_weight else UNWEIGHTED.format(text))
    return "".join(pieces)


def _decode(dataset: BaseInput, ids: np.ndarray, side: str) -> str:
    """Return the text of ids, with special ids marked by their names."""
    names = getattr(dataset.text_tokenizer(side or None), "special_tokens", {})
    pieces = []
    for is_special, piece in _runs(np.isin(ids, list(names)), ids):
        if is_special:
            pieces += [SPECIAL.format(names[token]) for token in piece.tolist()]
        else:
            pieces.append(_plain_text(dataset, piece, side))
    return "".join(pieces)


def _runs(flags: np.ndarray, ids: np.ndarray) -> Iterator[tuple[bool, np.ndarray]]:
    """Yield consecutive ids with equal flags, with that flag."""
    begins = np.flatnonzero(np.diff(flags, prepend=~flags[:1]))
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        yield bool(flags[begin]), ids[begin:end]


def _plain_text(dataset: BaseInput, ids: np.ndarray, side: str) -> str:
    try:
        return dataset.ids_to_strings(ids[None], [len(ids)], key=side or None)[0]
    except NotImplementedError:  # the input has no vocabulary
        return " ".join(map(str, ids))


def _shown(text: str) -> str:
    """Return the text in quotes on one line, without the middle of a long text."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(line) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        line = f"{line[:half]} … {line[-half:]}"
    return f"“{line}”"


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{value.item():.6g}"
