"""Padding for evaluation: rows that count for nothing, so that every host makes the same batches.

One pass over finite data rarely divides by hosts and batch size, and a host that stops early leaves
the others waiting in a collective. So the last batches are filled with rows of weight 0 and
provenance -1. How many batches there are is decided by pure functions of the counts; whoever has to
learn the other hosts' counts passes in the one exchange that does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from layerkit.nested_map import NestedMap

AllGather = Callable[[Any], Sequence[Any]]
"""Takes a JSON value of this host and returns those of all hosts, in order."""

# What a row of padding holds, by the last part of the field's path; everything else is 0, weights
# above all.
PADDING_VALUES = {"provenance": -1, "paddings": 1}


def pad_rows(batch: NestedMap, num_rows: int, *, copy: bool = True) -> NestedMap:
    """`batch` with `num_rows` rows of padding appended to every array `[batch, ...]`.

    Args:
      batch: The rows, at least 0 of them.
      num_rows: How many to append.
      copy: False for a batch that was made for the caller: where nothing is to be appended, arrays
        that own their memory are handed on. Views are copied all the same.
    """
    if num_rows < 0:
        raise ValueError(f"pad_rows(num_rows={num_rows}): expected a number >= 0.")

    def pad(name: str, value: object) -> object:
        if isinstance(value, NestedMap):
            return NestedMap({key: pad(key, item) for key, item in value.items()})
        array = np.asarray(value)
        if not num_rows:
            is_own = array.flags.owndata and array.flags.writeable
            return array if is_own and not copy else array.copy()
        fill = np.full((num_rows, *array.shape[1:]), PADDING_VALUES.get(name, 0), array.dtype)
        return np.concatenate([array, fill])

    return NestedMap({name: pad(name, value) for name, value in batch.items()})


def mark_rows(batch: NestedMap, num_padding: int) -> NestedMap:
    """Return `batch` with `eval_sample_weights` float32 `[batch]`, unless its rows are marked.

    Args:
      batch: Rows, the last of which are padding.
      num_padding: How many are.
    """
    if "provenance" in batch or "eval_sample_weights" in batch:
        return batch
    weights = np.ones(num_rows_of(batch), np.float32)
    weights[len(weights) - num_padding :] = 0.0
    return NestedMap({**batch, "eval_sample_weights": weights})


def example_rows(batch: NestedMap) -> np.ndarray | None:
    """Return bool `[batch]`, False in rows of padding; None if `batch` does not mark its rows."""
    if "provenance" in batch:
        return np.asarray(batch.provenance) >= 0
    if "eval_sample_weights" in batch:
        return np.asarray(batch.eval_sample_weights) > 0
    return None


def empty_batch(template: NestedMap, num_rows: int) -> NestedMap:
    """A batch of `num_rows` rows of padding, shaped like `template`."""
    return pad_rows(template.transform(lambda array: np.asarray(array)[:0]), num_rows)


def split_rows(
    first_row: int, num_rows: int | None, *, batch_size: int, host_index: int
) -> np.ndarray:
    """Which rows one host reads of the global batch that starts at `first_row`.

    Host `h` takes the block `[h * batch_size, (h + 1) * batch_size)` of each global batch, so the
    hosts' blocks one after the other are the same global batch however many hosts there are.

    Returns:
      int64 `[rows]`, at most `batch_size`; fewer, or none, where `num_rows` (None: endless) ends.
    """
    start = first_row + host_index * batch_size
    stop = start + batch_size
    if num_rows is not None:
        start, stop = min(start, num_rows), min(stop, num_rows)
    return np.arange(start, stop, dtype=np.int64)


def agreed_num_batches(rows_per_host: Sequence[int], batch_size: int) -> int:
    """How many batches of `batch_size` every host makes, so that the fullest one gets through."""
    if batch_size < 1 or not rows_per_host or min(rows_per_host) < 0:
        raise ValueError(
            f"agreed_num_batches({rows_per_host!r}, {batch_size}): expected one count >= 0 per "
            "host and a batch size >= 1."
        )
    return -(-max(rows_per_host) // batch_size)


def agree_on_num_batches(local_rows: int, batch_size: int, all_gather: AllGather) -> int:
    """`agreed_num_batches`, the other hosts' counts being fetched by `all_gather`.

    Args:
      local_rows: Rows on this host.
      batch_size: Rows of a batch on each host.
      all_gather: Takes this host's number and returns that of every host.
    """
    return agreed_num_batches([int(count) for count in all_gather(local_rows)], batch_size)


def pad_epoch(
    batches: Iterable[NestedMap], *, batch_size: int, num_batches: int, template: NestedMap
) -> Iterator[NestedMap]:
    """Exactly `num_batches` full batches: a short one is filled up, missing ones are all padding.

    Args:
      batches: This host's own batches, each with at most `batch_size` rows.
      batch_size: Rows of every batch that comes out.
      num_batches: What the hosts agreed on.
      template: Any batch of the data set; an empty shard has no other way to know the shapes.

    Raises:
      ValueError: `batches` holds more than `num_batches`, or one with too many rows.
    """
    count = 0
    for count, batch in enumerate(batches, start=1):
        rows = num_rows_of(batch)
        if count > num_batches or rows > batch_size:
            raise ValueError(
                f"pad_epoch: batch {count} with {rows} rows, but the hosts agreed on {num_batches} "
                f"batches of {batch_size}."
            )
        yield pad_rows(batch, batch_size - rows)
    for _ in range(num_batches - count):
        yield empty_batch(template, batch_size)


def end_together(batches: Iterable[NestedMap], all_gather: AllGather) -> Iterator[NestedMap]:
    """The batches of this host, and batches of padding after them until those of all hosts ended.

    For readers that do not know before how many batches they will make. Before each batch the hosts
    ask one another who has one; what they tell is its shapes, so that even a host that never had a
    batch knows what to pad with. Rows are marked; see `mark_rows`.

    Args:
      batches: Those of this host, all of the same shapes.
      all_gather: See `AllGather`; asked once more than the longest host has batches.

    Raises:
      ValueError: hosts have batches of unlike shapes; on every host.
    """
    own = iter(batches)
    while True:
        batch = next(own, None)
        specs = all_gather(None if batch is None else _describe(batch))
        having = [host for host, spec in enumerate(specs) if spec is not None]
        if not having:
            return
        first = specs[having[0]]
        for host in having[1:]:
            if specs[host] != first:
                raise ValueError(
                    f"hosts {having[0]} and {host} have batches of unlike shapes: {first} and "
                    f"{specs[host]}."
                )
        if batch is not None:
            yield mark_rows(batch, 0)
        else:
            padding = _padding_like(first)
            yield mark_rows(padding, num_rows_of(padding))


def _describe(batch: NestedMap) -> dict[str, Any]:
    """Shapes and dtypes as JSON values, nested as the batch is."""
    return {
        name: _describe(value)
        if isinstance(value, NestedMap)
        else [list(np.shape(value)), np.asarray(value).dtype.name]
        for name, value in batch.items()
    }


def _padding_like(description: dict[str, Any]) -> NestedMap:
    """A batch of padding, of the shapes and dtypes that `_describe` gave."""

    def make(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return NestedMap({key: make(key, item) for key, item in value.items()})
        shape, dtype = value
        return np.full(shape, PADDING_VALUES.get(name, 0), np.dtype(dtype))

    return NestedMap({name: make(name, value) for name, value in description.items()})


def num_rows_of(batch: NestedMap) -> int:
    """Size of the leading dimension that all arrays of `batch` share.

    Raises:
      ValueError: no arrays, or they disagree.
    """
    sizes = {path: np.shape(leaf)[:1] for path, leaf in batch.flatten_items()}
    if not sizes or len(set(sizes.values())) != 1 or () in sizes.values():
        raise ValueError(f"a batch needs arrays that share their leading dimension, got {sizes}.")
    return next(iter(sizes.values()))[0]
