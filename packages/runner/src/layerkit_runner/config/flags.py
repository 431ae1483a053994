"""The flags of `runner`: from one table the command line is parsed and its help written.

`--name=value`, `--name value`, and for switches `--name`, `--noname`, `--name=True`. (absl.flags
takes the same forms, but its errors cannot be made to say what a mistake here should hear: the
nearest name, a dash for an underscore, two values that contradict each other.)
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from layerkit.near_names import near_names
from layerkit_runner.config.flag_table import (
    AUTO_ADDRESS,
    COMMAND_FLAGS,
    COMMANDS,
    FLAGS,
    INSPECTED,
    JOINING_MODES,
    MODES,
    ONCE_MODES,
    OTHER_NAMES,
    PAX_ANSWERS,
    Flag,
    RunOptions,
)
from layerkit_runner.config.overrides import Override, check_consistent, parse_override
from layerkit_runner.errors import UsageError

__all__ = [
    "AUTO_ADDRESS",
    "FLAGS",
    "MODES",
    "ParsedFlags",
    "RunOptions",
    "check_folder",
    "help_text",
    "parse_flags",
]

_BY_NAME = {flag.name: flag for flag in FLAGS}

_OVERRIDE_PREFIX = "fdl."
_BARE_WORD = "; flags are written --name=value, and switches --name or --noname."


@dataclasses.dataclass(frozen=True)
class ParsedFlags:
    """A command line that makes sense as far as the flags alone can tell."""

    exp: str | None
    mode: str
    list: bool
    help: bool
    overrides: tuple[Override, ...]
    options: RunOptions
    # One of COMMANDS, which needs no experiment.
    command: str | None = None
    print_config: bool = False
    diff_config: str | None = None
    # What the experiments of `list` must have, all of them.
    tags: tuple[str, ...] = ()
    # Whether `list` prints all columns in full.
    wide: bool = False
    # The flags that were given, by name, with what they were understood as.
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def only_prints(self) -> bool:
        """Whether the configuration is looked at instead of what the mode does."""
        return self.print_config or self.diff_config is not None

    @property
    def reduced(self) -> bool:
        """Whether the experiment's `reduced_fields` are set."""
        return bool(self.given.get("reduced"))


def parse_flags(arguments: Sequence[str]) -> ParsedFlags:
    """Reads the command line, without the program's name.

    Raises:
      UsageError: a flag that does not exist, a value that does not fit, or two that contradict.
    """
    given: dict[str, Any] = {}
    overrides: list[Override] = []
    words = list(arguments)
    command = words.pop(0) if words and words[0] in COMMANDS else None
    while words:
        name, text = _take(words)
        if name.startswith(_OVERRIDE_PREFIX):
            path = name.removeprefix(_OVERRIDE_PREFIX)
            overrides.append(parse_override(path, _required(name, text, words)))
            continue
        flag, value = _read(OTHER_NAMES.get(name, name), text, words)
        if flag.repeats:
            given[flag.name] = (*given.get(flag.name, ()), value)
        elif given.setdefault(flag.name, value) != value:
            raise UsageError(
                f"--{flag.name} is given twice, with {given[flag.name]!r} and {value!r}."
            )
    _understand_pax(given)
    if "tfds_data_dir" in given:
        overrides.append(Override("TFDS_DATA_DIR", given["tfds_data_dir"]))
    values = {flag.name: given.get(flag.name, flag.default) for flag in FLAGS}
    if command is not None:
        _check_command(command, given, overrides)
    elif not values["help"] and not values["list"]:
        _check_together(given, values)
    options = {field.name: values[field.name] for field in dataclasses.fields(RunOptions)}
    return ParsedFlags(
        exp=values["exp"] or values["fdl_config"],
        mode=values["mode"],
        list=values["list"],
        help=values["help"],
        overrides=check_consistent(overrides),
        options=RunOptions(**options),
        command=command,
        print_config=values["print_config"],
        diff_config=values["diff_config"],
        tags=values["tag"] or (),
        wide=values["wide"],
        given=given,
    )


