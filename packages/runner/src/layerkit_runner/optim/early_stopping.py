"""When a run ends before its last step, because its evaluations no longer get better.

A `StoppingRule` decides; `EarlyStop` is a rule at work in one run. Process 0 asks the rule and
tells the others, so all leave together, and every checkpoint holds what the rule remembers: a
resumed run decides as an uninterrupted one, and one that has stopped does not train on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from layerkit.config import Configurable
from layerkit.near_names import near_names
from layerkit_runner.distributed.process_exchange import from_process_0
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.files.metric_paths import program_of

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class StoppingRule(Configurable):
    """Base of the rules; a subclass defines `should_stop`.

    A rule that remembers something between evaluations tells it by `state` and takes it back by
    `set_state`, or it would begin anew when a run is resumed.
    """

    def check(self, datasets: Iterable[str]) -> None:
        """Refuses settings that cannot work with these evaluated data sets, before a run begins.

        Raises:
          UsageError: what is wrong.
        """

    def should_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        """Whether training ends after `step` steps; asked on process 0 alone, of several.

        Args:
          metrics: What the evaluations and decodings of this step found, by `DATASET/METRIC` and
            `decode/DATASET/METRIC`. Data sets whose turn was not at this step are missing.
          step: Completed steps.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define should_stop")

    def reason(self) -> str:
        """Why it stopped, as the end of a sentence."""
        return f"{type(self).__qualname__} says so"

    def state(self) -> dict[str, Any]:
        """What it remembers, as JSON values."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` told."""


class EarlyStopping(StoppingRule):
    """Stops when a metric has not improved for some evaluations.

    The weights of the best evaluation stay if `save_best_metric` names the same metric; training
    ends with those of the last one.

    Attributes:
      metric: Written `DATASET/METRIC`, as in `heldout/loss`.
      patience: So many evaluations in a row without improvement end the run.
      min_delta: By how much a value has to be better than the best so far to count as improved.
      mode: `min` if a lower value is better, `max` if a higher one is.

    Raises:
      UsageError: a number out of range, or another mode.
    """

    metric: str
    patience: int = 1
    min_delta: float = 0.0
    mode: str = "min"

    def __post_init__(self) -> None:
        path = "task.early_stopping"
        if not self.patience >= 1:
            raise UsageError(f"{path}.patience={self.patience} must be at least 1")
        if not 0 <= self.min_delta < math.inf:
            raise UsageError(f"{path}.min_delta={self.min_delta} must be a finite number from 0")
        if self.mode not in ("min", "max"):
            raise UsageError(f"{path}.mode={self.mode!r} must be 'min' or 'max'")
        self._best: float | None = None
        self._best_step = 0
        self._without_improvement = 0
        # All that may be evaluated, where that is known.
        self._datasets: tuple[str, ...] = ()

    def check(self, datasets: Iterable[str]) -> None:
        self._datasets = tuple(datasets)
        if program_of(self.metric, self._datasets) is None:
            raise UsageError(
                f"task.early_stopping.metric={self.metric!r} names no data set that is evaluated"
                f" while training{near_names(self.metric.split('/')[0], self._datasets)} It is"
                f" written DATASET/METRIC, and these are {first_names(self._datasets) or 'none'}."
            )

    def should_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        if self.metric not in metrics:
            names = self._datasets or {name.rpartition("/")[0] for name in metrics}
            evaluated = {program_of(name, names) for name in metrics}
            if program_of(self.metric, names) in evaluated - {None}:
                raise UsageError(
                    f"task.early_stopping.metric={self.metric!r} is no metric of an evaluation"
                    f"{near_names(self.metric, metrics)} There are {first_names(metrics)}."
                )
            return False
        value = float(metrics[self.metric])
        if self._improves(value):
            self._best, self._best_step, self._without_improvement = value, step, 0
        else:
            self._without_improvement += 1
        return self._without_improvement >= self.patience

    def reason(self) -> str:
        count = self._without_improvement
        evaluations = "evaluation" if count == 1 else "evaluations"
        if self._best is None:
            return f"{self.metric} was no number in {count} {evaluations}"
        return (
            f"{self.metric} did not improve on {self._best:.6g} of step {self._best_step} in"
            f" {count} {evaluations}"
        )

    def state(self) -> dict[str, Any]:
        return {
            "best": self._best,
            "best_step": self._best_step,
            "without_improvement": self._without_improvement,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._best = state["best"]
        self._best_step = state["best_step"]
        self._without_improvement = state["without_improvement"]

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self._best is None:
            return True
        gain = self._best - value if self.mode == "min" else value - self._best
        return gain > self.min_delta


class EarlyStop:
    """A rule at work in one run.

    Attributes:
      rule: It decides.
      stopped_at: After how many steps it ended the run; None as long as it has not.
    """

    def __init__(self, rule: StoppingRule) -> None:
        self.rule = rule
        self.stopped_at: int | None = None

    def asks_to_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        """Shows the rule what a step found; whether to stop, the same on all processes."""
        if from_process_0(lambda: bool(self.rule.should_stop(metrics, step))):
            self.stopped_at = step
        return self.stopped_at is not None

    def message(self) -> str:
        """What to say of a run that it ended."""
        return f"stopped early after step {self.stopped_at}: {self.rule.reason()}"

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values."""
        return {
            "rule": _text(self.rule),
            "state": self.rule.state(),
            "stopped_at": self.stopped_at,
        }

    def restore(self, record: Mapping[str, Any], *, report: Callable[[str], None]) -> None:
        """Goes on from what a checkpoint kept; a rule with other settings begins anew.

        Args:
          record: See `record`.
          report: Takes a message.
        """
        if record["rule"] != _text(self.rule):
            report(f"early stopping begins anew: it was {record['rule']}")
            return
        self.rule.set_state(record["state"])
        self.stopped_at = record["stopped_at"]


def _text(rule: StoppingRule) -> str:
    """The rule and its settings; addresses differ from run to run and say nothing."""
    return _ADDRESS.sub("", repr(rule))
