"""Checks of batches: their rows and dtypes; and reports of skipped records."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.distributed.process_exchange import gather_values
from layerkit_runner.errors import UsageError
from layerkit_runner.observers import Observer

_INTEGER_FIELDS = frozenset({"ids", "segment_ids", "segment_pos", "prompt_lengths", "provenance"})
"""Names of integer fields: the last part of their path."""


def check_batch(dataset: BaseInput, batch: NestedMap, *, is_padded: bool = False) -> NestedMap:
    """Return `batch` if it has the rows that `dataset` declares, and integers that JAX can hold.

    The check reads shapes, dtypes and the values of 64-bit integers, so it takes microseconds.

    Args:
      dataset: Input that made the batch.
      batch: Host-local batch.
      is_padded: Whether `get_next_padded` made it, which appends `batch_padding_size` rows.

    Raises:
      UsageError: An array has another number of rows, ids are not integers, or an integer does not
        fit the dtype to which JAX converts it.
    """
    expected = dataset.local_batch_size + (dataset.batch_padding_size if is_padded else 0)
    for path, leaf in batch.flatten_items():
        shape = np.shape(leaf)
        if shape[:1] != (expected,):
            raise UsageError(
                owner=_label(dataset),
                field=f"shape of {path}",
                value=list(shape),
                expected=f"{expected} rows, which the input declares for each host",
                hint="Pad the last batch of an epoch with rows of weight 0"
                " (layerkit_inputs.eval_padding.pad_rows).",
            )
        _check_fits(dataset, path, leaf)
        if path.rpartition(".")[2] not in _INTEGER_FIELDS:
            continue
        # np.asarray would fetch an array that is on a device.
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not np.issubdtype(dtype, np.integer):
            raise UsageError(
                owner=_label(dataset),
                field=f"dtype of {path}",
                value=str(dtype),
                expected="an integer dtype, such as int32",
                hint="Convert the field in the input.",
            )
    return batch


def cast_text(batch: NestedMap) -> str | None:
    """Return the fields that JAX converts to floats of fewer bits; None if there are none.

    Args:
      batch: Host-local batch.

    Returns:
      Text such as `x, y: float64 → float32 (JAX_ENABLE_X64 is off)`.
    """
    fields: dict[str, list[str]] = {}
    for path, leaf in batch.flatten_items():
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and dtype.kind in "fc" and _dtype_in_jax(dtype) != dtype:
            fields.setdefault(f"{dtype} → {_dtype_in_jax(dtype)}", []).append(path)
    if not fields:
        return None
    casts = "; ".join(f"{', '.join(paths)}: {cast}" for cast, paths in fields.items())
    return f"{casts} (JAX_ENABLE_X64 is off)"


def _check_fits(dataset: BaseInput, path: str, leaf: Any) -> None:
    """Raise UsageError for integers of 64 bits that JAX would wrap around."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu" or not leaf.size:
        return
    dtype = _dtype_in_jax(leaf.dtype)
    if dtype == leaf.dtype:
        return
    limits = np.iinfo(dtype)
    for value in (leaf.min(), leaf.max()):
        if not limits.min <= value <= limits.max:
            raise UsageError(
                owner=_label(dataset),
                field=f"{leaf.dtype} value of {path}",
                value=int(value),
                expected=f"a value that fits {dtype}, to which JAX converts it",
                hint="Return smaller numbers, or set JAX_ENABLE_X64=1.",
            )


def _dtype_in_jax(dtype: np.dtype) -> np.dtype:
    """Return the dtype that an array of this one has on a device."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _label(dataset: BaseInput) -> str:
    source = dataset.source if isinstance(dataset, Prefetch) else dataset
    name = type(source).__qualname__
    return f"input {source.name!r} ({name})" if source.name else f"input {name}"


SKIPPED_RECORDS = "skipped_records"
"""Name of the metric that counts skipped records."""


class SkippedRecords:
    """A counter of the records that an input of this process has skipped during training.

    Process 0 reports to its observers, the others to standard error.
    """

    def __init__(self, dataset: BaseInput, name: str, observers: Observer) -> None:
        """Create a counter for an input, with its name in reports."""
        self._dataset = dataset
        self._name = name
        self._observers = observers
        self._reported = 0

    def scalars(self) -> dict[str, float]:
        """Return the metric `skipped_records` of this process; empty if no record was skipped.

        A line is also reported at first, and whenever the number has doubled.
        """
        count = self._dataset.num_skipped
        if count and count >= 2 * self._reported:
            self._reported = count
            line = skipped_line(self._name, count)
            if jax.process_index() == 0:
                self._observers.message(line)
            else:
                print(f"process {jax.process_index()}: {line}", file=sys.stderr, flush=True)
        return {SKIPPED_RECORDS: float(count)} if count else {}


def report_skipped(dataset: BaseInput, name: str, observers: Observer) -> dict[str, float]:
    """Report the records of a data set that all hosts skipped; all processes must call it.

    Returns:
      The metric `skipped_records` over all hosts; empty if no record was skipped.
    """
    # Processes that read the same rows skip the same records.
    by_feed = dict(gather_values([dataset.infeed_host_index, dataset.num_skipped]))
    count = sum(by_feed.values())
    if not count:
        return {}
    observers.message(skipped_line(name, count))
    return {SKIPPED_RECORDS: float(count)}


def skipped_line(name: str, count: int) -> str:
    """Return the line about skipped records: `heldout: skipped 3 unreadable records so far`."""
    return f"{name}: skipped {count:,} unreadable record{'' if count == 1 else 's'} so far"
