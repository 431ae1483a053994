"""Overrides of an experiment, `--fdl.NAME=VALUE`, and the checks before it is imported.

A name without dots is a field of the experiment, set before its methods are called. A dotted path,
such as `datasets.0.batch_size`, names a field at any depth of the configs that they return.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from layerkit.config import field_types
from layerkit_runner.errors import FieldError, UsageError, recast

# Roots that few experiments define; None for the others.
OPTIONAL_ROOTS = ("train_programs", "eval_programs", "decode_programs", "executor")

# First names of deep paths: the parts of a resolved experiment.
ROOTS = ("task", "datasets", "decode_datasets", "partitioner", *OPTIONAL_ROOTS, "observers")

_PATH = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclasses.dataclass(frozen=True)
class Override:
    """One `--fdl.PATH=TEXT`; the text is read when the type of the field is known.

    Attributes:
      path: Names and indices, joined by dots.
      text: Text of the value.
      is_recorded: True if the override comes from the record of a job folder, which others may
        have written.
    """

    path: str
    text: str
    is_recorded: bool = dataclasses.field(default=False, compare=False)

    @property
    def parts(self) -> tuple[str, ...]:
        """The path's names, from the outermost."""
        return tuple(self.path.split("."))

    @property
    def is_deep(self) -> bool:
        """Whether this sets a field inside the task, the inputs or another config."""
        return len(self.parts) > 1

    def __str__(self) -> str:
        """Return the flag as it is typed."""
        return f"--fdl.{self.path}={self.text}"


def parse_override(path: str, text: str) -> Override:
    """Return the override that a path and a text describe."""
    if not _PATH.fullmatch(path):
        expected = "names and indices joined by dots, such as datasets.0.batch_size"
        raise UsageError(field=f"--fdl.{path}", expected=expected)
    root, dot, _ = path.partition(".")
    if dot and root not in ROOTS:
        raise UsageError("unknown root", owner=f"--fdl.{path}", value=root, choices=ROOTS)
    return Override(path, text)


def merge_overrides(overrides: Iterable[Override]) -> tuple[Override, ...]:
    """Return the overrides without repetitions.

    An override of a part, such as `attention_tpl.num_heads`, follows that of the whole.
    """
    by_path: dict[str, Override] = {}
    for override in overrides:
        earlier = by_path.setdefault(override.path, override)
        if earlier.text != override.text:
            field = f"{earlier} and {override}"
            raise UsageError("contradictory flags", field=field, expected="one of them")
    return tuple(sorted(by_path.values(), key=lambda override: len(override.parts)))


def parse_fields(
    experiment: str, annotations: Mapping[str, str | None], overrides: Iterable[Override]
) -> dict[str, Any]:
    """Return the values that overrides give to the experiment's own fields, without deep paths."""
    values: dict[str, Any] = {}
    for override in overrides:
        name = override.path
        if override.is_deep:
            continue
        if name not in annotations:
            raise unknown_field(experiment, name, annotations)
        try:
            values[name] = field_types.parse_value(override.text, annotations[name])
        except field_types.FieldTypeError as error:
            raise recast(FieldError, error, owner=experiment, field=name) from None
    return values


def unknown_field(experiment: str, name: str, valid: Iterable[str]) -> FieldError:
    """Return the error about a field that the experiment does not have.

    `valid` begins with the fields of the bases; the choices begin with those of the class itself.
    """
    return FieldError("unknown field", owner=experiment, value=name, choices=[*valid][::-1])
