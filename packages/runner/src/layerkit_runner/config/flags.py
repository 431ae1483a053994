"""Parse the command line of `runner` from the table of flags, and write `--help`.

absl parses the words, in the forms `--name=value`, `--name value`, and for switches `--name`,
`--noname` and `--name=True`. Each parse has flag values of its own, so that flags which libraries
define through absl do not mix with these. `read_flags` serves tools with tables of their own.
"""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from layerkit.near_names import near_names
from layerkit_runner.config import commands
from layerkit_runner.config.overrides import Override, check_consistent, parse_override
from layerkit_runner.errors import UsageError
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

# Features of absl that read files and hide mistakes; a recorded command line may hold anything.
_NOT_OURS = ("flagfile", "undefok")
# Flags that a printed command leaves out: its writer says where to write, a sweep has its own, some
# differ between the processes of a job, and one answers a single refusal.
_LEFT_OUT = (
    *("job_log_dir", "allow_restart_from_scratch", "study", "num_trials", "study_storage"),
    *("coordinator_address", "num_processes", "process_id", "multiprocess_gpu"),
)
_OWN_NAMES = frozenset(row.name for row in FLAGS)
# Flags without a meaning of their own, each with the one that it adds to.
_NEEDS = {
    **dict.fromkeys(("tag", "wide"), "list"),
    **dict.fromkeys(("num_trials", "study_storage"), "study"),
    "init_draw": "init_from",
}
_CONTRADICTIONS = (("init_from", "restore_checkpoint_dir"), ("print_config", "diff_config"))


@dataclasses.dataclass(frozen=True)
class ParsedFlags:
    """A command line that makes sense as far as the flags alone can tell.

    Attributes:
      exp: Name of the experiment; None where a job's folder names it, or none is needed.
      mode: Value of `--mode`.
      overrides: `--fdl.PATH=TEXT` flags.
      options: Options of the run.
      given: Values of the flags that were given, by name.
    """

    exp: str | None
    mode: str
    overrides: tuple[Override, ...]
    options: RunOptions
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def only_prints(self) -> bool:
        """Whether the configuration is printed or compared, in place of what the mode does."""
        return bool(self.given.get("print_config")) or "diff_config" in self.given


class _Parser(absl_flags.ArgumentParser):
    """Reads a value as a row of the table says."""

    def __init__(self, row: Flag):
        self._row = row

    def parse(self, argument: str) -> Any:
        row = self._row
        # A word that follows a flag without its value is likely the next flag.
        if not argument or (row.read is str and argument.startswith("--")):
            raise ValueError(f"expected {row.metavar or 'a value'}.")
        if row.choices and argument not in row.choices:
            near = near_names(argument, row.choices)
            raise ValueError(f"expected one of {', '.join(row.choices)}{near}")
        return switch(argument) if row.is_switch else row.read(argument)


class _AbslFlag(absl_flags.Flag):
    """A flag that is given once, or always with the same value, or that keeps all its values."""

    def __init__(self, row: Flag, given: dict[str, Any]):
        short = "h" if row.name == "help" else None
        super().__init__(_Parser(row), None, row.name, None, row.help, short, row.is_switch)
        self._repeats = row.repeats
        self._given = given

    def parse(self, argument: str) -> None:
        super().parse(argument)
        earlier = self._given.get(self.name, self.value)
        if self._repeats:
            self._given[self.name] = (*self._given.get(self.name, ()), self.value)
        elif self._given.setdefault(self.name, self.value) != self.value:
            text = f"flag --{self.name} is given twice, with {earlier!r} and {self.value!r}."
            raise absl_flags.IllegalFlagValueError(text)


