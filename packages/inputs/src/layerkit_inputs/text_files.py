"""Which local files a text reader reads, and which of them are held out.

Files are named relative to the place they were found in and sorted by name, so the same folder
gives the same data wherever it lies. Whether a file is held out depends on its name alone, so that
adding files does not move others from one split to the other; except where a split would be empty
otherwise, as among few files, and except where there is one file: its documents are split likewise,
by what they say, and a text that is one document is held out from a line near its end on.
"""

from __future__ import annotations

import glob
import hashlib
import mmap
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

# Tests are many and alike, `encodings` holds tables of characters, `_sysconfigdata` describes this
# machine, and the rest is not the standard library.
_LEFT_OUT_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
)
_LEFT_OUT_PREFIX = "_sysconfigdata"
# How many times the wanted share of a text is held out at most, where its lines are long.
_MOST_HELD_OUT = 3


class NothingToReadError(FileNotFoundError):
    """An entry of `paths` that names no file.

    Attributes:
      remedies: As in `bad_records.UnfitFieldError`.
    """

    remedies: ClassVar[Mapping[str, Any]] = {"paths": ["FILE_OR_PATTERN"]}


class TextFile(NamedTuple):
    """A file, and its name relative to the place it was found in (with `/` on every system)."""

    name: str
    path: Path


def standard_library_files() -> list[TextFile]:
    """The running interpreter's own Python sources, its documentation topics among them.

    Raises:
      FileNotFoundError: this interpreter comes without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _below(root, left_out=_LEFT_OUT_FOLDERS)
        if file.path.suffix == ".py" and not file.path.name.startswith(_LEFT_OUT_PREFIX)
    ]
    if not files:
        raise FileNotFoundError(
            f"the standard library's sources are not in {root}; name text files by `paths`."
        )
    return sorted(files)


def find_text_files(paths: Sequence[str]) -> list[TextFile]:
    """Files that `paths` names: files, folders (read through and through) and `glob` patterns.

    Hidden files are left out of folders; a file found twice counts once.

    Raises:
      NothingToReadError: one of `paths` names nothing.
    """
    found: dict[Path, TextFile] = {}
    for entry in paths:
        matches = sorted(_matches(str(entry)))
        if not matches:
            raise NothingToReadError(
                f"paths: nothing to read at {str(entry)!r}; expected a file, a folder with files, "
                "or a pattern such as 'notes/**/*.txt'."
            )
        for file in matches:
            found.setdefault(file.path.resolve(), file)
    return sorted(found.values())


def _matches(entry: str) -> Iterator[TextFile]:
    path = Path(entry)
    if path.is_file():
        yield TextFile(path.name, path)
    elif path.is_dir():
        yield from _below(path)
    else:
        parts = path.parts
        fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        root = Path(*parts[:fixed])
        for match in glob.iglob(entry, recursive=True):
            if Path(match).is_file():
                yield TextFile(Path(match).relative_to(root).as_posix(), Path(match))


def _below(folder: Path, *, left_out: frozenset[str] = frozenset()) -> Iterator[TextFile]:
    for parent, folders, names in os.walk(folder):
        # What is cut here is not walked through; site-packages can be large.
        folders[:] = [name for name in folders if name not in left_out and name[0] != "."]
        for name in names:
            path = Path(parent, name)
            if name[0] != "." and path.is_file():
                yield TextFile(path.relative_to(folder).as_posix(), path)


def split_files(
    files: Sequence[TextFile], *, heldout_fraction: float
) -> tuple[list[TextFile], list[TextFile]]:
    """Files to train on and files held out, each in the order given; see `held_out`.

    Raises:
      ValueError: there are fewer than two files.
    """
    if len(files) < 2:
        raise ValueError(
            f"{len(files)} file(s) cannot be split into training and held-out files; name at "
            "least two by `paths`."
        )
    names = [file.name.encode("utf-8", "surrogateescape") for file in files]
    chosen = held_out(names, fraction=heldout_fraction)
    return (
        [file for index, file in enumerate(files) if index not in chosen],
        [file for index, file in enumerate(files) if index in chosen],
    )


def held_out(names: Sequence[bytes], *, fraction: float) -> set[int]:
    """Return the indices of the names that are held out; see `held_out_shares`."""
    return held_out_shares([share_of(name) for name in names], fraction=fraction)


def held_out_shares(shares: Sequence[float], *, fraction: float) -> set[int]:
    """Return the indices of those of two or more that are held out.

    Neither part is empty: where no share (or every one) is below `fraction`, the lowest alone is
    held out (the highest alone is kept).

    Args:
      shares: `share_of` the name or content of each.
      fraction: Share below which one is held out.
    """
    by_share = sorted(range(len(shares)), key=lambda index: (shares[index], index))
    count = sum(share < fraction for share in shares)
    return set(by_share[: min(max(count, 1), len(shares) - 1)])


def split_position(text: bytes | mmap.mmap, *, heldout_fraction: float) -> int:
    """Return where the held-out end of a text begins: at the beginning of a line.

    Raises:
      ValueError: the text is empty, or no line begins where it could be cut.
    """
    if not len(text):
        raise ValueError("it is empty (0 bytes). Expected text to train on. Name another file.")
    wanted = int(len(text) * (1 - heldout_fraction))
    lines = (text.rfind(b"\n", 0, wanted) + 1, text.find(b"\n", wanted) + 1)
    cuts = [begin for begin in lines if 0 < begin < len(text)]
    cut = min(cuts, key=lambda cut: abs(cut - wanted), default=0)
    if not cut or len(text) - cut > _MOST_HELD_OUT * heldout_fraction * len(text):
        raise ValueError(
            f"no line begins near the last {heldout_fraction:.0%} of its {len(text)} bytes, which"
            " are held out; give it lines, or a second file."
        )
    return cut


def split_position_of_file(path: Path, *, heldout_fraction: float) -> int:
    """Return `split_position` of the contents of a file, of which only parts are read."""
    if not path.stat().st_size:  # nothing can be mapped
        return split_position(b"", heldout_fraction=heldout_fraction)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return split_position(mapped, heldout_fraction=heldout_fraction)


def share_of(content: bytes) -> float:
    """Return a number in [0, 1) that depends on nothing but the content: part of its hash."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64
