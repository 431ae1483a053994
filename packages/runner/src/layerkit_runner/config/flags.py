"""Parse the command line of `runner` by the table of flags and the tools that packages add to it.

`read_flags` serves tools with tables of their own. Flags are written as absl's: `--name=value`,
`--name value`, `--name` and `--noname`. Pax's names of flags and experiments are valid too.

Packages add commands and modes by the entry-point group `layerkit.commands`:

    [project.entry-points."layerkit.commands"]
    count = "acme.counting:MODE"

The named object is a `Mode` (`runner --mode=count …`) or a `Command` (`runner count …`). Its module
is imported to parse a command line and for `--help`, so `run` imports whatever takes long.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from layerkit.config.checks import require
from layerkit_runner.config.requests import Override, ParsedFlags, merge_overrides, parse_override
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import (
    AUTO_ADDRESS,
    FLAGS,
    JOINING_MODES,
    LOG_FLAGS,
    MODES,
    ONCE_MODES,
    Flag,
    RunOptions,
    switch,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from layerkit_runner.config.requests import ResolvedExperiment

# Flags that need another one.
_NEEDS = {
    "tag": "list",
    "num_trials": "study",
    "study_storage": "study",
    "init_draw": "init_from",
    "bakes_weights": "export_format",
    "compare": "html",
    "max_compilations": "search",
    "max_seconds": "search",
}
# Flags that contradict --init_from, each with a hint.
_WITHOUT_INIT_FROM = {
    "restore_checkpoint_dir": "",
    "restore_checkpoint_step": "Name the folder of the step:"
    " --init_from=DIR/checkpoints/checkpoint_00000100.",
}


def read_flags(
    words: Sequence[str],
    rows: Iterable[Flag],
    *,
    other_names: Mapping[str, str] = {},
    known_only: bool = False,
    takes_words: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a table's flags that words give, by name, and the remaining words.

    `other_names` are further names of flags. Words that belong to no flag are errors, or remain if
    `known_only` is set. With `takes_words`, those remain that do not begin with a dash.
    """
    table = {row.name: row for row in rows}
    table |= {
        name: table[other] for name, other in {"h": "help", **other_names}.items() if other in table
    }
    values: dict[str, Any] = {}
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, text = word.lstrip("-").partition("=")
        row = table.get(name)
        is_off = row is None and name.startswith("no") and not equals
        if is_off:
            row = table.get(name.removeprefix("no"))
        if not word.startswith("-") or row is None or (is_off and not row.is_switch):
            if word.startswith("-") and not known_only:
                raise unknown_flag(name, table)
            rest.append(word)
            continue
        if row.is_switch and not equals:
            value = not is_off
        else:
            value = _read_value(row, text if equals else next(remaining, ""))
        if row.repeats:
            values[row.name] = (*values.get(row.name, ()), value)
        elif (earlier := values.setdefault(row.name, value)) != value:
            expected = f"one value; --{row.name}={earlier!r} is given as well"
            raise UsageError(field=f"--{row.name}", value=value, expected=expected)
    if rest and not known_only and not takes_words:
        raise _unexpected_word(rest[0])
    return values, rest


def _read_value(row: Flag, text: str) -> Any:
    """Return the value of a flag for its text."""
    data: dict[str, Any] = {"field": f"--{row.name}", "value": text}
    # A word that follows a flag without its value is likely the next flag.
    if not text or (row.read is str and text.startswith("--")):
        raise UsageError(**data, expected=row.metavar or "a value")
    try:
        # No checkpoint can be written below a folder whose name is not UTF-8.
        (os.path.abspath(text) if row.metavar == "DIR" else text).encode()
    except UnicodeEncodeError:  # Python decodes other bytes to surrogates
        raise UsageError(**data, expected="text and folders with names in UTF-8") from None
    if row.choices and text not in row.choices:
        raise UsageError(**data, choices=row.choices)
    try:
        return switch(text) if row.is_switch else row.read(text)
    except ValueError as error:
        raise UsageError(**data, expected=str(error)) from None


def unknown_flag(name: str, known: Collection[str]) -> UsageError:
    """Return the error about an unknown flag, with the near ones of those that are known."""
    name = name.lstrip("-")
    hint = PAX_ANSWERS.get(name)
    if hint is None and re.fullmatch(r"[A-Z][\w.]*", name):
        hint = f"Set a field of the experiment by --fdl.{name}=VALUE"
    # Negated names are suggested only for a negated name: --nolist does not help with --lits.
    switches = [row.name for row in FLAGS if row.is_switch] if name.startswith("no") else []
    names = [*known, *(f"no{switch}" for switch in switches)]
    choices = [] if hint else [f"--{name}" for name in names]
    return UsageError("unknown flag", value=f"--{name}", hint=hint, choices=choices)


