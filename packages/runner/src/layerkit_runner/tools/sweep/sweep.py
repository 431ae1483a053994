"""The loop of a sweep: takes a trial, runs it, tells Optuna what came of it; in the end, a report.

What Ctrl-C and SIGTERM stop can go on: the trial under way saves and leaves, and stays this sweep's
to finish when the same command is started again.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from layerkit_inputs.extras import MissingExtraError
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.sweep.folder import SweepFolder
from layerkit_runner.tools.sweep.report import (
    TrialResult,
    best_of,
    results,
    shown,
    table,
    write_results,
)
from layerkit_runner.tools.sweep.search_space import override_text
from layerkit_runner.tools.sweep.study import OwnTrial, Study
from layerkit_runner.tools.sweep.study_file import StudyFile
from layerkit_runner.tools.sweep.trial_run import (
    Outcome,
    TrialMetrics,
    TrialProcess,
    UnknownMetricError,
    follow,
)

# So many trials that fail in a row, with none that has not, are a mistake of all of them.
_FAILURES_TO_GIVE_UP = 3


class StopRequests:
    """Notes Ctrl-C and SIGTERM while it is entered, on the main thread.

    Attributes:
      received: The signals that came, in order.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.received.append(number)

    def any(self) -> bool:
        """Whether the sweep is to leave."""
        return bool(self.received)

    def again(self) -> bool:
        """Whether Ctrl-C came a second time: leave at once."""
        return len(self.received) > 1 and self.received[-1] == signal.SIGINT


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep that is ready to run.

    Attributes:
      file: What to search.
      folder: Where.
      study: Opened.
      experiment: The full name.
      dataset: The part of the metric's name that is a data set's.
      command: The words of a trial's command, given the texts of its values by path and its folder.
      longer: The command that trains the best for longer, given the same texts and its steps.
      say: Takes each line for whoever watches.
    """

    file: StudyFile
    folder: SweepFolder
    study: Study
    experiment: str
    dataset: str
    command: Callable[[dict[str, str], str], list[str]]
    longer: Callable[[dict[str, str], int], str]
    say: Callable[[str], None]

    def run(self) -> int:
        """Runs trials until all are done, or until a signal; returns the exit code."""
        num_failed = 0
        with StopRequests() as stops:
            while not stops.any():
                own = self.study.take()
                if own is None:
                    break
                outcome = self._run_trial(own, stops)
                found = self._results()
                write_results(found, self.file, self.folder, experiment=self.experiment)
                num_failed = num_failed + 1 if outcome.state == "failed" else 0
                if num_failed >= _FAILURES_TO_GIVE_UP and best_of(found) is None:
                    self.say(f"{num_failed} trials failed one after another; this sweep gives up")
                    break
        found = self._results()
        self._report(found)
        if stops.received:
            self.say("the same command goes on with this sweep")
            return 128 + stops.received[0]
        return 0 if any(result.state in ("complete", "unfinished") for result in found) else 1

    def _run_trial(self, own: OwnTrial, stops: StopRequests) -> Outcome:
        folder, label = self.folder.trial(own.number), f"trial {own.number:04d}"
        goes_on = "goes on: " if own.is_resumed else ""
        values = ", ".join(f"{path}={shown(value)}" for path, value in own.values.items())
        self.say(f"{label}: {goes_on}{values}")
        texts = {path: override_text(value) for path, value in own.values.items()}
        name = self.file.metric.removeprefix(f"{self.dataset}/")
        metrics = TrialMetrics(folder / "metrics.jsonl", dataset=self.dataset, name=name)

        def report(step: int, value: float) -> None:
            if own.report(step, value):
                self.say(f"{label}: {self.file.metric} {value:.5g} at step {step}")

        began = time.monotonic()
        process = TrialProcess(folder, self.command(texts, str(folder)))
        try:
            outcome = follow(
                process,
                metrics,
                report=report,
                should_prune=own.should_prune,
                should_stop=stops.any,
                should_kill=stops.again,
            )
        except UnknownMetricError as error:
            process.close()
            # No fault of the trial, which goes on once the metric is spelt right.
            own.release()
            self.folder.forget_metric()
            raise UsageError(f"--study={self.file.path}: {error}") from error
        finally:
            process.close()
        self._end(own, outcome)
        took = f"{time.monotonic() - began:.0f} s"
        reason = f": {outcome.reason}" if outcome.reason else ""
        self.say(f"{label}: {outcome.state} at step {outcome.step}, {took}{reason}")
        return outcome

    def _end(self, own: OwnTrial, outcome: Outcome) -> None:
        if outcome.state == "stopped":
            own.release()
            return
        own.keep(step=outcome.step, reason=outcome.reason)
        if outcome.state == "complete" and outcome.value is not None:
            self.study.complete(own, outcome.value)
        elif outcome.state == "pruned":
            self.study.prune(own)
        else:
            self.study.fail(own)

    def _results(self) -> list[TrialResult]:
        return results(self.study.trials(), self.file, self.folder)

    def _report(self, found: Sequence[TrialResult]) -> None:
        # matplotlib and its fonts take a second, which only this waits for.
        from layerkit_runner.tools.sweep.picture import draw_sweep

        write_results(found, self.file, self.folder, experiment=self.experiment)
        for line in table(found, self.file):
            self.say(line)
        unfinished = [result for result in found if result.state == "unfinished"]
        if unfinished:
            self.say(f"{len(unfinished)} of {len(found)} trials are unfinished")
        try:
            self.say(f"picture: {draw_sweep(found, self.file, self.folder)}")
        except (ValueError, MissingExtraError) as error:
            self.say(f"no picture: {error}")
        best = best_of(found)
        if best is not None:
            texts = {path: override_text(value) for path, value in best.parameters.items()}
            self.say("next: the best of them, for twice as long")
            self.say(f"  {self.longer(texts, best.step)}")
