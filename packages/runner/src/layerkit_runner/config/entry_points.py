"""Commands and modes that packages add to `runner` by the entry-point group `layerkit.commands`.

    [project.entry-points."layerkit.commands"]
    count = "acme.counting:MODE"

The named object is a `Mode` (`runner --mode=count …`) or a `Command` (`runner count …`). Its module
is imported to parse a command line and for `--help`, so `run` imports whatever takes long.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import FLAGS, MODES, Flag, RunOptions

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from layerkit_runner.config.requests import ParsedFlags, ResolvedExperiment

GROUP = "layerkit.commands"


@dataclasses.dataclass(frozen=True)
class Mode:
    """A value of `--mode`, which does something with an experiment.

    Attributes:
      help: One line for `--help`.
      run: Function of the resolved experiment and the options; returns the exit code.
      flags: Flags of this mode alone; `options.extra` has their values by name.
      uses: Names of flags of the runner that belong to other modes and to this one, such as json.
    """

    help: str
    run: Callable[[ResolvedExperiment, RunOptions], int]
    flags: tuple[Flag, ...] = ()
    uses: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Command:
    """A word in place of an experiment: `runner NAME …`.

    Attributes:
      help: One line for `--help`.
      run: Function of the words after the name; returns the exit code.
    """

    help: str
    run: Callable[[Sequence[str]], int]


@dataclasses.dataclass(frozen=True)
class FlagCommand:
    """An action that a flag of the runner starts in place of the mode, such as `--study`."""

    run: Callable[[ParsedFlags], int]


Kind = TypeVar("Kind", Mode, Command, FlagCommand)


def installed(kind: type[Kind]) -> dict[str, Kind]:
    """Return the commands of a kind by name; see `broken` for those that cannot be loaded."""
    loaded = {name: _load(name) for name in entry_points()}
    return {name: command for name, command in loaded.items() if isinstance(command, kind)}


def broken() -> dict[str, str]:
    """Return what failed when a command or mode was imported, by name."""
    loaded = {name: _load(name) for name in entry_points()}
    return {name: str(error) for name, error in loaded.items() if isinstance(error, _LoadError)}


def load(kind: type[Kind], name: str, *, shown: str) -> Kind:
    """Return the command of that kind and name."""
    point = entry_points().get(name)
    command = None if point is None else _load(name)
    if isinstance(command, kind):
        return command
    uses = {Mode: f"--mode={name}", Command: f"runner {name}", FlagCommand: f"--{name}"}
    use = uses.get(type(command))
    if point is None:
        problem = f"no package offers it in the entry-point group {GROUP}"
    elif isinstance(command, _LoadError):
        problem = f"cannot be loaded: {command}"
    else:
        problem = f"{point.value} is a {type(command).__name__}, not a {kind.__name__}"
    raise UsageError(problem, owner=shown, hint=use and f"Use: {use}")


def load_mode(name: str) -> Mode:
    """Return the tool of a mode."""
    known = {mode for row in FLAGS for mode in row.modes} | entry_points().keys()
    if name not in known:
        raise UsageError(field="--mode", value=name, choices=(*MODES, *installed(Mode)))
    return load(Mode, name, shown=f"--mode={name}")


@functools.cache
def entry_points() -> dict[str, EntryPoint]:
    """Return the entry points of all commands and modes, also of those that cannot be imported."""
    # Imported here because it takes some 40 ms.
    from importlib import metadata

    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: point for point in points}


class _LoadError(Exception):
    """The error of an entry point that cannot be loaded: its object, and the cause."""


@functools.cache
def _load(name: str) -> Any:
    """Return the object of an entry point, or a `_LoadError`."""
    point = entry_points()[name]
    try:
        return point.load()
    except Exception as error:
        text = " ".join(str(error).split())
        return _LoadError(f"{point.value}: {type(error).__name__}: {text}")
