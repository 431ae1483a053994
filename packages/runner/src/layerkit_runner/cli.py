"""The command `runner`: parse the command line, find the experiment, and call a mode or a tool.

Errors are reported as early as possible, and before anything is written: wrong flags and unknown
experiments before JAX is imported, wrong fields and paths before a device is used. Tools are found
by the entry-point group `layerkit.commands`; see `config.flags`.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerkit.errors import UserError
from layerkit_runner.config import flags as command_flags
from layerkit_runner.config.flags import configure_library_logs, parse_flags
from layerkit_runner.config.requests import ParsedFlags
from layerkit_runner.errors import UsageError, exits_as_errors
from layerkit_runner.run_options import MODES

if TYPE_CHECKING:
    from layerkit_runner.config.requests import ResolvedExperiment

_HELP = ("--help", "-h")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except UserError as error:
        print(f"runner: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, UsageError) else UsageError.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Another pipe, such as a connection to another machine, is an error of the run.
        if not _stdout_is_broken():
            raise
        _drop_stdout()
        print("runner: standard output was closed by its reader; stopped.", file=sys.stderr)
        return 1


def _run(words: Sequence[str]) -> int:
    command = _command(words)
    if command is not None:
        _add_current_folder()
        return command.run(words[1:])
    if any(word in _HELP for word in words):
        # The word after --help may be a topic.
        index = next(i for i, word in enumerate(words) if word in _HELP)
        topics = [word for word in words[index + 1 : index + 2] if not word.startswith("-")]
        from layerkit_runner.config.help import help_text

        return _print(help_text(*topics))
    flags = parse_flags(words)
    _add_current_folder()
    if flags.values.get("list"):
        return _print(_listing(flags))
    if flags.mode == "generate" and not flags.only_prints:
        generate = command_flags.load_tool(
            command_flags.FlagCommand, "generate", shown="--mode=generate"
        )
        return generate.run(flags)
    if flags.exp is None and not flags.scores_folder:
        # Imported late, because commands with --exp do not need it.
        from layerkit_runner.config.recorded import add_recorded_experiment

        # Standard output is reserved for requested output, such as JSON.
        flags = add_recorded_experiment(flags, lambda s: print(f"runner: {s}", file=sys.stderr))
    for name in ("diff_config", "study"):
        if name in flags.values and not flags.values.get("print_config"):
            return command_flags.load_tool(command_flags.FlagCommand, name, shown=f"--{name}").run(
                flags
            )
    if flags.mode == "train" and not flags.only_prints:
        from layerkit_runner.distributed.devices import keep_freed_memory

        keep_freed_memory()  # before JAX is imported
    with exits_as_errors():
        resolved = _resolve(flags)
    if flags.values.get("print_config"):
        from layerkit_runner.config.config_tree import printed_config

        # The flags of a run do not apply to --mode=inspect.
        options = None if flags.mode == "inspect" else flags.options
        as_json = flags.options.json
        return _print(printed_config(resolved, options, mode=flags.mode, as_json=as_json))
    configure_library_logs(flags.options)
    if flags.mode not in MODES:
        from layerkit_runner.run.job_errors import naming_paths

        with naming_paths(resolved):
            return command_flags.load_mode(flags.mode).run(resolved, flags.options)
    # Loads JAX, Optax and the rest.
    from layerkit_runner.run.run_mode import run

    return run(flags.mode, resolved, flags.options) or 0


def _command(words: Sequence[str]) -> command_flags.Command | None:
    """Return the command that the first word names; None for a run."""
    if not words or words[0].startswith("-") or words[0] in MODES:
        return None
    name = words[0]
    if name not in command_flags.entry_points():
        names = command_flags.installed_tools(command_flags.Command)
        raise UsageError("unknown command", value=name, choices=names)
    return command_flags.load_tool(command_flags.Command, name, shown=f"`runner {name}`")


def _resolve(flags: ParsedFlags) -> ResolvedExperiment:
    """Return the experiment that the flags name, with all their overrides applied."""
    from layerkit_runner.config.registry import find_experiment

    if flags.scores_folder:
        from layerkit_runner.interface.loading import resolve_folder

        return resolve_folder(flags)
    # A misspelled experiment is reported before anything that takes time is imported.
    find_experiment(flags.exp or "")
    # Imports Fiddle and the experiment.
    from layerkit_runner.run.resolve import resolve_flags

    return resolve_flags(flags)


def _listing(flags: ParsedFlags) -> str:
    from layerkit_runner.config.registry import catalogue_json, catalogue_text, list_experiments

    tags = flags.values.get("tag", ())
    entries = list_experiments(tags=tags)
    if not tags:
        entries = [entry for entry in entries if not entry.is_hidden]
    if flags.options.json:
        return json.dumps(catalogue_json(entries))
    if not entries and tags:
        return f"No experiment has all of the tags {', '.join(tags)}."
    if not entries:
        return "No installed package offers experiments (entry-point group layerkit.experiments)."
    return catalogue_text(entries)


def _add_current_folder() -> None:
    """Append the current folder to `sys.path`: last, so that it shadows no installed package."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _print(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a reader such as `head` needs no more
        _drop_stdout()
    return 0


def _drop_stdout() -> None:
    """Discard further output: the interpreter would flush to the broken pipe when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stdout_is_broken() -> bool:
    """Return whether standard output is a pipe that its reader has closed, as `head` does."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are reported for any mask
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # not a file of the operating system
        return False


if __name__ == "__main__":
    sys.exit(main())
