"""`--fdl.NAME=VALUE`: what was asked to differ from the experiment as it is written.

A name without dots is a field of the experiment (`NUM_LAYERS`); it is set before the experiment's
methods are called. A dotted path (`task.model.lm_tpl.num_layers`, `datasets.0.batch_size`) names a
field at any depth of what those methods return, and is set on their result.

This module checks what can be checked before the experiment is imported, and so imports next to
nothing itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from layerkit import field_types
from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit_runner.errors import FieldError, UsageError, with_data

# Lists that few experiments define; None where they do not.
PROGRAM_ROOTS = ("train_programs", "eval_programs", "decode_programs")

# What may be None.
OPTIONAL_ROOTS = (*PROGRAM_ROOTS, "executor")

# What a deep path may start with: the parts of a resolved experiment.
ROOTS = (
    "task",
    "datasets",
    "decode_datasets",
    "partitioner",
    *OPTIONAL_ROOTS,
    "observers",
)

_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclasses.dataclass(frozen=True)
class Override:
    """One `--fdl.PATH=TEXT`; the text is read when the type of the field is known."""

    path: str
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The path's names, from the outermost."""
        return tuple(self.path.split("."))

    @property
    def is_deep(self) -> bool:
        """Whether this names a place inside the task, the inputs or the partitioner."""
        return len(self.parts) > 1

    def __str__(self) -> str:
        return f"--fdl.{self.path}={self.text}"


def parse_override(path: str, text: str) -> Override:
    """Read one override.

    Raises:
      UsageError: the path is not made of names and indices joined by dots.
    """
    if not _PATH.fullmatch(path):
        dotted = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
        hint = (
            f"; write --fdl.{dotted}={text}" if dotted != path and _PATH.fullmatch(dotted) else "."
        )
        raise UsageError(
            f"--fdl.{path}: a path is names and indices joined by dots, such as "
            f"task.model.lm_tpl.num_layers or datasets.0.batch_size{hint}"
        )
    root, dot, _ = path.partition(".")
    if dot and root not in ROOTS:
        raise UsageError(
            f"--fdl.{path}: a path starts with {', '.join(ROOTS[:-1])} or {ROOTS[-1]}, not"
            f" {root!r}{near_names(root, ROOTS)}"
        )
    return Override(path, text)


def check_consistent(overrides: Iterable[Override]) -> tuple[Override, ...]:
    """Return the overrides without repetitions.

    Raises:
      UsageError: two of them set the same path differently, or one sets a part of another.
    """
    by_path: dict[str, Override] = {}
    for override in overrides:
        earlier = by_path.setdefault(override.path, override)
        if earlier.text != override.text:
            raise UsageError(f"{earlier} and {override} contradict each other; keep one of them.")
    for override in by_path.values():
        for depth in range(1, len(override.parts)):
            outer = by_path.get(".".join(override.parts[:depth]))
            if outer is not None:
                raise UsageError(
                    f"{outer} sets the whole of what {override} sets a part of; keep one of them."
                )
    return tuple(by_path.values())


def parse_fields(
    experiment: str, annotations: Mapping[str, str | None], overrides: Iterable[Override]
) -> dict[str, Any]:
    """Return the values that overrides give to the experiment's own fields, without deep paths.

    Args:
      experiment: The experiment's name, for messages.
      annotations: Its fields, each with the text of its annotation.
      overrides: As given on the command line.

    Returns:
      The value of each field that was named.

    Raises:
      FieldError: lists every override that names no field, or whose value is of another type.
    """
    values: dict[str, Any] = {}
    problems: list[str | UsageError] = []
    for override in overrides:
        name = override.parts[0]
        if override.is_deep:
            continue
        if name in ROOTS:
            problems.append(f"{override} names no field; say which, such as --fdl.{name}.NAME=…")
        elif name not in annotations:
            problems.append(unknown_field(experiment, name, annotations))
        else:
            try:
                values[name] = field_types.parse_value(override.text, annotations[name])
            except field_types.FieldTypeError as error:
                problems.append(with_data(FieldError, error, owner=experiment, field=name))
    if len(problems) == 1 and isinstance(problems[0], FieldError):
        raise problems[0]
    if problems:
        raise FieldError("\n".join(map(str, problems)))
    return values


def unknown_field(experiment: str, name: str, valid: Iterable[str]) -> str:
    """Return the message about a field that the experiment does not have."""
    valid = list(valid)
    fields = f" Its fields: {first_names(valid)}." if valid else ""
    return f"{experiment} has no field {name!r}{near_names(name, valid)}{fields}"
