"""The vocabulary of byte-level text: three special ids, then 256 bytes.

Padding has id 0. A document begins with `BOS_ID` and ends with `EOS_ID`. Byte `b` has the id
`b + FIRST_BYTE_ID`. A model may round `VOCAB_SIZE` up; no data has the ids above it.
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
    """Return the ids of bytes, int16 `[length]`, without special ids."""
    return np.frombuffer(data, np.uint8).astype(np.int16) + FIRST_BYTE_ID


def decode(ids: np.ndarray) -> str:
    """Decode ids `[length]` as UTF-8. Invalid sequences are replaced, other ids are dropped."""
    ids = np.asarray(ids)
    is_byte = (ids >= FIRST_BYTE_ID) & (ids < VOCAB_SIZE)
    return (ids[is_byte] - FIRST_BYTE_ID).astype(np.uint8).tobytes().decode("utf-8", "replace")
