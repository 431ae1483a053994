"""Early stopping: rules that end a run before its last step.

A `StoppingRule` decides whether evaluations still improve, and `EarlyStop` applies it in one run.
Process 0 asks the rule and sends the answer to the others. Each checkpoint holds the rule's state:
a resumed run decides as an uninterrupted one, and a stopped run does not train on.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from layerkit.config import Configurable
from layerkit.config.checks import check_choice, check_non_negative, check_sizes
from layerkit_runner.distributed.cluster import run_on_process_0
from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import stable_repr

TRAIN_STEP = "train_step"
"""Name before the metrics of a training step, such as `train_step/loss`."""

_OWNER = "task.early_stopping"


def join_metrics(metrics_by_program: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several programs as one dict by `PROGRAM/METRIC`."""
    return {
        f"{name}/{metric}": value
        for name, metrics in metrics_by_program.items()
        for metric, value in metrics.items()
    }


def program_of(metric: str, names: Iterable[str]) -> str | None:
    """Return the program of a metric `PROGRAM/METRIC`; None if it is not in `names`.

    One name may begin with another: `heldout`, `heldout/averaged`.
    """
    return max((name for name in names if metric.startswith(f"{name}/")), key=len, default=None)


class StoppingRule(Configurable):
    """A rule that ends training; a subclass defines `should_stop`.

    A rule with a state returns it from `state` and restores it in `set_state`. Without them, it
    is reset when a run is resumed.
    """

    def start(self, datasets: Iterable[str]) -> None:
        """Prepare for evaluations of these data sets; raise `UsageError` if the rule cannot."""

    def asks_each_step(self) -> bool:
        """Return whether the rule is asked after each training step, with the step's metrics.

        The host then waits for each step, which makes short steps slower.
        """
        return False

    def should_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        """Return whether training ends after `step` steps; called on process 0 only.

        `metrics` are those of this step, by `DATASET/METRIC`, `decode/DATASET/METRIC` and, if
        `asks_each_step` is True, `train_step/METRIC`.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define should_stop")

    def reason(self) -> str:
        """Return why training stopped, as the end of a sentence."""
        return f"{type(self).__qualname__} says so"

    def state(self) -> dict[str, Any]:
        """Return the state of the rule, as JSON values."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""


