"""Parse the command line of `runner` by the table of flags.

absl parses the words. Each parse has flag values of its own, so that flags which libraries define
through absl do not mix with these. `read_flags` serves tools with tables of their own.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from layerkit.errors import hub_hint
from layerkit_runner.config import commands
from layerkit_runner.config.overrides import Override, check_consistent, parse_override
from layerkit_runner.config.recorded import read_recorded_config
from layerkit_runner.config.requests import ParsedFlags
from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import near_folders
from layerkit_runner.run_options import (
    AUTO_ADDRESS,
    FLAGS,
    INSPECTED,
    JOINING_MODES,
    MODES,
    ONCE_MODES,
    OTHER_NAMES,
    PAX_ANSWERS,
    Flag,
    RunOptions,
    switch,
)

# Flags of absl that read files and hide mistakes; a recorded command line may hold anything.
_ABSL_FLAGS = ("flagfile", "undefok")
# Flags that need another one.
_NEEDS = {"tag": "list", "num_trials": "study", "study_storage": "study", "init_draw": "init_from"}
# Flags that absl itself defines.
_LOG_FLAGS = ("alsologtostderr", "logtostderr", "v", "stderrthreshold", "log_dir")
_CONTRADICTIONS = (("init_from", "restore_checkpoint_dir"), ("print_config", "diff_config"))


class _Parser(absl_flags.ArgumentParser):
    """A parser of the values of one row of the table."""

    def __init__(self, row: Flag):
        self._row = row

    def parse(self, argument: str) -> Any:
        row = self._row
        data: dict[str, Any] = {"field": f"--{row.name}", "value": argument}
        # A word that follows a flag without its value is likely the next flag.
        if not argument or (row.read is str and argument.startswith("--")):
            raise UsageError(**data, expected=row.metavar or "a value")
        _check_utf8(argument, is_folder=row.metavar == "DIR", data=data)
        if row.choices and argument not in row.choices:
            raise UsageError(**data, choices=row.choices)
        try:
            return switch(argument) if row.is_switch else row.read(argument)
        except ValueError as error:
            raise UsageError(**data, expected=str(error)) from None


def _check_utf8(argument: str, *, is_folder: bool, data: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a word, or a folder above one, that is not UTF-8."""
    # In a folder of another name, no checkpoint can be written.
    path = os.path.abspath(argument) if is_folder and "://" not in argument else argument
    try:
        path.encode()
    except UnicodeEncodeError:  # Python decodes other bytes to surrogates
        expected = "a path whose folders have names in UTF-8" if is_folder else "text in UTF-8"
        raise UsageError(**data, expected=expected) from None


class _AbslFlag(absl_flags.Flag):
    """A flag that has one value however often it is given, or that keeps all its values."""

    def __init__(self, row: Flag, given: dict[str, Any]):
        short = "h" if row.name == "help" else None
        super().__init__(_Parser(row), None, row.name, None, row.help, short, row.is_switch)
        self.row = row
        self._given = given

    def parse(self, argument: str) -> None:
        super().parse(argument)
        if self.row.repeats:
            self._given[self.name] = (*self._given.get(self.name, ()), self.value)
        elif (earlier := self._given.setdefault(self.name, self.value)) != self.value:
            expected = f"one value; --{self.name}={earlier!r} is given as well"
            raise UsageError(field=f"--{self.name}", value=self.value, expected=expected)


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
    values = absl_flags.FlagValues()
    values.set_gnu_getopt()
    given: dict[str, Any] = {}
    table = {row.name: _AbslFlag(row, given) for row in rows}
    for name, flag in table.items():
        values[name] = flag
    for name, own in other_names.items():
        values[name] = table[own]
    known = [*table, *other_names]
    for word in words:
        if word.startswith("-") and word.lstrip("-").partition("=")[0] in _ABSL_FLAGS:
            raise UsageError("unknown flag", value=word.partition("=")[0])
    try:
        rest = values(["runner", *words], known_only=known_only)[1:]
    except absl_flags.UnrecognizedFlagError as error:
        raise unknown_flag(error.flagname, known, table) from None
    except absl_flags.Error:  # absl raises no other error than that of a last flag without value
        word = words[-1]
        name = word.lstrip("-")
        row = table[other_names.get(name, name)].row
        expected = f"{word}={row.metavar or 'VALUE'}"
        raise UsageError("missing value", field=word, expected=expected) from None
    except ValueError as error:  # a value of a negated switch
        raise UsageError(str(error)) from None
    if rest and not known_only and not takes_words:
        raise _unexpected_word(rest[0])
    return given, rest