def read_flags(
    words: Sequence[str],
    rows: Iterable[Flag],
    *,
    other_names: Mapping[str, str] = {},
    known_only: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Read the flags of a table from the words of a command line.

    Args:
      words: Words of the command line.
      rows: Table of flags.
      other_names: Further names of flags, each with the name in the table.
      known_only: Whether words that belong to no flag of the table are returned, in their order;
        otherwise they are errors.

    Returns:
      The values of the flags that are given, by name and in their order, and the remaining words.

    Raises:
      UsageError: A flag is unknown, is given twice with different values, or has a wrong value.
    """
    values = absl_flags.FlagValues()
    values.set_gnu_getopt()
    given: dict[str, Any] = {}
    table = {row.name: _AbslFlag(row, given) for row in rows}
    for name, flag in table.items():
        values[name] = flag
    for name, own in other_names.items():
        values[name] = table[own]
    for word in words:
        if word.lstrip("-").partition("=")[0] in _NOT_OURS and word.startswith("-"):
            raise UsageError(f"there is no flag {word.partition('=')[0]}.")
    try:
        rest = values(["runner", *words], known_only=known_only)[1:]
    except absl_flags.UnrecognizedFlagError as error:
        raise UsageError(unknown_flag(error.flagname, [*table, *other_names], table)) from None
    except (absl_flags.Error, ValueError) as error:
        raise UsageError(str(error).removeprefix("flag ")) from None
    if rest and not known_only:
        raise UsageError(_unexpected(rest[0]))
    return given, rest


def unknown_flag(name: str, known: Collection[str], table: Collection[str]) -> str:
    """Return the message about an unknown flag, with the nearest names."""
    name = name.lstrip("-")
    if name in PAX_ANSWERS:
        return f"there is no flag --{name}: {PAX_ANSWERS[name]}."
    if name.replace(".", "").replace("_", "").isalnum() and name.partition(".")[0].isupper():
        return f"there is no flag --{name}; experiment fields are set by --fdl.{name}=…"
    # Negated names are suggested only where one was meant: --nolist is no help for --lits.
    negated = [f"no{row.name}" for row in FLAGS if row.is_switch and row.name in table]
    valid = [*known, *(negated if name.lower().startswith("no") else ())]
    near = near_names(name, valid, prefix="--")
    # A short table is named as a whole.
    all_of_them = f" Its flags: {', '.join(f'--{one}' for one in known)}." if len(known) < 8 else ""
    return f"there is no flag --{name}{near}{all_of_them}"


def _unexpected(word: str) -> str:
    names = commands.names(commands.Command)
    if word in names:
        return f"`{word}` comes before all flags: runner {word} …"
    modes = [*MODES, *commands.names(commands.Mode)]
    hints = (near_names(word, names), near_names(word, modes, prefix="--mode="))
    otherwise = "; flags are written --name=value, and switches --name or --noname."
    hint = next((hint for hint in hints if hint != "."), otherwise)
    return f"unexpected argument {word!r}{hint}"


def parse_flags(words: Sequence[str]) -> ParsedFlags:
    """Parse the command line of a run.

    Args:
      words: The words after the program's name.

    Raises:
      UsageError: A flag is unknown, has a wrong value, or contradicts another one.
    """
    overrides, others = _take_overrides(words)
    tool = _tool_of(others)
    own = () if tool is None else tool.flags
    given, _ = read_flags(others, [*FLAGS, *own], other_names=OTHER_NAMES)
    _understand_pax(given)
    if path := given.get("tfds_data_dir"):
        # The field of the experiment has the flag's name, in upper case as all fields.
        overrides.append(Override("tfds_data_dir".upper(), path))
    for row in own:
        if row.name in _OWN_NAMES:
            raise UsageError(
                f"--mode={given['mode']} has a flag --{row.name}, which the runner has itself."
            )
    values = {row.name: given.get(row.name, row.default) for row in (*FLAGS, *own)}
    if not given.get("help") and not given.get("list"):
        _check_together(given, values, tool)
    names = [f.name for f in dataclasses.fields(RunOptions) if f.metadata]
    return ParsedFlags(
        exp=values["exp"],
        mode=values["mode"],
        overrides=check_consistent(overrides),
        options=RunOptions(
            **{name: values[name] for name in names},
            extra={row.name: values[row.name] for row in own},
        ),
        given=given,
    )


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
            raise UsageError(f"--fdl.{path} needs a value: --fdl.{path}=…")
        overrides.append(parse_override(path, text))
    return overrides, others


def _tool_of(words: Sequence[str]) -> commands.Mode | None:
    """Return the tool whose mode the words name; None for a mode of the runner itself."""
    named, _ = read_flags(words, [row for row in FLAGS if row.name == "mode"], known_only=True)
    mode = named.get("mode", "train")
    return None if mode in MODES else commands.load_mode(mode)


def _understand_pax(given: dict[str, Any]) -> None:
    """Replace Pax's way to say several processes by the runner's flags."""
    if "num_hosts" in given and given.get("mode", "train") in JOINING_MODES:
        hosts = given.pop("num_hosts")
        if given.setdefault("num_processes", hosts) != hosts:
            raise UsageError(
                f"--num_hosts={hosts} and --num_processes={given['num_processes']} are the same"
                " flag here; keep one."
            )
    if given.get("multiprocess_gpu"):
        given.setdefault("coordinator_address", AUTO_ADDRESS)


def _check_together(
    given: Mapping[str, Any], values: Mapping[str, Any], tool: commands.Mode | None
) -> None:
    """Check flags against each other; `distributed.launchers` knows the environment, too."""
    mode = values["mode"]
    for name, other in _NEEDS.items():
        if name in given and other not in given:
            raise UsageError(f"--{name} needs --{other}.")
    for name, other in _CONTRADICTIONS:
        if given.get(name) and given.get(other):
            raise UsageError(f"--{name} and --{other} contradict each other; keep one.")
    is_looked_at = bool(values["print_config"]) or values["diff_config"] is not None
    # A folder names the experiment that was trained there, but not what to train next.
    has_record = given.get("job_log_dir") and (mode != "train" or is_looked_at)
    if not values["exp"] and not has_record:
        or_folder = "" if mode == "train" else " Or give the --job_log_dir of a job that ran it."
        raise UsageError(f"which experiment? Say --exp=NAME; `runner --list` shows all.{or_folder}")
    for row in FLAGS:
        # A configuration is printed from the command that would run it, as JSON too.
        is_apt = not row.modes or mode in row.modes or (is_looked_at and row.name == "json")
        if row.name in given and not is_apt and row.name not in (tool.uses if tool else ()):
            *others, last = row.modes
            belongs = f"{', '.join(others)} or {last}" if others else last
            raise UsageError(f"--{row.name} belongs to --mode={belongs}, and the mode is {mode}.")
        apt = [what for what, names in INSPECTED.items() if row.name in names]
        if mode == "inspect" and not is_looked_at and row.name in given and apt:
            what = values["inspect"]
            if what not in apt:
                belongs = " or ".join(apt)
                text = f"--{row.name} belongs to --inspect={belongs}, and this is {what}."
                raise UsageError(text)
    steps = values["restore_checkpoint_step"] or ()
    if len(steps) > 1 and mode not in ONCE_MODES:
        raise UsageError(
            f"--restore_checkpoint_step={','.join(map(str, steps))}: --mode={mode} reads one step;"
            f" {' and '.join(ONCE_MODES)} take several."
        )
    if values["exit_after_ondemand_checkpoint"] and not values["enable_checkpoint_saving"]:
        raise UsageError(
            "--exit_after_ondemand_checkpoint leaves after a save, and --noenable_checkpoint_saving"
            " saves nothing; keep one."
        )
    count, index = values["num_processes"], values["process_id"]
    if count is not None and index is not None and index >= count:
        raise UsageError(
            f"--process_id={index} with --num_processes={count}: expected 0 to {count - 1}."
        )


def check_folder(flags: ParsedFlags) -> None:
    """Check that a mode that writes has a folder to write to, and --init_from one to read.

    Separate from `parse_flags`, so that a misspelt experiment is reported first.

    Raises:
      UsageError: A folder is missing.
    """
    folder, begin = flags.options.job_log_dir, flags.options.init_from
    if flags.mode in MODES and folder is None:
        raise UsageError(f"--mode={flags.mode} needs a folder to write to: --job_log_dir=DIR")
    if folder is None or begin is None or "://" in begin or "://" in folder:
        return
    path = os.path.abspath(os.path.expanduser(begin))
    has_begun = os.path.isdir(os.path.join(os.path.expanduser(folder), "checkpoints"))
    if not has_begun and not os.path.isdir(path):
        parent, name = os.path.split(path)
        beside = os.listdir(parent) if os.path.isdir(parent) else []
        raise UsageError(f"--init_from={begin}: there is no such folder{near_names(name, beside)}")


def run_words(options: RunOptions, *, mode: str) -> list[str]:
    """Return flags for the options that have a meaning in a mode and are not at their defaults."""
    rows = {row.name: row for row in FLAGS if not row.modes or mode in row.modes}
    names = [field.name for field in dataclasses.fields(options) if field.name in rows]
    return [
        flag_word(name, getattr(options, name))
        for name in names
        if name not in _LEFT_OUT and getattr(options, name) != rows[name].default
    ]


def flag_word(name: str, value: Any) -> str:
    """Return a flag as one types it: `--name=value`, `--name` or `--noname`."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, tuple):
        return f"--{name}={','.join(map(str, value))}"
    # None is what `off` was read as.
    return f"--{name}={'off' if value is None else value}"


def help_text() -> str:
    """Return what `--help` prints."""
    modes, words = commands.installed(commands.Mode), commands.installed(commands.Command)
    rows = flag_rows(FLAGS)
    rows.insert(1, ("--fdl_config=NAME", "the same as --exp"))
    rows.insert(
        2, ("--fdl.NAME=VALUE", "set a field of the experiment, or by its path any deeper one")
    )
    for mode in modes.values():
        rows += flag_rows(mode.flags)
    return _HELP.format(
        modes="\n".join(table([*MODES.items(), *((n, mode.help) for n, mode in modes.items())])),
        commands="\n".join(table([(name, command.help) for name, command in words.items()])),
        flags="\n".join(table(rows)),
    )


_HELP = """\
runner trains, evaluates and inspects experiments.

  runner --exp=lm.quickstart.LocalText --job_log_dir=DIR
  runner --exp=lm.pile.Pile126M --fdl.NAME=VALUE --mode=inspect
  runner --exp=lm.pile.Pile126M --fdl.task.model.lm_tpl.num_layers=2 --mode=plan
  runner --list
  runner doctor

Modes:
{modes}

Commands:
{commands}

Flags:
{flags}

VALUE is a Python literal; bare words are strings: 4, 1e-3, [1,4,1], None, bfloat16.
Exit codes: 0 done, 2 wrong command line or fields, 130 stopped by Ctrl-C, 143 by
SIGTERM, 129 by SIGHUP; a training run that is stopped saves first and can resume.
SIGUSR1 makes it save and continue. 1: a checkpoint could not be written. 70:
nothing moved for --hung_step_timeout_secs. 75: another process of the job was lost.
65: too many training steps in a row, or the weights, were not finite."""


def flag_rows(rows: Iterable[Flag]) -> list[tuple[str, str]]:
    """Return the two columns of flags in `--help`, for `table`."""
    return [(_usage(row), _explained(row)) for row in rows]


def _usage(row: Flag) -> str:
    if row.is_switch:
        return f"--[no]{row.name}" if row.default else f"--{row.name}"
    return f"--{row.name}={row.metavar}"


def _explained(row: Flag) -> str:
    text = f"{', '.join(row.modes)}: {row.help}" if row.modes else row.help
    is_plain = row.default is None or row.default is False
    return text if is_plain else f"{text} (default {row.default})"


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines of two columns for `--help`; the right one is wrapped."""
    width = max((len(left) for left, _ in rows), default=0)
    lines = []
    for left, right in rows:
        first, *others = textwrap.wrap(right, 96 - width) or [""]
        lines.append(f"  {left:<{width}}  {first}".rstrip())
        lines.extend(f"  {'':<{width}}  {other}" for other in others)
    return lines
