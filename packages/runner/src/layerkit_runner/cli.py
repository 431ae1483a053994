"""The command `runner`.

    runner --exp=lm.quickstart.LocalText --job_log_dir=DIR     train; again: resume
    runner --exp=… --mode=eval --job_log_dir=DIR               or decode_once, export, plan, inspect
    runner --exp=… --mode=inspect --inspect=batches            what the inputs feed
    runner --exp=… --fdl.NUM_LAYERS=2                          set a field of the experiment
    runner --exp=… --fdl.task.model.lm_tpl.num_layers=2        or any field, by its path
    runner --list                                              every experiment
    runner --help                                              every flag

Exit codes: 0 done, 2 the command line or the fields are wrong, 130 stopped by Ctrl-C and 143 by
SIGTERM. A training run that is stopped finishes its step and saves first (unless it was told not to
save, or Ctrl-C came twice), and the same command resumes it.

A wrong flag, experiment, experiment field or value is answered from the syntax trees of the
modules, before JAX or any experiment is imported; a wrong deeper path as soon as the configuration
is made, before any device is touched. Each answer names the nearest right thing, and nothing is
written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layerkit_runner.errors import UsageError
from layerkit_runner.flags import (
    MODES,
    ParsedFlags,
    RunOptions,
    check_folder,
    help_text,
    parse_flags,
)
from layerkit_runner.overrides import parse_fields

if TYPE_CHECKING:
    from layerkit_runner.resolve import ResolvedExperiment


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says.

    Args:
      arguments: Its words, without the program's name; those of this process by default.

    Returns:
      The exit code.
    """
    try:
        flags = parse_flags(sys.argv[1:] if arguments is None else arguments)
        if flags.help:
            return _print(help_text())
        _let_own_modules_be_found()
        if flags.list:
            return _print(_listing())
        resolved = _resolve(flags)
        return _RUN_MODE[flags.mode](flags.mode, resolved, flags.options)
    except UsageError as error:
        print(f"runner: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _resolve(flags: ParsedFlags) -> ResolvedExperiment:
    """The experiment that the flags name, with all their overrides applied."""
    # The registry reads entry points, which `--help` and a wrong flag need not wait for.
    from layerkit_runner.registry import find_experiment, load_experiment

    entry = find_experiment(flags.exp or "")
    if entry.complete:
        annotations = {name: field.annotation for name, field in entry.fields.items()}
        parse_fields(entry.name, annotations, flags.overrides)
    check_folder(flags)

    # From here on the experiment's own imports are paid for.
    from layerkit_runner.experiment import experiment_fields
    from layerkit_runner.resolve import resolve

    cls = load_experiment(entry)
    fields = parse_fields(entry.name, experiment_fields(cls), flags.overrides)
    return resolve(cls(**fields), [o for o in flags.overrides if o.is_deep])


def _inspect(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    if options.inspect == "batches":
        # Loads NumPy, JAX and what the inputs stand on.
        from layerkit_runner.inspect_mode import run_inspect

        return run_inspect(resolved, options)
    # Only this mode needs the text of a configuration.
    from layerkit_runner.config_text import config_text

    return _print(config_text(resolved).rstrip("\n"))


def _run(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    # Loads JAX, Optax and the rest of the house.
    from layerkit_runner.run import run

    return run(mode, resolved, options) or 0


_RUN_MODE: dict[str, Callable[[str, ResolvedExperiment, RunOptions], int]] = {
    mode: _inspect if mode == "inspect" else _run for mode in MODES
}


def _listing() -> str:
    from layerkit_runner.registry import list_experiments

    entries = list_experiments()
    if not entries:
        return "No installed package offers experiments (entry-point group layerkit.experiments)."
    width = max(len(entry.name) for entry in entries)
    return "\n".join(f"{entry.name:<{width}}  {entry.summary}".rstrip() for entry in entries)


def _let_own_modules_be_found() -> None:
    """Adds the current folder to the places to import from: last, so that it hides nothing."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _print(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # `runner --list | head`: the reader has had enough, which is no error. The descriptor is
        # replaced because the interpreter would flush to it again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
