"""The vocabulary of byte-level text: 256 bytes after three special ids.

Padding is 0, as everywhere; a document begins with `BOS_ID` and ends with `EOS_ID`; byte `b` is
`b + FIRST_BYTE_ID`. A model may round `VOCAB_SIZE` up; the ids above it never occur.
"""

from __future__ import annotations

import numpy as np

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
FIRST_BYTE_ID = 3
VOCAB_SIZE = FIRST_BYTE_ID + 256
SPECIAL_TOKENS = {PAD_ID: "PAD", BOS_ID: "BOS", EOS_ID: "EOS"}


def encode(data: bytes) -> np.ndarray:
    """Ids of bytes: int16 `[length]`, without special ids."""
    return np.frombuffer(data, np.uint8).astype(np.int16) + FIRST_BYTE_ID


def decode(ids: np.ndarray) -> str:
    """Text of ids `[length]`: UTF-8, broken sequences replaced; ids that are no bytes vanish."""
    ids = np.asarray(ids)
    is_byte = (ids >= FIRST_BYTE_ID) & (ids < VOCAB_SIZE)
    return (ids[is_byte] - FIRST_BYTE_ID).astype(np.uint8).tobytes().decode("utf-8", "replace")