def _understand_pax(given: dict[str, Any]) -> None:
    """Pax's way to say several processes, in our flags."""
    if "num_hosts" in given and given.get("mode", "train") in JOINING_MODES:
        hosts = given.pop("num_hosts")
        if given.setdefault("num_processes", hosts) != hosts:
            raise UsageError(
                f"--num_hosts={hosts} and --num_processes={given['num_processes']} are the same"
                " flag here; keep one."
            )
    if given.get("multiprocess_gpu"):
        given.setdefault("coordinator_address", AUTO_ADDRESS)


def _take(words: list[str]) -> tuple[str, str | None]:
    """Takes the next flag off `words`: its name, and its value where that follows a `=`."""
    word = words.pop(0)
    if word == "-h":
        return "help", None
    if word in COMMANDS:
        raise UsageError(f"`{word}` comes before all flags: runner {word} …")
    if not word.startswith("--") or word == "--":
        command = near_names(word, COMMANDS)
        hint = command if command != "." else near_names(word, MODES, prefix="--mode=")
        raise UsageError(f"unexpected argument {word!r}{hint if hint != '.' else _BARE_WORD}")
    name, equals, text = word[2:].partition("=")
    return name, text if equals else None


def _required(name: str, text: str | None, words: list[str]) -> str:
    if text is None:
        if not words or words[0].startswith("--"):
            raise UsageError(f"--{name} needs a value: --{name}=…")
        text = words.pop(0)
    return text


def _read(name: str, text: str | None, words: list[str]) -> tuple[Flag, Any]:
    negated = _BY_NAME.get(name.removeprefix("no")) if name.startswith("no") else None
    if name not in _BY_NAME and negated is not None and negated.kind is bool and text is None:
        return negated, False
    flag = _BY_NAME.get(name)
    if flag is None:
        raise UsageError(_unknown_flag(name))
    if flag.kind is bool:
        return flag, True if text is None else _parse_switch(flag, text)
    text = _required(name, text, words)
    if not text:
        raise UsageError(f"--{name} is empty; expected {flag.metavar}.")
    return flag, _parse_value(flag, text)


def _unknown_flag(name: str) -> str:
    if name.replace(".", "").replace("_", "").isalnum() and name.partition(".")[0].isupper():
        return f"there is no flag --{name}; experiment fields are set by --fdl.{name}=…"
    # The negated names only where one was meant: --nolist is no help to who wrote --lits.
    switches = [f"no{flag.name}" for flag in FLAGS if flag.kind is bool]
    valid = [*_BY_NAME, *(switches if name.lower().startswith("no") else ())]
    if name in PAX_ANSWERS:
        return f"there is no flag --{name}: {PAX_ANSWERS[name]}."
    return f"there is no flag --{name}{near_names(name, valid, prefix='--')}"


def _parse_switch(flag: Flag, text: str) -> bool:
    switch = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if switch is None:
        raise UsageError(f"--{flag.name} is True or False, not {text!r}.")
    return switch


def _parse_value(flag: Flag, text: str) -> Any:
    if flag.may_be_off:
        if text.lower() == "off":
            return None
        if not text.isdecimal() or int(text) == 0:
            raise UsageError(f"--{flag.name} is a whole number above 0, or off, not {text!r}.")
    if flag.kind is float:
        return _parse_positive(flag, text)
    if flag.kind is int:
        return _parse_whole(flag, text)
    if flag.kind is tuple:
        # One that is named twice is read once.
        return tuple(dict.fromkeys(_parse_whole(flag, part) for part in text.split(",")))
    if flag.choices and text not in flag.choices:
        raise UsageError(
            f"--{flag.name} has no value {text!r}{near_names(text, flag.choices)}"
            f" It is one of {', '.join(flag.choices)}."
        )
    return text


