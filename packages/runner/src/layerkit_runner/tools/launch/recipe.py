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
    """Files and commands that start a run.

    Attributes:
      commands: Words of each command, in order.
      files: Text by path. Only the owner can read a file, and execute one that ends in `.sh`.
      folders: Folders that must exist.
      next_steps: Lines for the user, printed after the commands.
      replaces_process: True if the last command replaces this process and so receives its signals.
    """

    commands: Sequence[Sequence[str]]
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folders: Sequence[str] = ()
    next_steps: Sequence[str] = ()
    replaces_process: bool = False


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
    yield from (f"# {line}" for line in recipe.next_steps)


def execute(recipe: Recipe) -> int:
    """Write the files and run the commands up to the first that fails; return its exit code.

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
        raise UsageError(f"cannot write, so nothing was started: {error}") from error
    for number, words in enumerate(recipe.commands, start=1):
        print(f"+ {shlex.join(words)}", flush=True)
        try:
            if recipe.replaces_process and number == len(recipe.commands):
                os.execvp(words[0], list(words))
            code = subprocess.run(words, check=False).returncode
        except FileNotFoundError:
            raise UsageError(
                "the program is not installed here, so nothing was started",
                owner=words[0],
                hint="--dry_run prints the files and commands, to start them on another machine.",
            ) from None
        if code != 0:
            return code
    for line in recipe.next_steps:
        print(line)
    return 0
