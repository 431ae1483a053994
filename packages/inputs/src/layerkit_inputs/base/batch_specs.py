"""Shapes and dtypes of batches, and the one check of batches.

The runner checks every batch that a program reads. A wrong number of rows would count examples
wrongly or let processes wait for one another, and JAX wraps integers around without a word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.eval_padding import pad_rows


class ArraySpec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        """Return dtype and shape, such as `int32[8, 128]`."""
        return f"{self.dtype.name}{list(self.shape)}"


def spec_of(batch: NestedMap) -> NestedMap:
    """Return a batch with an ArraySpec in place of each array."""
    return batch.transform(lambda array: ArraySpec(np.shape(array), np.asarray(array).dtype))


def batch_specs(source: BaseInput) -> NestedMap:
    """Return the specs of the batches of `source.get_next_padded()` without consuming a batch."""
    return spec_of(pad_rows(source.peek(), source.batch_padding_size))


def check_batch(source: BaseInput, batch: NestedMap, *, is_padded: bool = False) -> NestedMap:
    """Return a batch of an input if JAX can hold it and it has the rows that the input declares.

    It reads only shapes, dtypes and 64-bit integers. `get_next_padded` makes a padded batch.

    Raises:
      ConfigError: An array has the wrong number of rows, or an integer does not fit the dtype to
        which JAX converts it.
    """
    rows = source.local_batch_size + (source.batch_padding_size if is_padded else 0)
    for path, leaf in batch.flatten_items():
        shape = list(np.shape(leaf))
        expected = f"{rows} rows, which the input declares; `pad_rows` adds rows of weight 0"
        require(shape[:1] == [rows], source._label, f"shape of {path}", shape, expected)
        value, kind = _overflowing(leaf), getattr(leaf, "dtype", None)
        expected = "a value of 32 bits, to which JAX converts it, or JAX_ENABLE_X64=1"
        require(value is None, source._label, f"{kind} value of {path}", value, expected)
    return batch


def dtype_in_jax(dtype: np.dtype) -> np.dtype:
    """Return the dtype to which JAX converts arrays of the host."""
    import jax  # late, since data workers do not load JAX

    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _overflowing(leaf: Any) -> int | None:
    """Return a value of an integer array that its dtype in JAX cannot hold, if there is one."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu" or leaf.dtype.itemsize < 8:
        return None
    limits = np.iinfo(dtype_in_jax(leaf.dtype))
    extremes = (int(leaf.min()), int(leaf.max())) if leaf.size else ()
    return next((x for x in extremes if not limits.min <= x <= limits.max), None)
