"""Training of an experiment from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.requests import ResolvedExperiment, flag_word
from layerkit_runner.distributed.stop_signals import Interrupts
from layerkit_runner.errors import UsageError
from layerkit_runner.interface.experiments import ExperimentLike, get_experiment, set_num_steps
from layerkit_runner.interface.loading import load_checkpoint
from layerkit_runner.observers import Metrics, read_metrics
from layerkit_runner.run.job_errors import job_errors
from layerkit_runner.run.model.loaded_model import LoadedModel
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import CLUSTER_FLAGS, LOG_FLAGS, STUDY_FLAGS, RunOptions

# Settings of JAX that a run changes.
_JAX_SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)

# Flags on which the command `runner` acts before it trains, in a process of its own.
_FLAGS_OF_THE_COMMAND = frozenset(
    {
        *CLUSTER_FLAGS,
        *("xla_flags_preset", "pgle_profile", "hung_step_timeout_secs"),
        *STUDY_FLAGS,
        *LOG_FLAGS,
    }
)


class MetricsTable(dict[str, list[Any]]):
    """A table of metrics: a dict of columns of equal length, such as `table["loss"]`.

    `pandas.DataFrame(table)` and `table.to_pandas()` are the same. The column `step` has the number
    of completed steps, and `time` Unix time in seconds. A missing value is NaN.
    """

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> MetricsTable:
        """Return the table of records, one for each row."""
        rows = list(records)
        names = dict.fromkeys(name for row in rows for name in row if name != "dataset")
        return cls({name: [row.get(name, math.nan) for row in rows] for name in names})

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.values()), ()))

    def last(self) -> dict[str, Any]:
        """Return the last row by column; empty if the table is."""
        return {name: column[-1] for name, column in self.items() if column}

    def __repr__(self) -> str:
        """Return the names of the columns and the number of rows."""
        return f"MetricsTable({self.num_rows} rows: {', '.join(self)})"

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`, with the steps as its index."""
        import pandas

        frame = pandas.DataFrame(dict(self))
        return frame.set_index("step") if "step" in frame else frame


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A training run in a job folder.

    Attributes:
      job_log_dir: Job folder.
      experiment: Experiment and its configs.
    """

    job_log_dir: str
    experiment: ResolvedExperiment

    @functools.cached_property
    def _series(self) -> Metrics:
        return read_metrics(self.job_log_dir)

    @functools.cached_property
    def metrics(self) -> MetricsTable:
        """Metrics of the training steps, those of earlier calls included."""
        return MetricsTable.of(self._series.train)

    @functools.cached_property
    def evaluations(self) -> dict[str, MetricsTable]:
        """Metrics of the evaluations, by name of the data set."""
        return {name: MetricsTable.of(rows) for name, rows in self._series.evals.items()}

    @functools.cached_property
    def model(self) -> LoadedModel:
        """Trained model, from the newest checkpoint; see `layerkit_runner.load`."""
        return load_checkpoint(self.experiment, self.job_log_dir, None)

    def __repr__(self) -> str:
        """Return the folder, and the last values of the loss."""
        last = self.metrics.last()
        parts = [f"{name}={last[name]:g}" for name in ("step", "loss") if name in last]
        return f"TrainResult({', '.join([repr(self.job_log_dir), *parts])})"


def train(
    experiment: ExperimentLike,
    *,
    job_log_dir: str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    num_steps: int | None = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Train an experiment in this process, or resume its run in a job folder.

    This does the same as `runner --exp=… --job_log_dir=…`: it saves checkpoints, evaluates and
    logs. The same call resumes a run that was interrupted. A call with a larger `num_steps`
    continues a run that has ended. Ctrl-C, or the stop button of a notebook, finishes the step,
    saves, and raises KeyboardInterrupt.

    Args:
      experiment: Experiment; see `get_experiment`.
      job_log_dir: Folder for everything that the run writes.
      overrides: Values by field or path, such as `{"NUM_LAYERS": 2}`; see `get_experiment`.
      num_steps: Total number of training steps; None for that of the experiment.
      options: Flags of `--mode=train` by name, such as `{"init_from": folder}`, without those of
        processes, compilers, sweeps and library logs; None for their defaults.
      quiet: True to print neither progress nor messages.

    Raises:
      UserError: A field or flag is wrong, or the run cannot continue.
      KeyboardInterrupt: The run was interrupted. If training had begun, it was saved.
    """
    folder = os.path.expanduser(os.fspath(job_log_dir))
    resolved = get_experiment(experiment, overrides)
    if num_steps is not None:
        resolved = set_num_steps(resolved, num_steps)
    flags = _options(folder, options or {})
    with _jax_settings_restored(), job_errors("train", resolved):
        exit_code = run_train(resolved, flags, signals=Interrupts(), quiet=quiet)
    if exit_code:
        raise KeyboardInterrupt(f"saved in {folder}; the same call resumes")
    return TrainResult(folder, resolved)


def _options(folder: str, options: Mapping[str, Any]) -> RunOptions:
    """Return the options that a command line with these flags has, after the same checks."""
    rows = {f.name: f.metadata["row"] for f in dataclasses.fields(RunOptions) if f.metadata}
    trains = {name for name, row in rows.items() if not row["modes"] or "train" in row["modes"]}
    choices = [name for name in rows if name in trains - {"job_log_dir"} - _FLAGS_OF_THE_COMMAND]
    for name in options:
        if name not in choices:
            problem = "not a flag of --mode=train"
            if name in _FLAGS_OF_THE_COMMAND:
                problem = "only the command `runner` acts on this flag"
            raise UsageError(problem, field="options", value=name, choices=choices)
    words = [flag_word(name, value) for name, value in options.items() if value is not None]
    # The flags are checked together; the experiment is resolved elsewhere.
    return parse_flags(["--exp=given", f"--job_log_dir={folder}", *words]).options


@contextlib.contextmanager
def _jax_settings_restored() -> Iterator[None]:
    """Restore the settings of JAX's compilation cache after the block."""
    before = {name: getattr(jax.config, name) for name in _JAX_SETTINGS}
    try:
        yield
    finally:
        changed = {name for name, value in before.items() if getattr(jax.config, name) != value}
        for name in changed:
            jax.config.update(name, before[name])
        if "jax_compilation_cache_dir" in changed:
            # JAX uses the folder of its first use until the cache is reset.
            from jax.experimental.compilation_cache import compilation_cache

            compilation_cache.reset_cache()