def _unexpected_word(word: str) -> UsageError:
    names, hint = installed_tools(Command), None
    if word in names:
        hint = f"Commands come before all flags: runner {word} [flags]"
    elif word in (*MODES, *installed_tools(Mode)):
        hint = f"Did you mean --mode={word}?"
    return UsageError(
        "unexpected word",
        value=word,
        expected="flags such as --name=value, --name or --noname",
        choices=[] if hint else difflib.get_close_matches(word, names),
        hint=hint,
    )


def parse_flags(words: Sequence[str]) -> ParsedFlags:
    """Parse the command line of a run."""
    overrides, others = _take_overrides(words)
    named, _ = read_flags(others, [row for row in FLAGS if row.name == "mode"], known_only=True)
    mode = named.get("mode", "train")
    tool = None if mode in MODES else load_mode(mode)
    tool_rows = () if tool is None else tool.flags
    values, _ = read_flags(others, [*FLAGS, *tool_rows], other_names=PAX_FLAGS)
    overrides += _replace_pax_flags(values)
    names = [f.name for f in dataclasses.fields(RunOptions) if f.metadata and f.name in values]
    extra = (
        {} if tool is None else {row.name: values.get(row.name, row.default) for row in tool.flags}
    )
    options = RunOptions(**{name: values[name] for name in names}, extra=extra)
    flags = ParsedFlags(values.get("exp"), mode, merge_overrides(overrides), options, values)
    if not values.get("help") and not values.get("list"):
        _check_together(flags, () if tool is None else tool.uses)
    return flags


