"""The flags of `runner`: one table, from which the command line is parsed and its help written.

`--name=value`, `--name value`, and for switches `--name`, `--noname`, `--name=True`. (absl.flags
takes the same forms, but its errors cannot be made to say what a mistake here should hear: the
nearest name, a dash for an underscore, two values that contradict each other.)
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError
from layerkit_runner.overrides import Override, check_consistent, parse_override


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a run is told besides its experiment; the flags of the same names."""

    # A path on this machine or a store's, such as gs://bucket/run.
    job_log_dir: str | None = None
    enable_checkpoint_saving: bool = True
    restore_checkpoint_dir: str | None = None
    restore_checkpoint_step: int | None = None
    pmap_use_tensorstore: bool = False
    target: str | None = None
    num_devices: int | None = None
    inspect: str = "config"
    num_batches: int = 2
    num_hosts: int = 1
    json: bool = False
    export_dir: str | None = None
    # None: the default folder. "off": no cache.
    jax_compilation_cache: str | None = None
    # None: this process is the whole job. "auto": found out from the cluster.
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


AUTO_ADDRESS = "auto"


MODES = {
    "train": "train; the same command again resumes",
    "eval": "evaluate the newest checkpoint once",
    "decode_once": "decode with the newest checkpoint once",
    "export": "write the newest checkpoint as a Hugging Face folder",
    "plan": "compile the training step without the devices; print memory and traffic",
    "inspect": "print the configuration, every override applied, or what the inputs feed; writes"
    " nothing",
}
# Modes that Pax has and this runner does not have yet, each with what to do meanwhile.
_LATER_MODES = {
    "decode": "continuous decoding is not available yet; --mode=decode_once decodes the newest "
    "checkpoint once",
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A row of the table."""

    name: str
    # One of str, int, bool.
    kind: type
    help: str
    default: Any = None
    # What the value is, for the help.
    metavar: str = ""
    choices: tuple[str, ...] = ()
    # The modes in which it means anything.
    modes: tuple[str, ...] = tuple(MODES)


def _option(name: str, kind: type, text: str, **more: Any) -> Flag:
    return Flag(name, kind, text, default=getattr(RunOptions, name), **more)


_JOINING_MODES = ("train", "eval", "decode_once")
_READING_MODES = ("train", "eval", "decode_once", "export")

FLAGS = (
    Flag("exp", str, "the experiment, such as lm.quickstart.LocalText; see --list", metavar="NAME"),
    Flag("fdl_config", str, "the same as --exp", metavar="NAME"),
    _option("job_log_dir", str, "folder for everything the run writes", metavar="DIR"),
    Flag(
        "mode", str, "what to do, see above", default="train", metavar="MODE", choices=tuple(MODES)
    ),
    _option("enable_checkpoint_saving", bool, "whether to save checkpoints", modes=("train",)),
    _option(
        "restore_checkpoint_dir",
        str,
        "start from the checkpoints of this folder",
        metavar="DIR",
        modes=_READING_MODES,
    ),
    _option(
        "restore_checkpoint_step",
        int,
        "start from this step, not the newest",
        metavar="STEP",
        modes=_READING_MODES,
    ),
    _option(
        "pmap_use_tensorstore",
        bool,
        "save pmap runs one entry per parameter, not as one file; reading finds out by itself",
        modes=("train", "eval", "decode_once"),
    ),
    _option("target", str, "the devices to plan for", metavar="TARGET", modes=("plan",)),
    _option("num_devices", int, "how many of them", metavar="N", modes=("plan", "inspect")),
    _option(
        "inspect",
        str,
        "config or batches: the configuration, or a few batches of each input",
        metavar="WHAT",
        choices=("config", "batches"),
        modes=("inspect",),
    ),
    _option("num_batches", int, "batches of each input", metavar="N", modes=("inspect",)),
    _option(
        "num_hosts", int, "hosts among which inputs are split", metavar="N", modes=("inspect",)
    ),
    _option("json", bool, "print the plan as JSON", modes=("plan",)),
    _option("export_dir", str, "the folder to write", metavar="DIR", modes=("export",)),
    _option("jax_compilation_cache", str, "folder for compiled programs, or off", metavar="DIR"),
    _option(
        "coordinator_address",
        str,
        "host:port where the processes of a job meet, at process 0; or auto, on a cluster",
        metavar="ADDRESS",
        modes=_JOINING_MODES,
    ),
    _option(
        "num_processes", int, "how many processes the job has", metavar="N", modes=_JOINING_MODES
    ),
    _option("process_id", int, "which of them this is, from 0", metavar="I", modes=_JOINING_MODES),
    Flag("list", bool, "print every experiment and leave", default=False),
    Flag("help", bool, "print this and leave", default=False),
)
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


def parse_flags(arguments: Sequence[str]) -> ParsedFlags:
    """Reads the command line, without the program's name.

    Raises:
      UsageError: a flag that does not exist, a value that does not fit, or two that contradict.
    """
    given: dict[str, Any] = {}
    overrides: list[Override] = []
    words = list(arguments)
    while words:
        name, text = _take(words)
        if name.startswith(_OVERRIDE_PREFIX):
            path = name.removeprefix(_OVERRIDE_PREFIX)
            overrides.append(parse_override(path, _required(name, text, words)))
            continue
        flag, value = _read(name, text, words)
        if given.setdefault(flag.name, value) != value:
            raise UsageError(
                f"--{flag.name} is given twice, with {given[flag.name]!r} and {value!r}."
            )
    values = {flag.name: given.get(flag.name, flag.default) for flag in FLAGS}
    if not values["help"] and not values["list"]:
        _check_together(given, values)
    options = {field.name: values[field.name] for field in dataclasses.fields(RunOptions)}
    return ParsedFlags(
        exp=values["exp"] or values["fdl_config"],
        mode=values["mode"],
        list=values["list"],
        help=values["help"],
        overrides=check_consistent(overrides),
        options=RunOptions(**options),
    )


def _take(words: list[str]) -> tuple[str, str | None]:
    """Takes the next flag off `words`: its name, and its value where that follows a `=`."""
    word = words.pop(0)
    if word == "-h":
        return "help", None
    if not word.startswith("--") or word == "--":
        hint = near_names(word, MODES, prefix="--mode=")
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
    return f"there is no flag --{name}{near_names(name, valid, prefix='--')}"


def _parse_switch(flag: Flag, text: str) -> bool:
    switch = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if switch is None:
        raise UsageError(f"--{flag.name} is True or False, not {text!r}.")
    return switch


def _parse_value(flag: Flag, text: str) -> Any:
    if flag.kind is int:
        try:
            value = int(text)
        except ValueError:
            raise UsageError(f"--{flag.name} is a whole number, not {text!r}.") from None
        if value < 0:
            raise UsageError(f"--{flag.name} is not negative, so not {value}.")
        return value
    if flag.name == "mode" and text in _LATER_MODES:
        raise UsageError(f"--mode={text}: {_LATER_MODES[text]}.")
    if flag.choices and text not in flag.choices:
        raise UsageError(
            f"--{flag.name} has no value {text!r}{near_names(text, flag.choices)}"
            f" It is one of {', '.join(flag.choices)}."
        )
    return text


def _check_together(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    exp, alias, mode = given.get("exp"), given.get("fdl_config"), values["mode"]
    if exp and alias and exp != alias:
        raise UsageError(f"--exp={exp} and --fdl_config={alias} are the same flag; keep one.")
    if not exp and not alias:
        raise UsageError("which experiment? Say --exp=NAME; `runner --list` shows all.")
    for name in given:
        modes = _BY_NAME[name].modes
        if mode not in modes:
            *others, last = modes
            belongs = f"{', '.join(others)} or {last}" if others else last
            raise UsageError(f"--{name} belongs to --mode={belongs}, and the mode is {mode}.")
    _check_processes(values)


def _check_processes(values: Mapping[str, Any]) -> None:
    address, count, index = (
        values[name] for name in ("coordinator_address", "num_processes", "process_id")
    )
    if address is None and count is None and index is None:
        return
    if address is None or (address != AUTO_ADDRESS and (count is None or index is None)):
        raise UsageError(
            "the processes of a job need --coordinator_address=HOST:PORT, --num_processes=N and"
            " --process_id=I, or --coordinator_address=auto on a cluster that JAX knows."
        )
    if address != AUTO_ADDRESS and not re.fullmatch(r".+:\d+", address):
        raise UsageError(f"--coordinator_address={address}; expected HOST:PORT, or {AUTO_ADDRESS}.")
    if count is not None and index is not None and index >= count:
        raise UsageError(
            f"--process_id={index} with --num_processes={count}: they are counted from 0 to"
            f" {count - 1}."
        )


def check_folder(flags: ParsedFlags) -> None:
    """Whether there is a folder to write to, where the mode writes.

    Apart from `parse_flags`, so that a misspelt experiment is heard of first.

    Raises:
      UsageError: there is none.
    """
    if flags.mode not in ("plan", "inspect") and flags.options.job_log_dir is None:
        raise UsageError(f"--mode={flags.mode} needs a folder to write to: --job_log_dir=DIR")


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
            "",
            "Modes:",
            *_table(list(MODES.items())),
            "",
            "Flags:",
            *_table(rows),
            "",
            "VALUE is a Python literal; bare words are strings: 4, 1e-3, [1,4,1], None, bfloat16.",
            "Exit codes: 0 done, 2 wrong command line or fields, 130 stopped by Ctrl-C and 143 by",
            "SIGTERM; a training run that is stopped saves first, and the same command resumes it.",
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
