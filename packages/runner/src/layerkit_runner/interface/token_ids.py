"""Checks of token ids that a caller gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from layerkit_inputs.features import as_tokens
from layerkit_runner.errors import UsageError


def token_rows(rows: Iterable[Any], field: str, *, vocab_size: int | None) -> list[np.ndarray]:
    """Return the token ids of several texts, each int32 `[tokens]`.

    Args:
      rows: Ids of each text, such as lists, or an array `[rows, tokens]`.
      field: Name of the argument, for messages.
      vocab_size: Number of ids that the model has; None for any number.
    """
    found = [as_tokens(each, where=f"{field}[{row}]") for row, each in enumerate(rows)]
    for row, ids in enumerate(found):
        check_vocabulary(ids, f"{field}[{row}]", vocab_size=vocab_size)
    return found


def token_array(ids: Any, field: str, *, vocab_size: int | None) -> np.ndarray:
    """Return token ids int32 `[rows, length]` or `[length]`."""
    array = np.asarray(ids)
    if array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "iu":
        raise UsageError(
            field=field,
            value=f"{array.dtype}{list(array.shape)}",
            expected="token ids [rows, length] or [length]",
        )
    check_vocabulary(array, field, vocab_size=vocab_size)
    return array.astype(np.int32)


def check_vocabulary(ids: np.ndarray, field: str, *, vocab_size: int | None) -> None:
    """Raise `UsageError` for an id that the model has no embedding of, whose logits are NaN."""
    if not ids.size or vocab_size is None:
        return
    for found in (int(ids.min()), int(ids.max())):
        if not 0 <= found < vocab_size:
            raise UsageError(field=field, value=found, expected=f"ids from 0 to {vocab_size - 1}")
