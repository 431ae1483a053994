"""Checks of every batch where it enters the runner: its number of rows, and the dtype of ids."""

from __future__ import annotations

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.prefetch import Prefetch
from layerkit_runner.errors import UsageError

_INTEGER_FIELDS = frozenset({"ids", "segment_ids", "segment_pos", "prompt_lengths", "provenance"})
"""Fields that hold whole numbers, by the last part of their path."""


def check_batch(dataset: BaseInput, batch: NestedMap, *, is_padded: bool = False) -> NestedMap:
    """Return `batch` if it has the rows that `dataset` declares and integer ids.

    The check reads shapes and dtypes alone, so it costs microseconds.

    Args:
      dataset: Input that made the batch.
      batch: Host-local batch.
      is_padded: Whether `get_next_padded` made it, which appends `batch_padding_size` rows.

    Raises:
      UsageError: an array has another number of rows, or ids are not integers.
    """
    expected = dataset.local_batch_size + (dataset.batch_padding_size if is_padded else 0)
    for path, leaf in batch.flatten_items():
        shape = np.shape(leaf)
        if shape[:1] != (expected,):
            given = f"{shape[0]} row(s)" if shape else "no rows"
            raise UsageError(
                f"{_label(dataset)}: a batch has {given} in {path!r}, shape={list(shape)}. Expected"
                f" {expected} rows, which the input declares for each host. Return that many, and"
                " fill the last batch of an epoch up with rows of weight 0"
                " (layerkit_inputs.eval_padding.pad_rows)."
            )
        if path.rpartition(".")[2] not in _INTEGER_FIELDS:
            continue
        # Not by np.asarray, which would fetch an array that is on a device.
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not np.issubdtype(dtype, np.integer):
            raise UsageError(
                f"{_label(dataset)}: the batch field {path!r} has dtype={dtype}. Expected integers,"
                " such as int32. Convert it in the input."
            )
    return batch


def _label(dataset: BaseInput) -> str:
    source = dataset.source if isinstance(dataset, Prefetch) else dataset
    name = type(source).__qualname__
    return f"input {source.name!r} ({name})" if source.name else f"input {name}"