def unknown_flag(name: str, known: Collection[str], table: Collection[str]) -> UsageError:
    """Return the error about an unknown flag, with near names.

    Of the switches in `table`, the negated form is suggested as well.
    """
    name = name.lstrip("-")
    # Negated names are suggested only for a negated name: --nolist does not help with --lits.
    negated = [f"no{row.name}" for row in FLAGS if row.is_switch and row.name in table]
    valid = [*known, *(negated if name.lower().startswith("no") else ())]
    error = UsageError("unknown flag", value=f"--{name}", hint=PAX_ANSWERS.get(name))
    if error.hint is None and re.fullmatch(r"[A-Z][\w.]*", name):
        error.hint = f"Set a field of the experiment by --fdl.{name}=VALUE"
    elif error.hint is None:
        error.choices = tuple(f"--{each}" for each in valid)
    return error


def _unexpected_word(word: str) -> UsageError:
    names = commands.installed(commands.Command)
    if word in names:
        hint = f"Commands come before all flags: runner {word} [flags]"
        return UsageError("unexpected word", value=word, hint=hint)
    is_mode = word in (*MODES, *commands.installed(commands.Mode))
    return UsageError(
        "unexpected word",
        value=word,
        expected="flags such as --name=value, --name or --noname",
        choices=difflib.get_close_matches(word, names),
        hint=f"Did you mean --mode={word}?" if is_mode else None,
    )


def parse_flags(words: Sequence[str]) -> ParsedFlags:
    """Parse the command line of a run."""
    overrides, others = _take_overrides(words)
    named, _ = read_flags(others, [row for row in FLAGS if row.name == "mode"], known_only=True)
    mode = named.get("mode", "train")
    tool = None if mode in MODES else commands.load_mode(mode)
    own = () if tool is None else tool.flags
    known = {row.name for row in FLAGS}
    if taken := [row.name for row in own if row.name in known]:
        raise UsageError("a tool's mode redefines a flag of the runner", field=f"--{taken[0]}")
    given, _ = read_flags(others, [*FLAGS, *own], other_names=OTHER_NAMES)
    _replace_pax_flags(given)
    if path := given.get("tfds_data_dir"):
        # The field of the experiment has the flag's name, in upper case as all fields.
        overrides.append(Override("tfds_data_dir".upper(), path))
    names = [f.name for f in dataclasses.fields(RunOptions) if f.metadata and f.name in given]
    options = RunOptions(
        **{name: given[name] for name in names},
        extra={row.name: given.get(row.name, row.default) for row in own},
    )
    flags = ParsedFlags(given.get("exp"), mode, tuple(overrides), options, given)
    if not given.get("help") and not given.get("list"):
        _check_together(flags)
        _check_experiment(flags)
        _check_modes(flags, tool)
    return dataclasses.replace(flags, overrides=check_consistent(overrides))


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


def _replace_pax_flags(given: dict[str, Any]) -> None:
    """Replace Pax's flags about several processes by the runner's."""
    if "num_hosts" in given and given.get("mode", "train") in JOINING_MODES:
        hosts = given.pop("num_hosts")
        if given.setdefault("num_processes", hosts) != hosts:
            _contradict(f"--num_hosts={hosts}", f"--num_processes={given['num_processes']}")
    if given.get("multiprocess_gpu"):
        given.setdefault("coordinator_address", AUTO_ADDRESS)


def _contradict(*flags: str) -> None:
    raise UsageError("contradictory flags", field=" and ".join(flags), expected="one of them")


def _check_experiment(flags: ParsedFlags) -> None:
    """Raise UsageError unless the flags name an experiment, or a folder that records one."""
    folder, begin = flags.options.job_log_dir, flags.options.init_from
    if flags.mode == "generate" and not flags.only_prints:
        if folder and begin:
            _contradict("--job_log_dir", "--init_from")
        if not (folder or begin):
            raise UsageError(
                "missing flag",
                field="--job_log_dir",
                expected="the folder of a job, or --init_from with a Hugging Face folder",
            )
        return
    # A folder names the experiment that was trained there, but not what to train next.
    has_record = folder and (flags.mode != "train" or flags.only_prints)
    if not flags.exp and not has_record:
        or_folder = "" if flags.mode == "train" else ", or the --job_log_dir of a job that ran it"
        recorded = read_recorded_config(folder) if folder else None
        raise UsageError(
            "missing flag",
            field="--exp",
            expected=f"the name of an experiment{or_folder}",
            hint="`runner --list` prints all."
            if recorded is None
            else f"{folder} was written by --exp={recorded.experiment!r}.",
        )


