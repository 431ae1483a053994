"""Requests as plain values: a parsed command line, and an experiment with its configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerkit_runner.config.overrides import Override
from layerkit_runner.run_options import FLAGS, RunOptions

if TYPE_CHECKING:
    from layerkit.config import Config
    from layerkit_runner.config.experiment import BaseExperiment

# Flags that a printed command omits: its reader chooses where to write, a sweep sets its own, some
# differ between the processes of a job, and one overrides a single error.
_OMITTED = (
    *("job_log_dir", "log_dir", "allow_restart_from_scratch"),
    *("study", "num_trials", "study_storage"),
    *("coordinator_address", "num_processes", "process_id", "multiprocess_gpu"),
)


@dataclasses.dataclass(frozen=True)
class ParsedFlags:
    """A command line whose flags are valid and fit together.

    `exp` is None if a job's folder names the experiment, or none is needed; `values` has the flags
    of the command line by name.
    """

    exp: str | None
    mode: str
    overrides: tuple[Override, ...]
    options: RunOptions
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def only_prints(self) -> bool:
        """Whether the configuration is printed or compared, in place of the mode."""
        return bool(self.values.get("print_config")) or "diff_config" in self.values


@dataclasses.dataclass(frozen=True)
class ResolvedExperiment:
    """An experiment and the configs that its methods return, with all overrides applied.

    If the methods return the same config object in several places, it is one shared object here
    too.

    Attributes:
      experiment: Experiment with its own fields overridden.
      task: Config of the `SingleTask`.
      datasets: Configs of inputs to train on (`is_training=True`) and to evaluate.
      decode_datasets: Configs of inputs to decode.
      partitioner: Config of the partitioner.
      train_programs: Configs of training programs; None for one program per data set.
      eval_programs: Configs of evaluation programs; None for one program per data set.
      decode_programs: Configs of decoding programs; None for one program per data set.
      executor: Config of the executor; None for `layerkit_runner.run.executor.Executor`.
      observers: Configs of observers that run beside the built-in ones.
      deep_overrides: Overrides of fields in the configs, which are already applied.
      notes: Lines for the start report about configs whose class an override has replaced.
    """

    experiment: BaseExperiment
    task: Config
    datasets: list[Config]
    decode_datasets: list[Config]
    partitioner: Config
    train_programs: list[Config] | None = None
    eval_programs: list[Config] | None = None
    decode_programs: list[Config] | None = None
    executor: Config | None = None
    observers: list[Config] = dataclasses.field(default_factory=list)
    deep_overrides: tuple[Override, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Full dotted name of the experiment's class, a valid value of `--exp`."""
        cls = type(self.experiment)
        return f"{cls.__module__}.{cls.__qualname__}"


def to_argv(options: RunOptions, *, mode: str) -> list[str]:
    """Return flags for the options that have a meaning in a mode and are not at their defaults."""
    rows = [row for row in FLAGS if not row.modes or mode in row.modes]
    names = [row.name for row in rows if hasattr(options, row.name) and row.name not in _OMITTED]
    values = {name: getattr(options, name) for name in names}
    return [flag_word(n, value) for n, value in values.items() if value != getattr(RunOptions, n)]


def flag_word(name: str, value: Any) -> str:
    """Return a flag as it is typed: `--name=value`, `--name` or `--noname`."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, tuple):
        return f"--{name}={','.join(map(str, value))}"
    # None is the value of `off`.
    return f"--{name}={'off' if value is None else value}"
