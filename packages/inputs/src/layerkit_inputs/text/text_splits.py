"""Splits of local text into training and held-out text.

Files are split by their names if a name says that its file is held out, as in `train.jsonl` and
`val.jsonl`. Otherwise documents are split by a hash of their text, whatever the number of files, so
equal documents are in one split, and adding documents does not move others. Neither split is empty.
A few plain files, each of which is one document, are too few for this: the end of each is held out,
from a line break on.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from layerkit.errors import ConfigError
from layerkit_inputs.base.find_files import TextFile

# A word ends at any character that is not a letter, as in `train-00000-of-00002` and `val2`.
_SPLIT_WORD = re.compile(
    r"(?<![^\W\d_])(?:"
    r"(?P<train>train|training)"
    r"|(?P<validation>validation|valid|val|dev|development|eval|evaluation|h[eo]ld[-_. ]?out)"
    r"|(?P<test>test|testing)"
    r")(?:set|split)?(?![^\W\d_])",
    re.IGNORECASE,
)
# Maximum ratio of the held-out share of a text to the requested share, if its lines are long.
_MAX_HELD_OUT_RATIO = 3
_HASH_BYTES = 8


class FilePiece(NamedTuple):
    """Consecutive bytes of a file, `[start, stop)`, that are one document."""

    file: TextFile
    start: int
    stop: int

    @classmethod
    def whole(cls, file: TextFile) -> FilePiece:
        """Return all bytes of a file."""
        return cls(file, 0, file.path.stat().st_size)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def read(self, limit: int | None = None) -> bytes:
        """Return the bytes, up to `limit`."""
        with self.file.path.open("rb") as opened:
            opened.seek(self.start)
            return opened.read(self.size if limit is None else min(self.size, limit))


def named_split(path: str) -> str | None:
    """Return the split that a relative path names: `train`, `validation`, `test` or None.

    The last part of the path that names a split decides. A part that names both training and
    held-out text, such as `train_val`, names none.
    """
    for part in reversed(path.split("/")):
        splits = [match.lastgroup for match in _SPLIT_WORD.finditer(part)]
        if splits:
            is_mixed = "train" in splits and set(splits) != {"train"}
            return None if is_mixed else splits[-1]
    return None


def split_by_names(files: Sequence[TextFile]) -> dict[str, list[TextFile]] | None:
    """Return the files of each split that is named, or None if no file is named as held out.

    Names are relative to the deepest folder that holds all files. Files without a name of a split
    are training files. `heldout` has the files of `validation`, or of `test` if there are none.
    """
    root = os.path.commonpath([os.path.abspath(file.path.parent) for file in files])
    splits: dict[str, list[TextFile]] = {}
    for file in files:
        name = os.path.relpath(os.path.abspath(file.path), root).replace(os.sep, "/")
        splits.setdefault(named_split(name) or "train", []).append(file)
    held_out = splits.get("validation") or splits.get("test")
    return None if held_out is None else {**splits, "heldout": held_out}


def split_pieces(
    files: Sequence[TextFile], *, heldout_fraction: float
) -> tuple[list[FilePiece], list[FilePiece]]:
    """Return (training pieces, held-out pieces) of plain files, each of which is a document.

    Raises:
      ConfigError: A single file cannot be cut, or all files are equal.
    """
    whole = [FilePiece.whole(file) for file in files]
    if len(files) * heldout_fraction < 1:
        cuts = [_end_position(file, heldout_fraction) for file in files]
        if any(cuts):
            ends = [
                piece._replace(start=cut) for piece, cut in zip(whole, cuts, strict=True) if cut
            ]
            return [
                piece._replace(stop=cut or piece.stop)
                for piece, cut in zip(whole, cuts, strict=True)
            ], ends
        if len(files) == 1:
            problem = f"no line begins near the last {heldout_fraction:.0%}, which are held out"
            raise ConfigError(problem, owner=str(files[0].path))
    shares = [_share_of_file(file.path) for file in files]
    limit = heldout_limit(shares, fraction=heldout_fraction)
    train: list[FilePiece] = []
    heldout: list[FilePiece] = []
    for piece, share in zip(whole, shares, strict=True):
        (heldout if share < limit else train).append(piece)
    return train, heldout


def heldout_limit(shares: Iterable[float], *, fraction: float) -> float:
    """Return the limit below which a share is held out, so that neither split is empty.

    It is `fraction`, unless all shares are on one side of it. Then only the lowest share is held
    out, or all but the highest.

    Args:
      shares: `share_of` the text of each document.
      fraction: Requested share of the documents.

    Raises:
      ConfigError: All shares are equal.
    """
    every = sorted(set(shares))
    if len(every) < 2:
        raise ConfigError("all documents have the same text, so none can be held out")
    if every[0] >= fraction:
        return math.nextafter(every[0], 1.0)
    return min(fraction, every[-1])


def split_position(text: bytes | mmap.mmap, *, heldout_fraction: float) -> int | None:
    """Return the position of the held-out end of a text, which is the beginning of a line.

    It is None if no line begins near it.
    """
    ideal = int(len(text) * (1 - heldout_fraction))
    lines = (text.rfind(b"\n", 0, ideal) + 1, text.find(b"\n", ideal) + 1)
    cuts = [begin for begin in lines if 0 < begin < len(text)]
    cut = min(cuts, key=lambda cut: abs(cut - ideal), default=None)
    if cut is None or len(text) - cut > _MAX_HELD_OUT_RATIO * heldout_fraction * len(text):
        return None
    return cut


def _end_position(file: TextFile, heldout_fraction: float) -> int | None:
    """Return `split_position` of the contents of a file. Only parts of the file are read."""
    if not file.path.stat().st_size:  # An empty file cannot be memory-mapped.
        return None
    with (
        file.path.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        return split_position(mapped, heldout_fraction=heldout_fraction)


def share_of(content: bytes) -> float:
    """Return a number in [0, 1) from a hash of the content."""
    return _as_share(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest())


def _share_of_file(path: Path) -> float:
    """Return `share_of` the contents of a file, which is read in parts."""
    with path.open("rb") as opened:
        digest = hashlib.file_digest(
            opened, lambda: hashlib.blake2b(digest_size=_HASH_BYTES)
        ).digest()
    return _as_share(digest)


def _as_share(digest: bytes) -> float:
    return int.from_bytes(digest, "big") / 2 ** (8 * len(digest))
