"""Shapes and dtypes of batches, to compile a step before training and to check batches.

A wrong batch usually fails inside a compiled step, or not at all. `check_batch` compares it with
the expected specs before that, and reports all wrong fields at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
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


def check_batch(batch: NestedMap, expected: NestedMap | None = None, *, num_rows: int) -> None:
    """Check a batch before it is sent to devices.

    Args:
      batch: Batch of an input.
      expected: Specs of the batch, or None if they are unknown.
      num_rows: Size of the leading dimension.

    Raises:
      ConfigError: An array has a wrong number of rows, a dtype that is not numeric, or a spec
        other than the expected one. The message lists all wrong arrays.
    """
    problems = []
    found = dict(spec_of(batch).flatten_items())
    if not found:
        problems.append("no arrays")
    for path, spec in found.items():
        if spec.shape[:1] != (num_rows,):
            problems.append(f"{path}: {spec}; expected {num_rows} rows, [batch={num_rows}, ...]")
        if spec.dtype.kind not in "biufc" and spec.dtype.name != "bfloat16":
            problems.append(f"{path}: {spec}; expected numbers or booleans")
    if expected is not None:
        wanted = dict(expected.flatten_items())
        for path in sorted({*found, *wanted}):
            if found.get(path) != wanted.get(path):
                problems.append(
                    f"{path}: {found.get(path, 'missing')}; expected "
                    f"{wanted.get(path, 'no such field')}"
                )
    if problems:
        raise ConfigError("invalid batch:\n  " + "\n  ".join(dict.fromkeys(problems)))
