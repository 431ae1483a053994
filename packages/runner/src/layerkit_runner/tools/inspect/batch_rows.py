"""Records of the rows of a batch: tokens with their texts, weights and segments, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import ROW_MARKS, example_rows, num_rows_of
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_runner.tools.pages.tokens import Token, read_tokens

_BINS = 25
_PAGE_TOKENS = 512


class Segment(NamedTuple):
    """A document of a row, of one side of the batch, such as `src`; "" for the batch itself."""

    side: str
    number: int | None
    """Segment id, from 1; None if it is the only one of its row."""
    ids: list[Token]
    labels: list[Token] | None


class Row(NamedTuple):
    """A row of a batch: its number, fields without token ids, and documents, side after side."""

    title: str
    values: Mapping[str, np.ndarray]
    segments: list[Segment]
    num_left_out: int = 0


class BatchView(NamedTuple):
    """What is shown of a batch: a summary, the table of its fields, rows, and lines about hosts."""

    title: str
    fields: list[tuple[str, ...]]
    num_rows: int
    rows: list[Row]
    notes: list[str]
    is_chat: bool
    """Whether labels have a loss where an assistant writes them."""


class Histogram(NamedTuple):
    """Whole numbers of all batches that were read."""

    title: str
    values: np.ndarray

    def range_text(self) -> str:
        """Return the least, greatest and middle value."""
        low, high, middle = self.values.min(), self.values.max(), np.median(self.values)
        return f"{low:,.6g} to {high:,.6g}, median {middle:,.6g}"

    def bins(self) -> list[tuple[str, int, int, int]]:
        """Return the text of each bin, the number of its values, and its first and last one."""
        low, high = int(self.values.min()), int(self.values.max())
        width = -(-(high - low + 1) // _BINS)
        edges = np.arange(low, high + width + 1, width)
        counts = np.histogram(self.values, edges)[0].tolist()
        bins = zip(counts, edges[:-1].tolist(), (edges[1:] - 1).tolist(), strict=True)
        return [(f"{first} to {last}: {n}", n, first, last) for n, first, last in bins]


def real_rows(batch: NestedMap) -> np.ndarray:
    """Return bool `[batch]`: True for rows that hold data, False for padding."""
    rows = example_rows(batch)
    return np.ones(num_rows_of(batch), bool) if rows is None else rows


def token_sides(batch: NestedMap) -> Iterator[tuple[str, NestedMap]]:
    """Yield the parts of a batch that hold ids `[batch, length]`: itself, or such as `src`."""
    if "ids" in batch and np.ndim(batch.ids) == 2:
        yield "", batch
    for name in sorted(batch):
        part = batch[name]
        if isinstance(part, NestedMap) and "ids" in part and np.ndim(part.ids) == 2:
            yield name, part


def valid_tokens(part: NestedMap) -> np.ndarray | None:
    """Return bool `[batch, length]`, True for tokens; None if the batch does not mark them."""
    if "paddings" in part:
        return np.asarray(part.paddings == 0)
    if "segment_ids" in part:
        return np.asarray(part.segment_ids > 0)
    if "prompt_lengths" in part:
        return np.arange(part.ids.shape[1]) < np.asarray(part.prompt_lengths)[:, None]
    return None


def sizes_of(batch: NestedMap) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tokens of each document, and the padding of rows that hold data, with titles."""
    for side, part in token_sides(batch):
        valid, label = valid_tokens(part), f"{side}: " if side else ""
        rows = real_rows(batch)
        if valid is not None and valid[rows].any():
            numbers = np.where(valid, part.get("segment_ids", 1), 0)[rows]
            lengths = [np.unique(row[row > 0], return_counts=True)[1] for row in numbers]
            yield f"{label}tokens of a text", np.concatenate(lengths)
            padding = np.rint(100 - 100 * valid[rows].mean(axis=1))
            yield f"{label}padding of a row in %", padding.astype(np.int64)


def read_row(
    dataset: BaseInput,
    batch: NestedMap,
    row: int,
    tokenizer: Tokenizer | None = None,
    *,
    is_page: bool = False,
) -> Row:
    """Return the record of a row.

    Args:
      dataset: Input that made the batch. It decodes the ids.
      batch: Arrays `[batch, ...]`.
      row: Number of the row.
      tokenizer: Tokenizer of the ids that `dataset` cannot decode.
      is_page: Whether the row is drawn on a page, which has its first tokens. Lines of text have
        only the ends of a long document.
    """
    if not real_rows(batch)[row]:
        return Row(f"row {row}: padding", {}, [])
    number = f" (example {batch.provenance[row]})" if "provenance" in batch else ""
    segments, num_left_out, sides = [], 0, dict(token_sides(batch))
    for side, part in sides.items():
        valid = valid_tokens(part)
        here = np.ones(part.ids.shape[1], bool) if valid is None else valid[row]
        numbers = part.segment_ids[row] if "segment_ids" in part else here.astype(np.int32)
        places = np.flatnonzero(here)[: _PAGE_TOKENS if is_page else None]
        num_left_out += int(here.sum()) - len(places)
        read = _reader(dataset, side or None, tokenizer)
        for segment in np.unique(numbers[places]):
            columns = places[numbers[places] == segment]
            if len(columns) > _PAGE_TOKENS:
                columns = np.r_[columns[: _PAGE_TOKENS // 2], columns[-_PAGE_TOKENS // 2 :]]
            tokens, labels = read(part.ids[row][columns]), None
            ids = [t._replace(position=int(p)) for t, p in zip(tokens, columns, strict=True)]
            # A label of a whole row, as of a classifier, is a number beside the tokens.
            shapes = [np.shape(part[name]) for name in ("labels", "weights") if name in part]
            if shapes == 2 * [part.ids.shape]:
                # The text of the first label follows that of the first id.
                tokens = read(np.append(ids[0].id, part.labels[row][columns]))[1:]
                weights = part.weights[row][columns].tolist()
                labels = [
                    label._replace(position=token.position, weight=weight)
                    for label, token, weight in zip(tokens, ids, weights, strict=True)
                ]
            is_packed = numbers.max(initial=0) > 1
            segments.append(Segment(side, int(segment) if is_packed else None, ids, labels))
    shape = np.shape(batch.ids) if "" in sides else ()
    values = {
        path: np.asarray(value)[row]
        for path, value in batch.flatten_items()
        if path not in ROW_MARKS and path.split(".")[0] not in sides and np.shape(value) != shape
    }
    return Row(f"row {row}{number}", values, segments, num_left_out)


def _reader(
    dataset: BaseInput, key: str | None, fallback: Tokenizer | None
) -> Callable[[np.ndarray], list[Token]]:
    """Return a function from ids `[tokens]` to tokens."""
    tokenizer = dataset.text_tokenizer(key)
    try:
        dataset.ids_to_strings(np.zeros((1, 0), np.int32), [0], key=key)
        has_vocabulary = True
    except NotImplementedError:
        tokenizer, has_vocabulary = fallback, False

    def decode(ids: np.ndarray) -> str:
        if has_vocabulary:
            return dataset.ids_to_strings(ids[None], [len(ids)], key=key)[0]
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

    return lambda ids: read_tokens(ids, decode, getattr(tokenizer, "special_tokens", {}))
