"""What one evaluation of an input reads, and its padding, so that every host makes as many batches.

| evaluates | reset_for_eval | repeat | an evaluation reads |
|---|---|---|---|
| epoch | True | False | one epoch, or its first `eval_loop_num_batches` batches if set |
| next | False | True | the next `eval_loop_num_batches` batches of an endless stream |

If both are unset, it is `next` with `eval_loop_num_batches`, else `epoch`. A training input is
endless and never reset, as with `next`.

The number of rows of an epoch is rarely a multiple of hosts × batch size. A host that stops early
leaves the others waiting in a collective, so the last batches are filled with rows of weight 0 and
provenance -1. Readers that know their number of rows use `agreed_num_batches`. Others use
`end_together`, which exchanges the shapes of batches between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap

Evaluation = Literal["epoch", "next"]

PASSES: Mapping[Evaluation, tuple[bool, bool]] = {"epoch": (True, False), "next": (False, True)}
"""Values of `reset_for_eval` and `repeat`."""


def choose_passes(
    chosen: tuple[bool | None, bool | None],
    num_batches: int | None,
    *,
    is_training: bool,
    owner: str,
) -> tuple[bool, bool]:
    """Return `reset_for_eval` and `repeat` by the table, from those that an input has `chosen`.

    Raises:
      ConfigError: No row has these values, or an endless evaluation has no number of batches.
    """
    kinds = [PASSES["epoch"], PASSES["next"]]
    if is_training:
        kinds = [PASSES["next"]]
    elif num_batches is not None:
        kinds.reverse()
    matching = [
        kind
        for kind in kinds
        if all(value in (None, of_kind) for value, of_kind in zip(chosen, kind, strict=True))
    ]
    expected = "[True, False] for one epoch, or [False, True] for an endless stream"
    require(matching, owner, "reset_for_eval and repeat", [*chosen], expected)
    resets, repeats = matching[0]
    is_bounded = resets or is_training or num_batches is not None
    expected = "a positive integer with repeat=True, since an evaluation would never end"
    require(is_bounded, owner, "eval_loop_num_batches", None, expected)
    return resets, repeats


AllGather = Callable[[Any], Sequence[Any]]
"""Function that takes a JSON value of this host and returns the values of all hosts, by index."""

ROW_MARKS = ("provenance", "eval_sample_weights")
"""Fields of a batch that tell examples from padding. A batch has one, both or neither."""

# Values in padded rows, by field name at any depth. Other fields, such as weights, are 0.
PADDING_VALUES = {"provenance": -1, "paddings": 1}


def pad_rows(batch: NestedMap, num_rows: int, *, copy: bool = True) -> NestedMap:
    """Return a batch with rows of padding appended to every array `[batch, ...]`.

    Args:
      batch: Batch of any number of rows.
      num_rows: Number of rows to append.
      copy: Whether to copy arrays if `num_rows` is 0. With False, arrays that own their memory are
        returned without a copy. Views are always copied.
    """

    def pad(name: str, value: object) -> np.ndarray:
        array = np.asarray(value)
        if not num_rows:
            is_own = array.flags.owndata and array.flags.writeable
            return array if is_own and not copy else array.copy()
        fill = np.full((num_rows, *array.shape[1:]), PADDING_VALUES.get(name, 0), array.dtype)
        return np.concatenate([array, fill])

    return map_fields(pad, batch)


def map_fields(function: Callable[..., Any], *batches: Mapping[str, Any]) -> NestedMap:
    """Return the results of `function(name, *values)` for each field of batches at any depth."""
    mapped = NestedMap()
    for name, first in batches[0].items():
        values = (batch[name] for batch in batches)
        is_nested = isinstance(first, dict)
        mapped[name] = map_fields(function, *values) if is_nested else function(name, *values)
    return mapped


def concatenate_rows(parts: Sequence[NestedMap]) -> NestedMap:
    """Return one batch with the rows of `parts` in order; a single part is returned itself."""
    if len(parts) == 1:
        return parts[0]
    return map_fields(lambda _, *values: np.concatenate(values), *parts)


def blank_rows(batch: NestedMap, is_blank: np.ndarray) -> NestedMap:
    """Return `batch` with padding (weight 0, provenance -1) in the rows of a bool mask `[rows]`."""

    def blank(name: str, value: object) -> np.ndarray:
        array = np.array(value)
        array[is_blank] = PADDING_VALUES.get(name, 0)
        return array

    return map_fields(blank, batch)


def mark_rows(batch: NestedMap, num_padding: int) -> NestedMap:
    """Add `eval_sample_weights` float32 `[batch]`: 1 for examples, 0 for rows of padding.

    A batch that has `provenance` or `eval_sample_weights` is returned unchanged.

    Args:
      batch: Batch with rows of padding at its end.
      num_padding: Number of rows of padding.
    """
    if any(name in batch for name in ROW_MARKS):
        return batch
    weights = np.ones(num_rows_of(batch), np.float32)
    weights[len(weights) - num_padding :] = 0.0
    return NestedMap({**batch, "eval_sample_weights": weights})


def example_rows(batch: NestedMap) -> np.ndarray | None:
    """Return bool `[batch]`, False in rows of padding, or None if the batch marks no rows."""
    if "provenance" in batch:
        return np.asarray(batch.provenance) >= 0
    if "eval_sample_weights" in batch:
        return np.asarray(batch.eval_sample_weights) > 0
    return None


def empty_batch(template: NestedMap, num_rows: int) -> NestedMap:
    """Return a batch of `num_rows` rows of padding with the fields of `template`."""
    return pad_rows(template.transform(lambda array: np.asarray(array)[:0]), num_rows)


def split_rows(
    first_row: int, num_rows: int | None, *, batch_size: int, host_index: int
) -> np.ndarray:
    """Return the row numbers that one host reads for the global batch starting at `first_row`.

    Host `h` reads the block `[h * batch_size, (h + 1) * batch_size)` of each global batch. Any
    number of hosts therefore reads the same global batch.

    Args:
      first_row: First row of the global batch.
      num_rows: Rows of the data, or None if they are endless.
      batch_size: Rows of a batch on each host.
      host_index: Index of the host.

    Returns:
      int64 `[rows]`: `batch_size` row numbers, or fewer at the end of the data.
    """
    start = first_row + host_index * batch_size
    stop = start + batch_size
    if num_rows is not None:
        start, stop = min(start, num_rows), min(stop, num_rows)
    return np.arange(start, stop, dtype=np.int64)


def agreed_num_batches(rows_per_host: Sequence[int], batch_size: int) -> int:
    """Return the number of batches of `batch_size` for the host with the most rows."""
    return -(-max(rows_per_host) // batch_size)


def end_together(batches: Iterable[NestedMap], all_gather: AllGather) -> Iterator[NestedMap]:
    """Yield the batches of this host, then batches of padding until all hosts have ended.

    This is for readers that do not know their number of batches in advance. Before each batch the
    hosts exchange the shapes of their next batches, from which a host without batches makes
    padding. `mark_rows` marks the rows of padding.

    Args:
      batches: Batches of this host, all of the same shapes.
      all_gather: Function that exchanges JSON values; see `AllGather`. Every host calls it n + 1
        times, where n is the largest number of batches of a host.

    Raises:
      ConfigError: Hosts have batches of different shapes. Every host raises it.
    """
    remaining = iter(batches)
    while True:
        batch = next(remaining, None)
        specs = all_gather(None if batch is None else map_fields(_describe, batch))
        active = [host for host, spec in enumerate(specs) if spec is not None]
        if not active:
            return
        first = specs[active[0]]
        for host in active[1:]:
            expected = f"{first}, as on host {active[0]}"
            require(specs[host] == first, None, f"batch of host {host}", specs[host], expected)
        if batch is not None:
            yield mark_rows(batch, 0)
        else:
            padding = _padding_like(first)
            yield mark_rows(padding, num_rows_of(padding))


def _describe(_: str, value: Any) -> list[Any]:
    """Return the shape and the dtype of a field as JSON values."""
    return [list(np.shape(value)), np.asarray(value).dtype.name]


def _padding_like(description: dict[str, Any]) -> NestedMap:
    """Return a batch of padding with described shapes and dtypes."""

    def make(name: str, spec: Any) -> np.ndarray:
        shape, dtype = spec
        return np.full(shape, PADDING_VALUES.get(name, 0), np.dtype(dtype))

    return map_fields(make, description)


def num_rows_of(batch: NestedMap) -> int:
    """Return the size of the leading dimension of all arrays of a batch.

    Raises:
      ConfigError: The batch has no arrays, or they differ in their leading dimension.
    """
    sizes = {path: np.shape(leaf)[:1] for path, leaf in batch.flatten_items()}
    is_one = len(set(sizes.values())) == 1 and () not in sizes.values()
    require(is_one, None, "leading dimensions of a batch", sizes, "arrays with the same one")
    return next(iter(sizes.values()))[0]
