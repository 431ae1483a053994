"""The report at the end of training: held-out metrics, a sample, a loss curve and next commands.

Training is complete and saved by then. If a part of the report fails, its failure is reported, the
other parts are made, and the exit code stays that of the training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from layerkit.base.base_model import NATS_PER_TOKEN
from layerkit.errors import UserError, error_text
from layerkit_inputs.base.errors import MissingExtraError
from layerkit_runner.distributed.cluster import all_arrive
from layerkit_runner.distributed.watchdog import phase
from layerkit_runner.errors import exits_as_errors, naming_line
from layerkit_runner.files.text import size_text
from layerkit_runner.observers import memory_scalars
from layerkit_runner.observers.metrics_log import encode
from layerkit_runner.run.executor import Executor
from layerkit_runner.run.job import Job
from layerkit_runner.run.job_folder import command_line, last_step_path
from layerkit_runner.run.programs.decode_program import record_text
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_state import TrainState

_SAMPLE_CHARACTERS = 600
_ERROR_CHARACTERS = 300
_MAX_DRAWING_SECONDS = 60.0


def finish(
    job: Job, executor: Executor, state: TrainState, step: int, curve: LossCurve | None
) -> None:
    """Evaluate and decode the final model and report both; `curve` is None on most processes."""
    parts = _Parts(job)
    baselines: dict[str, float] = {}
    parts.make(
        "evaluation",
        lambda: _report_evaluation(job, executor, state, step, baselines),
        repeat_mode="eval_once",
    )
    parts.make("speed", lambda: _report_speed(job, executor))

    def report_decoding() -> None:
        for name, records in executor.decode(state, step).items():
            for record in records[:1]:
                job.observers.message(sample_text(name, record))

    parts.make("decoding", report_decoding, repeat_mode="decode_once")
    job.observers.flush()

    def report_summary() -> None:
        skipped = executor.train_programs.skipped
        if skipped.in_all:
            job.observers.message(
                f"not valid: {skipped.in_all} of {step} steps, the last {skipped.in_a_row} in a row"
            )
        if skipped.rollbacks:
            windows = ", ".join(f"{r['step'] + 1} to {r['last_step']}" for r in skipped.rollbacks)
            job.observers.message(f"rolled back, without the data of steps {windows}")
        job.observers.message(job.goodput.summary())
        peak = memory_scalars().get("memory/device_peak_bytes_in_use")
        if peak is not None:
            job.observers.message(f"memory: peak of {size_text(peak)} on one device")

    parts.make("summary", report_summary)
    if curve is not None:
        parts.make("loss curve", lambda: curve.finish(baselines))
        # No command can import a class of a notebook.
        if type(job.resolved.experiment).__module__ != "__main__":
            parts.make("commands to try next", lambda: _suggest(job, executor, step))
    if parts.unshared_failure is not None:
        raise parts.unshared_failure


class _Parts:
    """The parts of one report; a failure of one does not end the others."""

    def __init__(self, job: Job) -> None:
        self.unshared_failure: Exception | None = None
        self._job = job

    def make(self, name: str, part: Callable[[], None], *, repeat_mode: str | None = None) -> None:
        """Make a part; report its failure instead of raising it."""
        is_shared = repeat_mode is not None
        if is_shared and self.unshared_failure is not None:
            return  # Not all processes would start it.
        try:
            watched = phase(f"{name} of the report at the end", waits_for_others=True)
            with watched, naming_line(), exits_as_errors():
                part()
        except Exception as error:
            self._report(name, error, repeat_mode)
            if is_shared and not all_arrive(f"the {name} of the end report failed"):
                self.unshared_failure = error

    def _report(self, name: str, error: Exception, repeat_mode: str | None) -> None:
        reason = " ".join(error_text(error).split())[:_ERROR_CHARACTERS].rstrip(".")
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {reason}"
        job = self._job
        command = command_line(job.options, mode=repeat_mode or "train")
        traceback.print_exception(error)
        job.observers.message(
            f"{name} failed: {reason}. The training is complete, and its exit code is unchanged."
            f" The traceback is above. To try again: {command}"
        )


def _report_evaluation(
    job: Job, executor: Executor, state: TrainState, step: int, baselines: dict[str, float]
) -> None:
    """Evaluate the remaining data sets, report all of them, and add to `baselines`."""
    means = executor.evaluate_rest(state, step) if job.task.train.eval_at_end else {}
    for program in executor.eval_programs:
        if program.dataset is None:
            continue
        metric = ReportedMetric.of(job.task, token_unit=program.dataset.token_unit)
        value = means.get(program.name, {}).get(metric.name)
        if value is None:
            continue
        job.observers.message(metric.line(program.name, value))
        if not metric.is_cross_entropy:
            continue  # Baselines are cross-entropies.
        for name, baseline in program.dataset.baselines().items():
            if baselines.get(name) == baseline:  # Another program reads this data set too.
                continue
            baselines[name] = baseline
            job.observers.message(f"  for comparison: {name}: {metric.value_text(baseline)}")


def _report_speed(job: Job, executor: Executor) -> None:
    rates = executor.throughput.overall()
    if "tokens_per_sec" not in rates:
        return
    speed = f"{rates['tokens_per_sec']:,.0f} tokens/s, {rates['step_time'] * 1e3:.1f} ms per step"
    if "tflops_per_sec_per_device" in rates:
        speed += f", {rates['tflops_per_sec_per_device'] * 1e3:,.1f} model GFLOP/s per device"
    speed += f", {rates['input_wait']:.1%} of the time waiting for input"
    job.observers.message(f"speed: {speed}")


@dataclasses.dataclass
class LossCurve:
    """The picture of a job's metrics: redrawn while the job trains, and completed at its end.

    Attributes:
      job: Job.
      token_unit: Unit of the tokens of the training data.
      interval: Seconds before the first drawing, and between two.
    """

    job: Job
    token_unit: str
    interval: float = 10.0
    _last: float = dataclasses.field(default_factory=time.monotonic)
    _drawing: subprocess.Popen[bytes] | None = None

    def redraw(self) -> None:
        """Start to draw in another process if a drawing is due; a failure has no effect."""
        is_drawing = self._drawing is not None and self._drawing.poll() is None
        if is_drawing or time.monotonic() < self._last + self.interval:
            return
        self._last = time.monotonic()
        words = [os.fspath(self.job.directory), self._metric.name, self._metric.axis_label]
        # Without -P, a file of the current folder would shadow an installed module of its name.
        command = [sys.executable, "-P", "-m", "layerkit_runner.observers.loss_curve", *words]
        no = subprocess.DEVNULL
        with contextlib.suppress(OSError):  # no process could be started
            self._drawing = subprocess.Popen(command, stdin=no, stdout=no, stderr=no)

    def finish(self, baselines: Mapping[str, float]) -> None:
        """Draw the whole curve and report its path, or why there is none."""
        from layerkit_runner.observers.loss_curve import draw_loss_curve

        if self._drawing is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._drawing.wait(_MAX_DRAWING_SECONDS)
        self.close()
        key, label, folder = self._metric.name, self._metric.axis_label, self.job.directory
        try:
            picture = draw_loss_curve(folder, baselines=baselines, key=key, y_label=label)
        except (ValueError, MissingExtraError) as error:  # no finite value or no matplotlib
            self.job.observers.message(f"no loss curve: {error}")
            return
        self.job.observers.message(f"loss curve: {self.job.given_directory / picture.name}")

    def close(self) -> None:
        """End a drawing that has begun."""
        if self._drawing is not None:
            self._drawing.kill()
            self._drawing.wait()

    @property
    def _metric(self) -> ReportedMetric:
        return ReportedMetric.of(self.job.task, token_unit=self.token_unit)


def sample_text(name: str, record: Mapping[str, Any]) -> str:
    """Return the text of a record for reports: a prompt with its continuation, or the outputs."""
    text = record_text(record)
    if text is None:
        return f"sample ({name}): {encode(record)[:_SAMPLE_CHARACTERS]}"
    text = text[: len(record["prompt"]) + 1 + _SAMPLE_CHARACTERS]
    return f"sample ({name}, {record['num_tokens']} tokens after the mark):\n{text}"


def _suggest(job: Job, executor: Executor, step: int) -> None:
    """Report commands to try next, below a line that explains them."""
    commands = {"print all settings": command_line(job.options, mode="inspect")}
    # More steps would not continue a stopped run, and would not mend one that skipped many.
    has_many_skipped = 10 * executor.train_programs.skipped.in_all > step
    path = last_step_path(job.resolved)
    if not (executor.has_stopped_early or has_many_skipped or path is None):
        changes = {path: str(2 * step)}
        commands["train twice as many steps"] = command_line(job.options, changes=changes)
    for line in ("next: " + "; ".join(commands), *(f"  {words}" for words in commands.values())):
        job.observers.message(line)


@dataclasses.dataclass(frozen=True)
class ReportedMetric:
    """The metric that reports of a task show, with the unit of its values.

    A cross-entropy over tokens is reported in bits too, and compared with baselines of the data.
    """

    name: str
    unit: str | None = None
    is_cross_entropy: bool = False

    @classmethod
    def of(cls, task: SingleTask, *, token_unit: str = "token") -> ReportedMetric:
        """Return the metric that the model names, or the loss; `token_unit` is that of the data."""
        name = task.model.reported_metric or task.loss_name
        unit = task.model.metric_units.get(name)
        if unit == NATS_PER_TOKEN:
            return cls(name, f"nats per {token_unit}", is_cross_entropy=True)
        return cls(name, unit)

    @property
    def axis_label(self) -> str:
        """Label of a plot axis, such as `xent (nats per byte)`."""
        return self.name if self.unit is None else f"{self.name} ({self.unit})"

    def value_text(self, value: float) -> str:
        """Return a value with its unit, such as `1.534 nats per byte = 2.213 bits per byte`."""
        text = f"{value:.4f}" if self.unit is None else f"{value:.4f} {self.unit}"
        if self.is_cross_entropy:
            assert self.unit is not None
            text += f" = {value / math.log(2):.4f} {self.unit.replace('nats', 'bits')}"
        return text

    def line(self, dataset: str, value: float) -> str:
        """Return the line of one data set, such as `heldout: reward_accuracy 0.8125`."""
        return f"{dataset}: {self.name} {self.value_text(value)}"