def _check_modes(flags: ParsedFlags, tool: commands.Mode | None) -> None:
    """Raise UsageError if a flag has no meaning in the mode."""
    what, used = flags.options.inspect, () if tool is None else tool.uses
    for row in FLAGS:
        if row.name not in flags.values or row.name in used:
            continue
        # A configuration is printed from the command that would run it, as JSON too.
        is_printed = flags.only_prints and row.name == "json"
        if row.modes and flags.mode not in row.modes and not is_printed:
            raise UsageError(
                f"not a flag of --mode={flags.mode}",
                field=f"--{row.name}",
                expected=f"--mode={_either(row.modes)}",
            )
        apt = [inspected for inspected, names in INSPECTED.items() if row.name in names]
        if flags.mode == "inspect" and apt and what not in apt and not flags.only_prints:
            raise UsageError(
                f"not a flag of --inspect={what}",
                field=f"--{row.name}",
                expected=f"--inspect={_either(apt)}",
            )


def _either(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _check_together(flags: ParsedFlags) -> None:
    """Check flags against each other; `distributed.launchers` checks the environment, too."""
    given, options = flags.values, flags.options
    for name, other in _NEEDS.items():
        if name in given and other not in given:
            raise UsageError(field=f"--{name}", expected=f"--{other} with it")
    for name, other in _CONTRADICTIONS:
        if given.get(name) and given.get(other):
            _contradict(f"--{name}", f"--{other}")
    if options.bakes_weights and options.export_format != "stablehlo":
        raise UsageError(field="--bakes_weights", expected="--export_format=stablehlo with it")
    steps = options.restore_checkpoint_step or ()
    if len(steps) > 1 and flags.mode not in ONCE_MODES:
        raise UsageError(
            field="--restore_checkpoint_step",
            value=",".join(map(str, steps)),
            expected=f"one step in --mode={flags.mode}",
            hint=f"The modes {' and '.join(ONCE_MODES)} take several.",
        )
    if options.exit_after_ondemand_checkpoint and not options.enable_checkpoint_saving:
        _contradict("--exit_after_ondemand_checkpoint", "--noenable_checkpoint_saving")
    count, index = options.num_processes, options.process_id
    if count is not None and index is not None and index >= count:
        expected = f"0 to {count - 1}, since --num_processes={count}"
        raise UsageError(field="--process_id", value=index, expected=expected)


def check_folder(flags: ParsedFlags) -> None:
    """Check that a mode that writes has a folder to write to, and --init_from one to read.

    Separate from `parse_flags`, so that a misspelled experiment is reported first.
    """
    folder, begin = flags.options.job_log_dir, flags.options.init_from
    if flags.mode == "generate":
        return
    if flags.mode in MODES and folder is None and not flags.only_prints:
        expected = f"a folder to write to, which --mode={flags.mode} needs"
        raise UsageError("missing flag", field="--job_log_dir", expected=expected)
    if folder is None or begin is None or "://" in begin or "://" in folder or flags.only_prints:
        return
    has_begun = os.path.isdir(os.path.join(os.path.expanduser(folder), "checkpoints"))
    if not has_begun and not os.path.isdir(os.path.expanduser(begin)):
        raise UsageError(
            field="--init_from",
            value=begin,
            expected="a folder",
            choices=near_folders(begin),
            hint=hub_hint(begin),
        )


def configure_library_logs(options: RunOptions) -> None:
    """Give absl the flags about log messages of libraries, such as Orbax, if any is set.

    Lines of the runner itself do not pass through absl.
    """
    values = {name: getattr(options, name) for name in _LOG_FLAGS}
    given = {name: value for name, value in values.items() if value != getattr(RunOptions, name)}
    if not given:
        return
    # Imported late, because it replaces the class of Python's loggers.
    from absl import logging

    for name, value in given.items():
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