def _parse_whole(flag: Flag, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        several = ", or several with commas between" if flag.kind is tuple else ""
        raise UsageError(f"--{flag.name} is a whole number{several}, not {text!r}.") from None
    if value < 0:
        raise UsageError(f"--{flag.name} is not negative, so not {value}.")
    return value


def _parse_positive(flag: Flag, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"--{flag.name} is a number above 0, not {text!r}.")
    return value


def _check_together(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    if "tag" in given:
        raise UsageError(f"--tag={given['tag'][0]} chooses among what --list shows; add --list.")
    if "wide" in given:
        raise UsageError("--wide is of what --list shows; add --list.")
    exp, alias, mode = given.get("exp"), given.get("fdl_config"), values["mode"]
    if exp and alias and exp != alias:
        raise UsageError(f"--exp={exp} and --fdl_config={alias} are the same flag; keep one.")
    is_looked_at = values["print_config"] or values["diff_config"] is not None
    # A folder names the experiment that was trained there, but not what to train next.
    has_record = given.get("job_log_dir") and (mode != "train" or is_looked_at)
    if not exp and not alias and not has_record:
        or_folder = "" if mode == "train" else " Or give the --job_log_dir of a job that ran it."
        raise UsageError(f"which experiment? Say --exp=NAME; `runner --list` shows all.{or_folder}")
    for name in given:
        modes = _BY_NAME[name].modes
        # A configuration is printed from the command that would run it, as JSON too.
        if mode not in modes and not (is_looked_at and name == "json"):
            *others, last = modes
            belongs = f"{', '.join(others)} or {last}" if others else last
            raise UsageError(f"--{name} belongs to --mode={belongs}, and the mode is {mode}.")
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
    if values["jax_profiler_port"] == 0:
        raise UsageError("--jax_profiler_port=0: nobody would know which; say one from 1 on.")
    _check_inspect(given, values)
    _check_init_from(values)
    _check_processes(values)
    _check_study(given)


def _check_command(command: str, given: Mapping[str, Any], overrides: Sequence[Override]) -> None:
    takes = COMMAND_FLAGS[command]
    wrong = [f"--{name}" for name in given if name not in takes] + list(map(str, overrides))
    if wrong:
        raise UsageError(
            f"`runner {command}` takes {', '.join(f'--{name}' for name in takes)}, not {wrong[0]}."
        )


def _check_inspect(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    if values["print_config"] and values["diff_config"] is not None:
        raise UsageError("--print_config prints one configuration, --diff_config compares two.")
    what = values["inspect"]
    if values["mode"] != "inspect" or values["print_config"] or values["diff_config"] is not None:
        return
    for name in ("num_batches", "num_hosts", "num_devices", "json"):
        if name in given and name not in INSPECTED[what]:
            belongs = " or ".join(shown for shown, flags in INSPECTED.items() if name in flags)
            raise UsageError(f"--{name} belongs to --inspect={belongs}, and this is {what}.")


def _check_init_from(values: Mapping[str, Any]) -> None:
    folder, draw = values["init_from"], values["init_draw"]
    if folder is not None and values["restore_checkpoint_dir"] is not None:
        raise UsageError(
            "--init_from begins a new run with the weights of a folder, --restore_checkpoint_dir"
            " goes on with the whole state of another; keep one."
        )
    if draw is None:
        return
    if folder is None:
        raise UsageError("--init_draw says what --init_from leaves out; give --init_from=DIR too.")
    try:
        re.compile(draw)
    except re.error as error:
        raise UsageError(f"--init_draw={draw} is not a regular expression: {error}.") from None


def _check_study(given: Mapping[str, Any]) -> None:
    for name in ("num_trials", "study_storage"):
        if name in given and "study" not in given:
            raise UsageError(f"--{name} is of a study; give --study=FILE too.")
    if given.get("num_trials") == 0:
        raise UsageError("--num_trials=0: a study has at least 1 trial.")


def _check_processes(values: Mapping[str, Any]) -> None:
    """As far as the flags tell; `launchers.check_processes` knows the environment."""
    address, count, index = (
        values[name] for name in ("coordinator_address", "num_processes", "process_id")
    )
    if address not in (None, AUTO_ADDRESS) and not re.fullmatch(r".+:\d+", address):
        raise UsageError(f"--coordinator_address={address}; expected HOST:PORT, or {AUTO_ADDRESS}.")
    if count == 0:
        raise UsageError("--num_processes=0: a job has at least 1 process.")
    if count is not None and index is not None and index >= count:
        raise UsageError(
            f"--process_id={index} with --num_processes={count}: they are counted from 0 to"
            f" {count - 1}."
        )


def check_folder(flags: ParsedFlags) -> None:
    """Whether there is a folder to write to, where the mode writes.

    Apart from `parse_flags`, so that a misspelt experiment is heard of first.

    Raises:
      UsageError: there is none, or none to begin a new run from.
    """
    folder, begin = flags.options.job_log_dir, flags.options.init_from
    if flags.mode not in ("plan", "inspect") and folder is None:
        raise UsageError(f"--mode={flags.mode} needs a folder to write to: --job_log_dir=DIR")
    if folder is None or begin is None or "://" in begin or "://" in folder:
        return
    path = os.path.abspath(os.path.expanduser(begin))
    has_begun = os.path.isdir(os.path.join(os.path.expanduser(folder), "checkpoints"))
    if not has_begun and not os.path.isdir(path):
        parent, name = os.path.split(path)
        beside = os.listdir(parent) if os.path.isdir(parent) else []
        raise UsageError(f"--init_from={begin}: there is no such folder{near_names(name, beside)}")


def help_text() -> str:
    """What `--help` prints."""
    rows = [(_usage(flag), _explained(flag)) for flag in FLAGS]
    rows.insert(
        2, ("--fdl.NAME=VALUE", "set a field of the experiment, or by its path any deeper one")
    )
    return "\n".join(
        [
            "runner trains, evaluates and inspects experiments.",
            "",
            "  runner --exp=lm.quickstart.LocalText --job_log_dir=DIR",
            "  runner --exp=lm.pile.Pile126M --fdl.NUM_LAYERS=2 --mode=inspect",
            "  runner --exp=lm.pile.Pile126M --fdl.task.model.lm_tpl.num_layers=2 --mode=plan",
            "  runner --list",
            "  runner doctor",
            "",
            "Modes:",
            *_table(list(MODES.items())),
            "",
            "Commands:",
            *_table(list(COMMANDS.items())),
            "",
            "Flags:",
            *_table(rows),
            "",
            "VALUE is a Python literal; bare words are strings: 4, 1e-3, [1,4,1], None, bfloat16.",
            "Exit codes: 0 done, 2 wrong command line or fields, 130 stopped by Ctrl-C, 143 by",
            "SIGTERM, 129 by SIGHUP; a training run that is stopped saves first and can resume.",
            "SIGUSR1 makes it save and continue. 1: a checkpoint could not be written. 70:",
            "nothing moved for --hung_step_timeout_secs. 75: another process of the job was lost.",
            "65: too many training steps in a row, or the weights, were not finite.",
        ]
    )


def _usage(flag: Flag) -> str:
    return f"--[no]{flag.name}" if flag.kind is bool and flag.default else _plain_usage(flag)


def _plain_usage(flag: Flag) -> str:
    return f"--{flag.name}" if flag.kind is bool else f"--{flag.name}={flag.metavar}"


def _explained(flag: Flag) -> str:
    text = flag.help
    if len(flag.modes) < len(MODES):
        text = f"{', '.join(flag.modes)}: {text}"
    if flag.default is not None and flag.default is not False:
        text += f" (default {flag.default})"
    return text


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(left) for left, _ in rows)
    lines = []
    for left, right in rows:
        first, *others = textwrap.wrap(right, 96 - width) or [""]
        lines.append(f"  {left:<{width}}  {first}".rstrip())
        lines.extend(f"  {'':<{width}}  {other}" for other in others)
    return lines
