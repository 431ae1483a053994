"""The text of `runner --help`, `runner --help MODE` and `runner --help all`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layerkit_runner.config import flags as command_flags
from layerkit_runner.config.flags import read_flags
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import FLAGS, MODES, Flag

# Flags that `runner --help` alone shows.
_MOST_USED = (
    *("exp", "fdl.NAME", "reduced", "mode", "job_log_dir"),
    *("init_from", "restore_checkpoint_step", "print_config", "list"),
)
_ROWS = {
    **{row.name: row for row in FLAGS},
    "fdl.NAME": Flag(
        "fdl.NAME",
        str,
        "a field of the experiment, or a deeper path; for example task.model.lm_tpl.num_layers."
        " VALUE is a Python literal in which bare words are strings: 4, 1e-3, [1,4,1], None,"
        " bfloat16",
        "VALUE",
    ),
}
_EXIT_CODES = """\
Exit codes: 0 done; 1 a write failed, or out of memory; 2 wrong command line or
fields; 65 training was not finite; 70 no progress for --hung_step_timeout_secs;
74 data could not be read; 75 another process was lost; 129, 130, 143 stopped by
SIGHUP, Ctrl-C, SIGTERM.
Stopped training saves first and can resume. SIGUSR1 saves and continues."""
_OVERVIEW = """\
runner --exp=NAME --job_log_dir=DIR     train; the same command resumes
runner --exp=NAME --mode=MODE [flags]   evaluate, decode, inspect or plan
runner COMMAND [flags]                  {commands}

{flags}

`runner --help all` lists all flags, `runner --help MODE` those of a mode:
  {modes}"""
ALL = "all"
HELP = Flag("help", bool, "print these flags")
"""The flag of all tools."""


def help_text(topic: str | None = None) -> str:
    """Return what `--help` prints about a mode, or `all`; None for the most used flags."""
    tools, words = (
        command_flags.installed_tools(command_flags.Mode),
        command_flags.installed_tools(command_flags.Command),
    )
    broken = [
        f"  {name}: cannot be loaded: {what}" for name, what in command_flags.broken_tools().items()
    ]
    modes = {**MODES, **{name: mode.help for name, mode in tools.items()}}
    if topic is None:
        rows = (_ROWS[name] for name in _MOST_USED)
        flags = [(_usage(row), row.help.replace(". ", "; ").partition("; ")[0]) for row in rows]
        overview = _OVERVIEW.format(
            commands=", ".join(words),
            flags="\n".join(table(flags, width=80)),
            modes=", ".join(modes),
        )
        return "\n".join([overview, *broken])
    if topic == ALL:
        described = {**modes, **{f"runner {name}": word.help for name, word in words.items()}}
        pages = [table([*described.items()]), table(flag_rows(_ROWS.values()))]
        return "\n".join([*pages[0], "", *pages[1], "", _EXIT_CODES, *broken])
    if topic in modes:
        return _mode_page(topic, modes[topic], tools.get(topic))
    if topic in words:
        return f"{words[topic].help}\n\n`runner {topic} --help` lists its flags."
    if topic in command_flags.entry_points():
        command_flags.load_tool(command_flags.Mode, topic, shown=f"--help {topic}")
    raise UsageError(field="--help", value=topic, choices=(ALL, *modes, *words))


def _mode_page(name: str, summary: str, tool: command_flags.Mode | None) -> str:
    flags = [row for row in FLAGS if name in row.modes or (tool and row.name in tool.uses)]
    flags += tool.flags if tool else ()
    rows = [(_usage(row), _explained(row, names_modes=False)) for row in flags]
    common = [row.name for row in FLAGS if not row.modes and row.name not in ("mode", "help")]
    also = f"Flags of every mode: --fdl.NAME, {', '.join(f'--{name}' for name in common)}"
    wrapped = textwrap.wrap(also, 80, break_on_hyphens=False)
    return "\n".join(
        [f"runner --exp=NAME --mode={name} [flags]", "", summary, "", *table(rows), "", *wrapped]
    )


def read_command(
    words: Sequence[str], tables: Mapping[str, Sequence[Flag]], *, kind: str, page: str
) -> tuple[str, dict[str, Any], list[str]] | None:
    """Read the words of a tool whose first word selects the table of flags.

    Args:
      words: Words after the program's name.
      tables: Flags by first word, without `help`.
      kind: What the first word names, for error messages.
      page: Text that `--help` prints.

    Returns:
      (first word, values of all flags by name, other words), or None if help was printed.
    """
    name, *rest = words or [""]
    if name in ("--help", "-h"):
        print(page)
        return None
    if name not in tables:
        raise UsageError(f"unknown {kind}", value=name, choices=tables)
    read = read_words(rest, tables[name], page=page)
    return None if read is None else (name, *read)


def read_words(
    words: Sequence[str], rows: Sequence[Flag], *, page: str, takes_words: bool = True
) -> tuple[dict[str, Any], list[str]] | None:
    """Read the words of a tool with a table of flags; `--help` prints the page and the table.

    Returns:
      (values of all flags by name, other words), or None if help was printed.
    """
    values, others = read_flags(words, (*rows, HELP), takes_words=takes_words)
    if values.pop("help", False):
        print("\n".join([page.rstrip(), "", *table(flag_rows((*rows, HELP)))]))
        return None
    return {row.name: row.default for row in rows} | values, others


def flag_rows(rows: Iterable[Flag]) -> list[tuple[str, str]]:
    """Return the two columns of flags in `--help`, for `table`."""
    return [(_usage(row), _explained(row)) for row in rows]


def table(rows: Sequence[tuple[str, str]], *, width: int = 100) -> list[str]:
    """Return lines of two columns; the right one is wrapped at the width of the lines."""
    left_width = max((len(left) for left, _ in rows), default=0)
    lines = []
    for left, right in rows:
        first, *others = textwrap.wrap(right, width - 4 - left_width) or [""]
        lines.append(f"  {left:<{left_width}}  {first}".rstrip())
        lines.extend(f"  {'':<{left_width}}  {other}" for other in others)
    return lines


def _usage(row: Flag) -> str:
    if row.is_switch:
        return f"--[no]{row.name}" if row.default else f"--{row.name}"
    return f"--{row.name}={row.metavar}"


def _explained(row: Flag, *, names_modes: bool = True) -> str:
    # Flags of many modes are listed by `--help MODE`.
    notes = [", ".join(row.modes)] if names_modes and len(row.modes) in (1, 2) else []
    if row.default is not None and not row.is_switch:
        notes.append(f"default {row.default}")
    return f"{row.help} ({'; '.join(notes)})" if notes else row.help
