"""Shapes and dtypes of batches, to compile a step before training and to name a wrong batch early.

A batch that is wrong usually shows deep inside a compiled step, or not at all. Here it is compared
with what was expected, and every field that is wrong is listed at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.eval_padding import pad_rows


class ArraySpec(NamedTuple):
    """Shape and dtype of an array, without its values."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def spec_of(batch: NestedMap) -> NestedMap:
    """`batch` with an ArraySpec in place of each array."""
    return batch.transform(lambda array: ArraySpec(np.shape(array), np.asarray(array).dtype))


def batch_specs(source: BaseInput) -> NestedMap:
    """Specs of what `source.get_next_padded()` returns; nothing is consumed."""
    return spec_of(pad_rows(source.peek(), source.batch_padding_size))


def check_batch(batch: NestedMap, expected: NestedMap | None = None, *, num_rows: int) -> None:
    """Checks a batch before it goes to devices.

    Args:
      batch: What an input returned.
      expected: Specs that it must have, where they are known.
      num_rows: Size of the leading dimension.

    Raises:
      ValueError: an array without rows, with another number of them, of a dtype that is no number,
        or unlike `expected`; all of them are listed.
    """
    problems = []
    found = dict(spec_of(batch).flatten_items())
    if not found:
        problems.append("there are no arrays in it")
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
        raise ValueError("a batch cannot be used:\n  " + "\n  ".join(dict.fromkeys(problems)))