class MetricRule(StoppingRule):
    """A rule about one metric; a subclass defines `should_stop`.

    Attributes:
      metric: `DATASET/METRIC` such as `heldout/loss`, or `train_step/METRIC` for training steps.
    """

    metric: str

    def __post_init__(self) -> None:
        """Set the initial state."""
        # Names of all data sets that may be evaluated, if known.
        self._datasets: tuple[str, ...] = ()

    def start(self, datasets: Iterable[str]) -> None:
        """Raise `UsageError` unless `metric` belongs to one of the evaluated data sets."""
        self._datasets = (*datasets, TRAIN_STEP)
        if program_of(self.metric, self._datasets) is None:
            metric = self.metric.rpartition("/")[2]
            raise UsageError(
                owner=_OWNER,
                field="metric",
                value=self.metric,
                expected="DATASET/METRIC of a data set that is evaluated during training",
                choices=[f"{name}/{metric}" for name in self._datasets],
            )

    def asks_each_step(self) -> bool:
        """Return whether `metric` is a metric of the training step."""
        return self.metric.startswith(f"{TRAIN_STEP}/")

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric, or None if its data set was not evaluated."""
        if self.metric in metrics:
            return float(metrics[self.metric])
        names = self._datasets or {name.rpartition("/")[0] for name in metrics}
        evaluated = {program_of(name, names) for name in metrics}
        if program_of(self.metric, names) in evaluated - {None}:
            raise UsageError(
                "unknown metric", owner=_OWNER, field="metric", value=self.metric, choices=metrics
            )
        return None


class StopAtTarget(MetricRule):
    """A rule that stops when a metric reaches a target.

    Attributes:
      metric: See `MetricRule`.
      target: Value at which training ends.
      mode: `min` if a lower value is better, `max` if a higher one is.
    """

    target: float
    mode: str = "min"

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_choice(_OWNER, ("min", "max"), mode=self.mode)

    def should_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        """Return whether `metric` has reached `target`; see `MetricRule.value` for errors."""
        value = self.value(metrics)
        if value is None:
            return False
        return value <= self.target if self.mode == "min" else value >= self.target

    def reason(self) -> str:
        """Return the target."""
        return f"{self.metric} has reached the target {self.target:.6g}"


class EarlyStopping(MetricRule):
    """A rule that stops when a metric has not improved for some evaluations.

    The final weights are those of the last evaluation. To keep the weights of the best one, set
    `save_best_metric` to the same metric.

    Attributes:
      metric: See `MetricRule`.
      patience: Number of evaluations in a row without improvement that end the run; of training
        steps for `train_step/METRIC`.
      min_delta: Smallest difference to the best value that counts as an improvement.
      mode: `min` if a lower value is better, `max` if a higher one is.
    """

    patience: int = 1
    min_delta: float = 0.0
    mode: str = "min"

    def __post_init__(self) -> None:
        """Check the fields and set the initial state."""
        super().__post_init__()
        check_sizes(_OWNER, patience=self.patience)
        check_non_negative(_OWNER, min_delta=self.min_delta)
        check_choice(_OWNER, ("min", "max"), mode=self.mode)
        self._state: dict[str, Any] = {"best": None, "best_step": 0, "without_improvement": 0}

    def should_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        """Return whether `metric` has not improved in the last `patience` evaluations."""
        value = self.value(metrics)
        if value is None:
            return False
        best = self._state["best"]
        improves = not math.isnan(value)
        if improves and best is not None:
            gain = best - value if self.mode == "min" else value - best
            improves = gain > self.min_delta
        if improves:
            self._state = {"best": value, "best_step": step, "without_improvement": 0}
        else:
            self._state["without_improvement"] += 1
        return bool(self._state["without_improvement"] >= self.patience)

    def reason(self) -> str:
        """Return the best value and the number of evaluations without improvement."""
        best, best_step, count = self._state.values()
        evaluations = "step" if self.asks_each_step() else "evaluation"
        evaluations += "" if count == 1 else "s"
        if best is None:
            return f"{self.metric} was not a number in {count} {evaluations}"
        improved = f"{best:.6g} of step {best_step}"
        return f"{self.metric} did not improve on {improved} in {count} {evaluations}"

    def state(self) -> dict[str, Any]:
        """Return the best value, its step and the count without improvement."""
        return dict(self._state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._state = {name: state[name] for name in self._state}


@dataclasses.dataclass(eq=False)
class EarlyStop:
    """A stopping rule at work in one run."""

    rule: StoppingRule
    stopped_at: int | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        """Keep the first state of the rule."""
        self._first_state = copy.deepcopy(self.rule.state())

    def asks_to_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        """Return whether to stop after `step` with these metrics, the same on all processes."""
        if run_on_process_0(lambda: bool(self.rule.should_stop(metrics, step))):
            self.stopped_at = step
        return self.stopped_at is not None

    def message(self) -> str:
        """Return the line that reports why the run ended."""
        return f"stopped early after step {self.stopped_at}: {self.rule.reason()}"

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as JSON values."""
        return {
            "rule": stable_repr(self.rule),
            "state": self.rule.state(),
            "stopped_at": self.stopped_at,
        }

    def restore(self, record: Mapping[str, Any] | None, *, report: Callable[[str], None]) -> None:
        """Restore the state of the rule; without a record, or with other settings, reset it."""
        self.rule.set_state(copy.deepcopy(self._first_state))
        self.stopped_at = None
        if record is None:
            return
        if record["rule"] != stable_repr(self.rule):
            report(f"early stopping is reset, because its settings were {record['rule']}")
            return
        self.rule.set_state(record["state"])
        stopped_at = record["stopped_at"]
        self.stopped_at = None if stopped_at is None else int(stopped_at)
