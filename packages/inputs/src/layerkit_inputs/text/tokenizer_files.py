"""Checks of the files of tokenizers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from layerkit.errors import hub_hint
from layerkit_inputs.base.bad_records import BadRecordError, MissingFileError


def sha256_of(path: str) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(tokenizer: Any, path: str) -> None:
    """Raise `MissingFileError` unless the file of a tokenizer exists."""
    if not Path(path).is_file():
        folder = Path(path).parent
        raise MissingFileError(
            f"file not found in {folder}",
            owner=type(tokenizer).__qualname__,
            field="path",
            value=Path(path).name,
            choices=sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else (),
            hint=hub_hint(path),
        )


def unreadable_file(
    tokenizer: Any, path: str | Path, expected: str, error: Exception
) -> BadRecordError:
    """Return the error about a file of a tokenizer that cannot be read."""
    problem = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return BadRecordError(
        f"cannot read the file ({problem[0]})",
        owner=type(tokenizer).__qualname__,
        field="path",
        value=str(path),
        expected=expected,
    )
