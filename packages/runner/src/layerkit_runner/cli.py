"""The command `runner`.

    runner --exp=lm.quickstart.LocalText --job_log_dir=DIR     train; again: resume
    runner --exp=… --mode=eval --job_log_dir=DIR               beside it; or eval_once, decode,
                                                               decode_once, export, plan, inspect
    runner --mode=export --job_log_dir=DIR …                   of any mode but train: the experiment
                                                               and fields that DIR records
    runner --exp=… --mode=inspect --inspect=batches            what the inputs feed; or layers,
                                                               parameters, graph
    runner --exp=… --job_log_dir=DIR --study=FILE              many runs: search its fields
    runner --exp=… --print_config                              every field, and leave
    runner --exp=… --diff_config=OTHER                         what differs from another experiment
                                                               or a job's folder; exit code 1: some
    runner --exp=… --fdl.NUM_LAYERS=2                          set a field of the experiment
    runner --exp=… --fdl.task.model.lm_tpl.num_layers=2        or any field, by its path
    runner --exp=… --reduced                                   at a size for this machine
    runner --list                                              every experiment; --tag=moe: those
                                                               with that tag; --wide: in full
    runner doctor                                              what is wrong with this machine;
                                                               exit code 1: something
    runner launch KIND --exp=… --job_log_dir=DIR               start it on Slurm, TPUs, Kubernetes
                                                               or this machine; --dry_run: print
    runner --help                                              every flag

Exit codes: 0 done, 2 the command line or the fields are wrong, 65 too many training steps in a row
or the state are not finite, 70 no progress, 75 another process of the job was lost, 129 stopped by
SIGHUP, 130 by Ctrl-C and 143 by SIGTERM. A training run that is stopped
finishes its step and saves first (unless it was told not to save, or Ctrl-C came twice), and the
same command resumes it.

A wrong flag, experiment, experiment field or value is answered from the syntax trees of the
modules, before JAX or any experiment is imported; a wrong deeper path as soon as the configuration
is made, before any device is touched. Each answer names the nearest right thing, and nothing is
written.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layerkit_runner.config.flags import (
    MODES,
    ParsedFlags,
    RunOptions,
    check_folder,
    help_text,
    parse_flags,
)
from layerkit_runner.config.overrides import Override, parse_fields
from layerkit_runner.distributed.launchers import check_alone, check_processes
from layerkit_runner.errors import UsageError, unknown_name_text

if TYPE_CHECKING:
    from layerkit_runner.config.registry import ExperimentEntry
    from layerkit_runner.config.resolve import ResolvedExperiment


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says.

    Args:
      arguments: Its words, without the program's name; those of this process by default.

    Returns:
      The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _command(words)
    except UsageError as error:
        print(f"runner: {error}", file=sys.stderr)
        return error.exit_code
    except (AttributeError, KeyError, TypeError) as error:
        text = unknown_name_text(error)
        if text is None:
            raise
        print(f"runner: {text}", file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # A connection to another machine may break as well, which is a fault of the run.
        if not _stdout_is_broken():
            raise
        # The interpreter would flush to the broken pipe again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if words[:1] == ["launch"] or not _is_run(words):
            return 0
        print(
            "runner: standard output was closed by its reader, so the run has stopped.",
            file=sys.stderr,
        )
        return 1


def _command(words: Sequence[str]) -> int:
    """Do what the words of the command line say; returns the exit code."""
    if words[:1] == ["launch"]:
        return _launch(words[1:])
    flags = parse_flags(words)
    if flags.help:
        return _print(help_text())
    if flags.command == "doctor":
        # Nothing else needs it; and it loads neither JAX nor any experiment itself.
        from layerkit_runner.tools.doctor import run_doctor

        return run_doctor(flags.options)
    _let_own_modules_be_found()
    if flags.list:
        return _print(_listing(flags))
    flags = _with_recorded_experiment(flags)
    if flags.diff_config is not None:
        return _diff_config(flags, flags.diff_config)
    if flags.options.study is not None and not flags.print_config:
        return _study(flags)
    resolved = _resolve(flags)
    if flags.print_config:
        return _print_config(resolved, flags.options, flags.mode)
    # By now the experiment has imported what this needs.
    from layerkit_runner.config.remedies import flags_named

    with flags_named(resolved):
        return _RUN_MODE[flags.mode](flags.mode, resolved, flags.options)


def _with_recorded_experiment(flags: ParsedFlags) -> ParsedFlags:
    if flags.exp is not None:
        return flags
    # A command that names its experiment need not wait for what reads a record.
    from layerkit_runner.config.recorded import with_recorded_experiment

    # Standard output is for what was asked for, such as JSON.
    return with_recorded_experiment(flags, lambda line: print(f"runner: {line}", file=sys.stderr))


def _launch(words: Sequence[str]) -> int:
    # Has flags of its own, which nothing else needs.
    from layerkit_runner.tools.launch import run_launch

    _let_own_modules_be_found()
    return run_launch(words, _resolve)


def _resolve(flags: ParsedFlags) -> ResolvedExperiment:
    """The experiment that the flags name, with all their overrides applied."""
    return _load(_checked_entry(flags), flags.overrides, reduced=flags.reduced)


def _checked_entry(flags: ParsedFlags) -> ExperimentEntry:
    """The experiment that the flags name, not yet imported; all is checked that needs no import."""
    # The registry reads entry points, which `--help` and a wrong flag need not wait for.
    from layerkit_runner.config.registry import find_experiment

    entry = find_experiment(flags.exp or "")
    if entry.complete:
        if "tfds_data_dir" in flags.given and "TFDS_DATA_DIR" not in entry.fields:
            raise UsageError(
                f"--tfds_data_dir: {entry.name} reads no data of TensorFlow Datasets; it has no"
                " field TFDS_DATA_DIR."
            )
        annotations = {name: field.annotation for name, field in entry.fields.items()}
        parse_fields(entry.name, annotations, flags.overrides)
    # A configuration that is only printed needs no folder, and may be looked at from anywhere.
    if not flags.only_prints:
        _check_surroundings(flags)
    return entry


def _study(flags: ParsedFlags) -> int:
    # A single run has no use for it.
    from layerkit_runner.tools.sweep.command import run_study

    entry = _checked_entry(flags)
    return run_study(flags, entry, lambda overrides: _load(entry, overrides, reduced=flags.reduced))


def _check_surroundings(flags: ParsedFlags) -> None:
    check_folder(flags)
    if flags.mode == "export":
        check_alone(flags.mode, os.environ)
    elif flags.mode not in ("plan", "inspect") and flags.options.study is None:
        check_processes(flags.options, os.environ)


def _load(
    entry: ExperimentEntry, overrides: Sequence[Override], *, reduced: bool = False
) -> ResolvedExperiment:
    # From here on the experiment's own imports are paid for.
    from layerkit_runner.config.experiment import experiment_fields, reduced_values
    from layerkit_runner.config.registry import load_experiment
    from layerkit_runner.config.resolve import resolve

    cls = load_experiment(entry)
    fields = parse_fields(entry.name, experiment_fields(cls), overrides)
    if reduced:
        if not reduced_values(cls):
            raise UsageError(
                f"--reduced: {entry.name} does not say how it is made smaller (reduced_fields); set"
                " its fields by --fdl.NAME=VALUE."
            )
        fields = reduced_values(cls) | fields
    return resolve(cls(**fields), [o for o in overrides if o.is_deep])


def _inspect(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    if options.inspect == "batches":
        # Loads NumPy, JAX and what the inputs stand on.
        from layerkit_runner.tools.inspect.batches import run_inspect

        return run_inspect(resolved, options)
    if options.inspect == "layers":
        # Likewise, and the model is built of shapes.
        from layerkit_runner.tools.inspect.built_layers import describe_layers

        return _print(describe_layers(resolved, options))
    if options.inspect == "parameters":
        # Loads JAX, and the model is built of shapes.
        from layerkit_runner.tools.inspect.parameter_table import describe_parameters

        return _print(describe_parameters(resolved, options))
    if options.inspect == "graph":
        from layerkit_runner.tools.inspect.config_graph import config_graph, mermaid

        return _print(mermaid(config_graph(resolved)))
    return _print_config(resolved, options, mode)


def _print_config(resolved: ResolvedExperiment, options: RunOptions, mode: str) -> int:
    # Only here is the text of a configuration needed.
    from layerkit_runner.config.config_text import config_json, config_text

    if options.json:
        # What only looks is no run, whose flags would be worth keeping.
        run = None if mode == "inspect" else options
        return _print(json.dumps(config_json(resolved, run, mode=mode)))
    return _print(config_text(resolved).rstrip("\n"))


def _diff_config(flags: ParsedFlags, other: str) -> int:
    from layerkit_runner.config.registry import find_experiment
    from layerkit_runner.tools.inspect import config_difference

    if config_difference.is_folder(other):
        there = config_difference.recorded_side(other)
        here = config_difference.resolved_side(_resolve(flags))
    else:
        try:
            entry = find_experiment(other)
        except UsageError as error:
            raise UsageError(f"--diff_config: {error}") from None
        here = config_difference.resolved_side(_resolve(flags))
        there = config_difference.resolved_side(_load(entry, ()))
    tell = (
        config_difference.difference_json
        if flags.options.json
        else config_difference.difference_text
    )
    found = config_difference.differences(here, there)
    _print(tell(here, there, found))
    return 1 if found else 0


def _run(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    # Loads JAX, Optax and the rest of the house.
    from layerkit_runner.modes.run import run

    return run(mode, resolved, options) or 0


_RUN_MODE: dict[str, Callable[[str, ResolvedExperiment, RunOptions], int]] = {
    mode: _inspect if mode == "inspect" else _run for mode in MODES
}


def _listing(flags: ParsedFlags) -> str:
    from layerkit_runner.config.catalogue import catalogue_json, catalogue_text
    from layerkit_runner.config.registry import list_experiments

    entries = list_experiments(tags=flags.tags)
    if flags.options.json:
        return json.dumps(catalogue_json(entries))
    if not entries and flags.tags:
        return f"No experiment has all of the tags {', '.join(flags.tags)}."
    if not entries:
        return "No installed package offers experiments (entry-point group layerkit.experiments)."
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return catalogue_text(entries, width=width, wide=flags.wide)


def _let_own_modules_be_found() -> None:
    """Adds the current folder to the places to import from: last, so that it hides nothing."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _print(text: str) -> int:
    print(text, flush=True)
    return 0


def _is_run(words: Sequence[str]) -> bool:
    """Return whether the command line asks for a job, which is not done once it has printed."""
    flags = parse_flags(words)
    prints = flags.help or flags.list or flags.only_prints or flags.command == "doctor"
    return not prints and flags.mode not in ("plan", "inspect")


def _stdout_is_broken() -> bool:
    """Return whether standard output is a pipe that its reader has closed, as `head` does."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors are reported without being asked for
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # not a file of the operating system
        return False


if __name__ == "__main__":
    sys.exit(main())
