"""A recipe: files to write and commands to run, which a dry run prints instead."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What starts a run, in order.

    Attributes:
      files: Text by path. Only their owner can read them, and run those that end in `.sh`.
      folders: Folders that must exist.
      commands: Words of each command.
      afterwards: Lines for the user about what to do next.
      hands_over: Whether the last command replaces this process and so receives its signals.
    """

    commands: Sequence[Sequence[str]]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folders: Sequence[str] = ()
    afterwards: Sequence[str] = ()
    hands_over: bool = False


def recipe_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the lines of a dry run; except for the headings, a shell could run them."""
    for path, text in recipe.files.items():
        yield f"# would write {path}"
        yield text.rstrip("\n")
        yield ""
    for folder in recipe.folders:
        yield f"# would make {folder}"
    yield "# would run" if recipe.commands else "# would run nothing"
    for words in recipe.commands:
        yield shlex.join(words)
    yield from (f"# {line}" for line in recipe.afterwards)


def follow(recipe: Recipe) -> int:
    """Write the files and run the commands, up to the first that fails; return its exit code.

    Raises:
      UsageError: A file cannot be written, or a program is not installed here.
    """
    try:
        for folder in recipe.folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in recipe.files.items():
            # It may hold variables and paths that are not for others to read.
            atomic_write(path, text, mode=0o700 if path.endswith(".sh") else 0o600)
    except OSError as error:
        raise UsageError(f"nothing was started: {error}") from error
    for number, words in enumerate(recipe.commands, start=1):
        print(f"+ {shlex.join(words)}", flush=True)
        try:
            if recipe.hands_over and number == len(recipe.commands):
                os.execvp(words[0], list(words))
            code = subprocess.run(words, check=False).returncode
        except FileNotFoundError:
            raise UsageError(
                f"{words[0]} is not installed here, so nothing was started; --dry_run prints what"
                " would be, to be started where it is."
            ) from None
        if code != 0:
            return code
    for line in recipe.afterwards:
        print(line)
    return 0