def _take_overrides(words: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Return the overrides of a command line, and its other words."""
    overrides, others = [], []
    rest = iter(words)
    for word in rest:
        if not word.startswith("--fdl."):
            others.append(word)
            continue
        path, equals, text = word.removeprefix("--fdl.").partition("=")
        text = text if equals else next(rest, "--")
        if not equals and text.startswith("--"):
            raise UsageError(field=f"--fdl.{path}", expected=f"a value: --fdl.{path}=VALUE")
        overrides.append(parse_override(path, text))
    return overrides, others


def _check_together(flags: ParsedFlags, used: Collection[str]) -> None:
    """Raise UsageError if a flag would have no effect, or contradicts another one.

    `used` are the flags of other modes that the mode uses as well. `distributed.launchers` checks
    flags against the environment.
    """
    values, options, mode = flags.values, flags.options, flags.mode
    for row in FLAGS:
        # A configuration is printed from the command that would run it, as JSON too.
        is_used = row.name in used or (flags.only_prints and row.name == "json")
        if row.name in values and row.modes and mode not in row.modes and not is_used:
            expected = f"--mode={' or '.join(row.modes)}"
            raise UsageError(
                f"not a flag of --mode={mode}", field=f"--{row.name}", expected=expected
            )
    for name, other in _NEEDS.items():
        if name in values and other not in values:
            raise UsageError(field=f"--{name}", expected=f"--{other} with it")
    for name, hint in _WITHOUT_INIT_FROM.items():
        if options.init_from and getattr(options, name):
            field = f"--init_from and --{name}"
            raise UsageError("contradictory flags", field=field, expected="one of them", hint=hint)
    steps = options.restore_checkpoint_step or ()
    is_valid, shown = len(steps) <= 1 or mode in ONCE_MODES, ",".join(map(str, steps))
    expected = f"one step in --mode={mode}, or --mode={' or '.join(ONCE_MODES)}"
    require(is_valid, None, "--restore_checkpoint_step", shown, expected, UsageError)
    count, index = options.num_processes, options.process_id
    if count is not None and index is not None and index >= count:
        expected = f"0 to {count - 1}, since --num_processes={count}"
        raise UsageError(field="--process_id", value=index, expected=expected)


def configure_library_logs(options: RunOptions) -> None:
    """Give absl the flags about log messages of libraries, such as Orbax, if any is set.

    Lines of the runner itself do not pass through absl.
    """
    values = {name: getattr(options, name) for name in LOG_FLAGS}
    changed = {n: value for n, value in values.items() if value != getattr(RunOptions, n)}
    if not changed:
        return
    # Imported late, because it replaces the class of Python's loggers.
    from absl import flags as absl_flags
    from absl import logging

    for name, value in changed.items():
        absl_flags.FLAGS[name].value = value
    if not absl_flags.FLAGS.is_parsed():
        absl_flags.FLAGS.mark_as_parsed()
    logging.use_absl_handler()
    if options.log_dir is None:
        return
    try:
        os.makedirs(options.log_dir, exist_ok=True)
        logging.get_absl_handler().use_absl_log_file("runner", options.log_dir)
    except OSError as error:
        raise UsageError(str(error), field="--log_dir", value=options.log_dir) from error


PAX_FLAGS = {
    "fdl_config": "exp",
    "server_addr": "coordinator_address",
    "host_idx": "process_id",
    "verbosity": "v",
}
"""Flags of Pax that have another name here."""

PAX_ANSWERS = {
    "globally_use_hardware_rng": "The random number generator is part of the configuration:"
    " --fdl.task.train.prng_impl=unsafe_rbg",
    "enforce_restore_shape_check": "Shapes are always checked when a checkpoint is restored.",
    "decode_output_pickle": "Outputs are JSON lines in DIR/decode.",
    "tensorstore_use_ocdbt": "Checkpoints that TensorStore writes are always OCDBT.",
    "maybe_use_persistence_checkpointing": "Checkpoints are always written by TensorStore; pmap"
    " runs choose by --pmap_use_tensorstore.",
}
"""What to do in place of a flag of Pax that has no counterpart."""

# Packages of experiments in Pax's documents, each with the package here.
_PAX_PACKAGES = (
    (re.compile(r"(paxml\.)?tasks\.(\w+)\.params\."), r"\2."),
    (re.compile(r"paxml\.contrib\.gpu\.scripts_gpu\.configs\.(?=LLaMA)"), "lm.boolq."),
    (re.compile(r"paxml\.contrib\.gpu\.scripts_gpu\.configs\."), "lm.pile."),
)


def experiment_name(name: str) -> str:
    """Return the name of an experiment here for its name in Pax's documents, or the name itself."""
    for pattern, package in _PAX_PACKAGES:
        if pattern.match(name):
            return pattern.sub(package, name, count=1)
    return name


def _replace_pax_flags(values: dict[str, Any]) -> list[Override]:
    """Replace flags of Pax by those of the runner; return the overrides that they stand for."""
    # Of --mode=inspect, --num_hosts is a flag of its own.
    if "num_hosts" in values and values.get("mode", "train") in JOINING_MODES:
        hosts = values.pop("num_hosts")
        if values.setdefault("num_processes", hosts) != hosts:
            raise UsageError(field="--num_hosts", value=hosts, expected="that of --num_processes")
    if values.get("multiprocess_gpu"):
        values.setdefault("coordinator_address", AUTO_ADDRESS)
    folder = values.get("tfds_data_dir")
    return [] if folder is None else [Override("TFDS_DATA_DIR", folder)]


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


def installed_tools(kind: type[Kind]) -> dict[str, Kind]:
    """Return the commands of a kind by name; see `broken_tools` for those that cannot be loaded."""
    loaded = {name: _load(name) for name in entry_points()}
    return {name: command for name, command in loaded.items() if isinstance(command, kind)}


def broken_tools() -> dict[str, str]:
    """Return what failed when a command or mode was imported, by name."""
    loaded = {name: _load(name) for name in entry_points()}
    return {name: str(error) for name, error in loaded.items() if isinstance(error, _LoadError)}


def load_tool(kind: type[Kind], name: str, *, shown: str) -> Kind:
    """Return the command of that kind and name."""
    problem, hint = f"no package offers it in the entry-point group {GROUP}", None
    if name in entry_points():
        command = _load(name)
        if isinstance(command, kind):
            return command
        kinds = f"a {type(command).__name__}, not a {kind.__name__}"
        problem = f"{entry_points()[name].value} is {kinds}"
        uses = {Mode: f"--mode={name}", Command: f"runner {name}", FlagCommand: f"--{name}"}
        hint = (use := uses.get(type(command))) and f"Use: {use}"
        if isinstance(command, _LoadError):
            problem = f"cannot be loaded: {command}"
    raise UsageError(problem, owner=shown, hint=hint)


def load_mode(name: str) -> Mode:
    """Return the tool of a mode."""
    known = {mode for row in FLAGS for mode in row.modes} | entry_points().keys()
    if name not in known:
        raise UsageError(field="--mode", value=name, choices=(*MODES, *installed_tools(Mode)))
    return load_tool(Mode, name, shown=f"--mode={name}")


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
