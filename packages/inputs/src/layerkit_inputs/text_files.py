"""Local text files, and their split into training and held-out files.

Names of files are relative to the folder in which they were found, and files are sorted by name. So
a folder gives the same data at any location. Only the name of a file determines whether it is held
out, so adding files does not move other files between the splits. The exception is a split that
would be empty otherwise, for example with few files. The documents of a single file are split by
their content. If the file is one document, its end is held out, from a line break on.
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

from layerkit.errors import ConfigError
from layerkit_inputs.bad_records import MissingFileError

# Tests are many and similar, `encodings` holds tables of characters, `_sysconfigdata` describes the
# machine, and the other folders are not part of the standard library.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_PREFIX = "_sysconfigdata"
# Maximum ratio of the held-out share of a text to the requested share, if its lines are long.
_MAX_HELD_OUT_RATIO = 3


class NothingToReadError(MissingFileError):
    """An entry of `paths` that matches no file.

    Attributes:
      remedies: Fields and values with which files can be read; see `bad_records.UnfitFieldError`.
    """

    remedies: ClassVar[Mapping[str, Any]] = {"paths": ["FILE_OR_PATTERN"]}


class TextFile(NamedTuple):
    """A file, and its name relative to the folder in which it was found, with `/` as separator."""

    name: str
    path: Path


def standard_library_files() -> list[TextFile]:
    """Return the Python sources of the running interpreter, with its documentation topics.

    Raises:
      MissingFileError: The interpreter is installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in _below(root, skipped=_SKIPPED_FOLDERS)
        if file.path.suffix == ".py" and not file.path.name.startswith(_SKIPPED_PREFIX)
    ]
    if not files:
        raise MissingFileError(
            f"the sources of the standard library are not in {root}",
            field="paths",
            value=None,
            expected="text files",
        )
    return sorted(files)


def find_text_files(paths: Sequence[str]) -> list[TextFile]:
    """Return the files that `paths` matches: files, folders (recursively) and `glob` patterns.

    Hidden files in folders are skipped. A file that matches twice is returned once.

    Raises:
      NothingToReadError: An entry of `paths` matches no file.
    """
    found: dict[Path, TextFile] = {}
    for entry in paths:
        matches = sorted(_matches(str(entry)))
        if not matches:
            raise NothingToReadError(
                "no file found",
                field="paths",
                value=str(entry),
                expected="a file, a folder with files, or a pattern such as 'notes/**/*.txt'",
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


def _below(folder: Path, *, skipped: frozenset[str] = frozenset()) -> Iterator[TextFile]:
    for parent, folders, names in os.walk(folder):
        # Removing folders here prevents walking through them; site-packages can be large.
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        for name in names:
            path = Path(parent, name)
            if name[0] != "." and path.is_file():
                yield TextFile(path.relative_to(folder).as_posix(), path)


def split_files(
    files: Sequence[TextFile], *, heldout_fraction: float
) -> tuple[list[TextFile], list[TextFile]]:
    """Return (training files, held-out files) of two or more files; see `held_out_shares`."""
    shares = [share_of(file.name.encode("utf-8", "surrogateescape")) for file in files]
    chosen = held_out_shares(shares, fraction=heldout_fraction)
    return (
        [file for index, file in enumerate(files) if index not in chosen],
        [file for index, file in enumerate(files) if index in chosen],
    )


def held_out_shares(shares: Sequence[float], *, fraction: float) -> set[int]:
    """Return the indices of the held-out elements among two or more.

    Neither split is empty. If no share is below `fraction`, only the lowest is held out. If all
    shares are below it, all but the highest are held out.

    Args:
      shares: `share_of` the name or content of each element.
      fraction: Share below which an element is held out.
    """
    by_share = sorted(range(len(shares)), key=lambda index: (shares[index], index))
    count = sum(share < fraction for share in shares)
    return set(by_share[: min(max(count, 1), len(shares) - 1)])


def split_position(text: bytes | mmap.mmap, *, heldout_fraction: float) -> int:
    """Return the position of the held-out end of a text, which is the beginning of a line.

    Raises:
      ConfigError: The text is empty, or no line begins near the position.
    """
    if not len(text):
        raise ConfigError(field="size in bytes", value=0, expected="text to train on")
    wanted = int(len(text) * (1 - heldout_fraction))
    lines = (text.rfind(b"\n", 0, wanted) + 1, text.find(b"\n", wanted) + 1)
    cuts = [begin for begin in lines if 0 < begin < len(text)]
    cut = min(cuts, key=lambda cut: abs(cut - wanted), default=0)
    if not cut or len(text) - cut > _MAX_HELD_OUT_RATIO * heldout_fraction * len(text):
        raise ConfigError(
            f"no line begins near the last {heldout_fraction:.0%} of {len(text)} bytes, which are"
            " held out",
            hint="Split the text into lines, or add a second file to paths.",
        )
    return cut


def split_position_of_file(path: Path, *, heldout_fraction: float) -> int:
    """Return `split_position` of the contents of a file. Only parts of the file are read."""
    if not path.stat().st_size:  # An empty file cannot be memory-mapped.
        return split_position(b"", heldout_fraction=heldout_fraction)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return split_position(mapped, heldout_fraction=heldout_fraction)


def share_of(content: bytes) -> float:
    """Return a number in [0, 1) from a hash of the content."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64
