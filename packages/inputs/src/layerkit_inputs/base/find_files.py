"""Local text files.

Names of files are relative to the folder in which they were found, and files are sorted by name. So
a folder gives the same data at any location.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from layerkit.errors import hub_hint
from layerkit_inputs.base.errors import MissingFileError

# Tests are many and similar, `encodings` holds tables of characters, `_sysconfigdata` describes the
# machine, and the other folders are not part of the standard library.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
)
_SKIPPED_PREFIX = "_sysconfigdata"


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
        raise MissingFileError(f"the sources of the standard library are not in {root}")
    return sorted(files)


def find_text_files(paths: Sequence[str], *, field: str = "paths") -> list[TextFile]:
    """Return the files that `paths` matches: files, folders (recursively) and `glob` patterns.

    Hidden files in folders are skipped. A file that matches twice is returned once. `field` is the
    name of `paths` in messages.

    Raises:
      MissingFileError: An entry of `paths` matches no file.
    """
    if not paths:
        raise MissingFileError("no path", field=field, value=list(paths))
    files: dict[Path, TextFile] = {}
    for entry in paths:
        matches = sorted(_matches(str(entry)))
        if not matches:
            problem = "no file, folder with files or pattern that matches"
            hint = hub_hint(str(entry), is_data=True)
            raise MissingFileError(problem, field=field, value=str(entry), hint=hint)
        for file in matches:
            files.setdefault(file.path.resolve(), file)
    return sorted(files.values())


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
