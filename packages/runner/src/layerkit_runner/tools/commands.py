"""The commands and modes of the tools that come with the runner.

Each imports its tool when it runs, so that `--help` and errors of flags are fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerkit_runner.config.commands import Command, FlagCommand, Mode
from layerkit_runner.run_options import FLAGS, RunOptions

if TYPE_CHECKING:
    from layerkit_runner.config.flags import ParsedFlags
    from layerkit_runner.config.resolve import ResolvedExperiment


def _plan(resolved: ResolvedExperiment, options: RunOptions) -> int:
    from layerkit_runner.modes.run import layer_errors
    from layerkit_runner.tools.plan.command import run_plan

    with layer_errors(resolved):
        return run_plan(resolved, options)


def _inspect(resolved: ResolvedExperiment, options: RunOptions) -> int:
    from layerkit_runner.tools.inspect import run_inspect

    return run_inspect(resolved, options)


def _diff_config(flags: ParsedFlags) -> int:
    from layerkit_runner.tools.inspect.config_difference import run_diff_config

    return run_diff_config(flags)


def _study(flags: ParsedFlags) -> int:
    from layerkit_runner.config.flags import check_folder
    from layerkit_runner.config.registry import find_experiment
    from layerkit_runner.config.resolve import resolve_entry
    from layerkit_runner.tools.sweep.command import run_study

    entry, reduced = find_experiment(flags.exp or ""), bool(flags.given.get("reduced"))
    check_folder(flags)
    return run_study(flags, entry, lambda given: resolve_entry(entry, given, reduced=reduced))


def _doctor(words: Sequence[str]) -> int:
    from layerkit_runner.config.flags import read_flags
    from layerkit_runner.config.help import flag_rows, table
    from layerkit_runner.tools.doctor import run_doctor

    names = ("job_log_dir", "json", "help")
    rows = [row for row in FLAGS if row.name in names]
    given, _ = read_flags(words, rows)
    if given.pop("help", False):
        print("\n".join(["runner doctor [flags]", "", DOCTOR.help, "", *table(flag_rows(rows))]))
        return 0
    return run_doctor(RunOptions(**given))


def _launch(words: Sequence[str]) -> int:
    from layerkit_runner.tools.launch import run_launch

    return run_launch(words, _resolve)


def _resolve(flags: ParsedFlags) -> ResolvedExperiment:
    from layerkit_runner.config.registry import find_experiment

    # A misspelled experiment is reported before Fiddle is imported.
    find_experiment(flags.exp or "")
    from layerkit_runner.config.resolve import resolve_flags

    return resolve_flags(flags)


PLAN = Mode("compile the training step without the devices; print memory and traffic", _plan)
INSPECT = Mode(
    "print the configuration, layers, weights, graph or batches; writes nothing",
    _inspect,
)
DIFF_CONFIG = FlagCommand(_diff_config)
STUDY = FlagCommand(_study)
DOCTOR = Command(
    "check this machine: versions, memory, disk, devices; exit code 1 if a check fails",
    _doctor,
)
LAUNCH = Command(
    "start a run on this machine, Slurm, TPUs or Kubernetes; `runner launch` lists the kinds",
    _launch,
)
