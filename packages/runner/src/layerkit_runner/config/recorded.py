"""The configuration that a training run recorded in `config.json` of its folder.

The class that it names is imported only for a command without `--exp`. Its module may not be in the
job's folder: otherwise, a user who can write to the folder could run code.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerkit.config.field_types import MISMATCH, field_annotations
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.requests import (
    ParsedFlags,
    flag_word,
    merge_overrides,
    parse_override,
)
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import DocumentError, parse_json, read_text
from layerkit_runner.files.text import near_folders, printable
from layerkit_runner.run_options import RunOptions

FILE_NAME = "config.json"
# The flags that only the first start of a job reads.
FIRST_START_FLAGS = (
    *("init_from", "init_draw"),
    *("restore_checkpoint_dir", "restore_checkpoint_step", "restore_cast_dtypes"),
)
# A model of thousands of layers that are listed one by one has a few megabytes.
_MAX_BYTES = 64_000_000
# A class that a function or a notebook defines has `<locals>` in its name.
_CLASS_NAME = re.compile(r"[^\W\d]\w*(\.([^\W\d]\w*|<locals>))+")


@dataclasses.dataclass(frozen=True)
class RecordedConfig:
    """The content of `config.json`; `config` has the values of all fields at any depth, by path."""

    experiment: str
    overrides: Mapping[str, str]
    arguments: Sequence[str]
    fields: Mapping[str, Any]
    config: Mapping[str, Any]

    def first_start_options(self) -> dict[str, Any]:
        """Return the options that only the first start of the job reads; see `parse_flags`."""
        options = parse_flags(self.arguments).options
        return {name: getattr(options, name) for name in FIRST_START_FLAGS}


def differing_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names, or paths, whose JSON values differ; those of `before` come first.

    A name that one side lacks differs. 1, 1.0 and true are different values.
    """

    def text(side: Mapping[str, Any], name: str) -> str | None:
        return json.dumps(side[name], sort_keys=True) if name in side else None

    return [name for name in {**before, **after} if text(before, name) != text(after, name)]


class DamagedRecordError(UsageError):
    """A `config.json` that cannot be read, or has an unknown form."""


def read_recorded_config(folder: str) -> RecordedConfig | None:
    """Read the configuration with which a folder was last written; None without `config.json`."""
    try:
        text = _read(folder)
        return None if text is None else _record(parse_json(text))
    except (OSError, DocumentError) as error:
        raise DamagedRecordError(
            f"{FILE_NAME} is damaged: {error}",
            owner=f"{folder}/{FILE_NAME}",
            expected="the record of a training run",
            hint="Restore it from a backup, or delete it and name the experiment by --exp.",
        ) from error


def load_recorded_config(folder: str, *, flag: str, hint: str | None = None) -> RecordedConfig:
    """Return the configuration of a folder that the value of a flag names."""
    recorded = read_recorded_config(folder)
    if recorded is None:
        expected = f"a folder with {FILE_NAME}, which a training run writes"
        choices = near_folders(folder)
        raise UsageError(field=flag, value=folder, expected=expected, choices=choices, hint=hint)
    return recorded


def add_recorded_experiment(flags: ParsedFlags, report: Callable[[str], None]) -> ParsedFlags:
    """Return flags with the experiment and overrides of the job's folder, if they name none.

    Overrides of the command line replace recorded ones of the same path. Training also takes the
    flags of the first start, such as init_from, since the job may have no checkpoint yet.
    """
    folder = flags.options.job_log_dir
    if flags.exp is not None:
        return flags
    if folder is None:
        raise UsageError(
            "missing flag",
            field="--exp",
            expected="the name of an experiment, or the --job_log_dir of a job that ran it",
            hint="`runner --list` prints all.",
        )
    hint = "Or name the experiment by --exp; `runner --list` prints all."
    recorded = load_recorded_config(folder, flag="--job_log_dir", hint=hint)
    if not _CLASS_NAME.fullmatch(recorded.experiment):
        expected, name = "the full name of a class", recorded.experiment
        raise UsageError(owner=f"{folder}/{FILE_NAME}", value=name, expected=expected)
    _check_module("experiment", recorded.experiment, folder)
    paths = {override.path for override in flags.overrides}
    taken = []
    for path, text in recorded.overrides.items():
        if path in paths:
            continue
        if "." in path and _CLASS_NAME.fullmatch(text):  # It may name the class of a config.
            _check_module(path, text, folder)
        taken.append(dataclasses.replace(parse_override(path, text), is_recorded=True))
    first: dict[str, Any] = {}
    if flags.mode == "train" and flags.values.keys().isdisjoint(FIRST_START_FLAGS):
        options = recorded.first_start_options().items()
        first = {name: value for name, value in options if value != getattr(RunOptions, name)}
    words = [f"--exp={recorded.experiment}", *map(str, taken)]
    words += [flag_word(name, value) for name, value in first.items()]
    report(f"taken from {folder}/{FILE_NAME}: {printable(shlex.join(words))}")
    return dataclasses.replace(
        flags,
        exp=recorded.experiment,
        overrides=merge_overrides([*taken, *flags.overrides]),
        options=dataclasses.replace(flags.options, **first),
        values={**flags.values, **first},
    )


def _read(folder: str) -> str | None:
    if "://" in folder:
        from etils import epath  # only a store needs it

        remote = epath.Path(folder) / FILE_NAME
        return str(remote.read_text()) if remote.exists() else None
    path = Path(folder).expanduser() / FILE_NAME
    if path.exists() and not path.is_file():
        raise DocumentError("it is not a file")
    return read_text(path, max_bytes=_MAX_BYTES) if path.exists() else None


def _record(document: Any) -> RecordedConfig:
    if not isinstance(document, dict):
        raise DocumentError("expected an object")
    # A record without arguments is of an older version.
    values, kinds = {"arguments": [], **document}, field_annotations(RecordedConfig)
    for name, kind in kinds.items():
        if kind.fit(values.get(name)) is MISMATCH:
            raise DocumentError(f"{name} is missing or no {kind}")
    return RecordedConfig(**{name: values[name] for name in kinds})


def _check_module(field: str, name: str, folder: str) -> None:
    """Raise an error if the module of a class is in the job's folder."""
    package = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made without one
        return
    if spec is None or "://" in folder:
        return
    root = os.path.realpath(os.path.expanduser(folder))
    for place in (spec.origin, *(spec.submodule_search_locations or ())):
        if place is not None and Path(os.path.realpath(place)).is_relative_to(root):
            flag = "--exp" if field == "experiment" else f"--fdl.{field}"
            raise UsageError(
                owner=f"{folder}/{FILE_NAME}",
                field=field,
                value=name,
                expected=f"a module outside of the folder, not {place}",
                hint=f"If you trust that file, name it by {flag}={name}",
            )
