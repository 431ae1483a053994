"""`--study=FILE`: ask Optuna for trials, run each one and tell its result (docs/sweeps.md)."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import optuna
import sqlalchemy
from optuna import distributions, pruners, samplers
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from layerkit.config.checks import check_sizes, require
from layerkit.config.field_types import MISMATCH, field_annotations
from layerkit.errors import UserError
from layerkit_runner.config.recorded import FIRST_START_FLAGS
from layerkit_runner.config.requests import (
    Override,
    ParsedFlags,
    ResolvedExperiment,
    field_overrides,
    flag_word,
    merge_overrides,
)
from layerkit_runner.data.host_inputs import dataset_name
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import open_append
from layerkit_runner.files.bounded_documents import parse_json, parse_toml, read_text
from layerkit_runner.files.text import draw_table
from layerkit_runner.observers.metrics_log import metric_series, metrics_path, read_metrics
from layerkit_runner.run.job_folder import lock, try_lock
from layerkit_runner.run_options import STUDY_FLAGS

# Flags with another value for each trial, and those of the sweep itself.
_NOT_PASSED_ON = ("exp", "fdl_config", "job_log_dir", *STUDY_FLAGS)
# Other flags that change what a trial computes.
_OF_TRAINING = ("reduced", *FIRST_START_FLAGS)
# The parameter that is the position of a trial in a list; no field of an experiment has this name.
_LISTED = "trial"
_TRIALS = "trials"
# The attribute of a study with all that may not change. It is one, so that it is written at once.
_RECORD = "layerkit"


@dataclasses.dataclass
class StudyFile:
    """Content of a study file; `space` holds Optuna's distributions by override path.

    `trials` lists the values of each trial by path, in place of a space. `larger` has those of the
    run that `runner scaling` predicts, which is no trial.
    """

    metric: str
    space: dict[str, Any] = dataclasses.field(default_factory=dict)
    direction: Literal["minimize", "maximize"] = "minimize"
    num_trials: int = 20
    sampler: dict[str, Any] = dataclasses.field(default_factory=lambda: {"name": "tpe"})
    pruner: dict[str, Any] = dataclasses.field(default_factory=lambda: {"name": "nop"})
    trials: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    larger: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make_sampler(self, number: int) -> samplers.BaseSampler:
        """Return the sampler of the trial with a number.

        Its seed is the study's seed plus the number. So a resumed sweep draws the values of an
        uninterrupted one, and two processes never draw the same values.
        """
        if self.trials:
            return samplers.PartialFixedSampler({_LISTED: number}, samplers.RandomSampler())
        options = {"seed": 0, **self.sampler}
        if options["name"] == "grid":
            if not all(hasattr(axis, "choices") for axis in self.space.values()):
                raise UsageError(field="sampler", value="grid", expected="choices for every field")
            options["search_space"] = {path: axis.choices for path, axis in self.space.items()}
        else:
            options["seed"] += number
        if options["name"] == "tpe":  # avoids the values of trials that run in other processes
            options = {"constant_liar": True, **options}
        return _make("Sampler", samplers, **options)

    def record(self) -> dict[str, Any]:
        """Return what may not change while trials are added."""
        space = {path: distributions.distribution_to_json(d) for path, d in self.space.items()}
        listed = {_TRIALS: [_words(trial) for trial in self.trials]}
        return {
            "metric": self.metric,
            "direction": self.direction,
            **(listed if self.trials else space),
        }

    def overrides(self, params: Mapping[str, Any]) -> list[Override]:
        """Return the overrides of the parameters of a trial."""
        values = self.trials[params[_LISTED]] if _LISTED in params else params
        return field_overrides(values)


def read_study_file(path: str, *, num_trials: int | None = None) -> StudyFile:
    """Read a study file in TOML or JSON; `num_trials` overrides the number in it."""
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    with as_usage_error(Exception, owner=f"--study={path}"):
        text = read_text(Path(path).expanduser(), max_bytes=100_000)
        document = (parse_json if path.endswith(".json") else parse_toml)(text)
        names = [field.name for field in dataclasses.fields(StudyFile)]
        for key in document.keys() - {*names}:
            raise UsageError("unknown key", value=key, choices=names)
        for key, default in {"sampler": "tpe", "pruner": "nop"}.items():
            match document.get(key):
                case str(name):
                    document[key] = {"name": name}
                case dict(options):
                    document[key] = {"name": default, **options}
        for key, value in document.items():
            kind = field_annotations(StudyFile)[key]
            require(kind.fit(value) is not MISMATCH, None, key, value, kind, UsageError)
        file = StudyFile(**document)
        check_sizes(None, num_trials=file.num_trials)
        if bool(file.space) == bool(file.trials):
            raise UsageError(field="space, trials", value=[*document], expected="one of them")
        if file.trials:
            for key in document.keys() & {"num_trials", "sampler"}:
                raise UsageError(field=key, value=document[key], expected="none beside trials")
            file.num_trials = most = len(file.trials)
            is_listed, expected = (num_trials or 1) <= most, f"at most {most}, the listed trials"
            require(is_listed, None, "--num_trials", num_trials, expected, UsageError)
            file.space = {_LISTED: {"low": 0, "high": most - 1}}
        file.space = {path: _distribution(path, axis) for path, axis in file.space.items()}
        file.num_trials = num_trials or file.num_trials
        if isinstance(sampler := file.make_sampler(0), samplers.GridSampler):
            most = len(sampler._all_grids)
            file.num_trials = min(most, num_trials or document.get("num_trials", most))
        _make("Pruner", pruners, **file.pruner)
    return file


def _make(kind: str, module: Any, *, name: str, **options: Any) -> Any:
    """Return an instance of Optuna's class of a name such as `successive_halving`."""
    classes = {n.removesuffix(kind).lower(): n for n in module.__all__ if n.endswith(kind)}
    key = {"none": "nop"}.get(name, name.replace("_", ""))
    if key not in classes:
        raise UsageError(field=kind.lower(), value=name, choices=classes)
    return getattr(module, classes[key])(**options)


def _distribution(path: str, entry: Mapping[str, Any]) -> Any:
    try:
        if "choices" not in entry:
            kind = "Float" if float in map(type, entry.values()) else "Int"
            return getattr(distributions, f"{kind}Distribution")(**entry)
        # Optuna stores plain values. Others, such as a list, are given as their text.
        choices = [repr(v) if isinstance(v, list | dict) else v for v in entry["choices"]]
        return distributions.CategoricalDistribution(choices)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error), field=f"space.{path}", value=entry) from error


def run_study(flags: ParsedFlags, resolve: Callable[..., ResolvedExperiment]) -> int:
    """Check and run the sweep of `--study` in `--job_log_dir`; return the exit code.

    `resolve` imports the experiment and applies a list of overrides.
    """
    options, fixed = flags.options, flags.overrides
    file = read_study_file(options.study or "", num_trials=options.num_trials)
    with as_usage_error(UserError, owner=f"--study={options.study}"):
        resolved = resolve(fixed)
        resolve(merge_overrides([*fixed, *file.overrides(file.larger)]))
        for path, axis in file.space.items():
            ends = getattr(axis, "choices", None) or (axis.low, axis.high)
            for value in range(len(file.trials)) or ends:
                resolve(merge_overrides([*fixed, *file.overrides({path: value})]))
        prefixes = tuple(f"{dataset_name(c)}/" for c in resolved.datasets if not c.is_training)
        if resolved.eval_programs is None and not file.metric.startswith(prefixes):
            choices = [prefix + file.metric.partition("/")[2] for prefix in prefixes]
            raise UsageError(field="metric", value=file.metric, choices=choices)
    directory = options.job_log_dir or ""
    if "://" in directory:
        raise UsageError(field="--job_log_dir", value=directory, expected="a folder with locks")
    folder = Path(directory).expanduser().resolve()
    words = [f"--exp={resolved.name}", *map(str, fixed)]
    passed = {name: value for name, value in flags.values.items() if name not in _NOT_PASSED_ON}
    record = file.record() | {
        "experiment": " ".join([words[0], *sorted(words[1:])]),
        # A record from a file has lists in place of tuples.
        **{f"--{name}": json.loads(json.dumps(passed.get(name))) for name in _OF_TRAINING},
    }
    with lock(folder / "study.lock"):
        study = open_study(file, folder, options.study_storage, record)
    words += [flag_word(name, value) for name, value in passed.items()]
    return Sweep(file, folder, study, words).run()


def open_study(
    file: StudyFile, folder: Path, address: str | None, record: dict[str, Any]
) -> optuna.Study:
    """Open or create the study; raise an error if it began with another record."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = sqlalchemy.URL.create("sqlite", database=str(folder / "study.db"))
    storage: Any = address or url.render_as_string()
    try:
        if "://" not in storage:
            storage = optuna.storages.JournalStorage(JournalFileBackend(storage))
        study = optuna.create_study(
            storage=storage,
            study_name=str(folder) if address else "sweep",
            direction=file.direction,
            pruner=_make("Pruner", pruners, **file.pruner),
            load_if_exists=True,
        )
    except Exception as error:  # each database driver has other errors
        raise UsageError(f"cannot open the study: {error}", owner=address) from error
    old, trials = study.user_attrs.get(_RECORD), study.get_trials()
    if old is None:
        folders = [path.name for path in folder.glob("trials/*")]
        is_new, expected = not (folders or trials), "none, since the storage has no study of them"
        require(is_new, str(folder), "trials", folders or len(trials), expected, UsageError)
        old = record
    elif not any(trial.intermediate_values for trial in trials):
        old["metric"] = record["metric"]  # no trial has reported the first metric
    for key in {**old, **record}:
        was, value = old.get(key), record.get(key)
        if was and key == _TRIALS and value:
            value = value[: len(was)]  # The list may have grown.
        if was != value:
            expected = f"{was!r}, with which the sweep in this folder began"
            raise UsageError(field=key, value=record.get(key), expected=expected)
    study.set_user_attr(_RECORD, record)
    return study


@dataclasses.dataclass
class Sweep:
    """A loop over trials; `words` are the arguments of `runner` without the values of a trial."""

    file: StudyFile
    folder: Path
    study: optuna.Study
    words: Sequence[str]
    stops: list[int] = dataclasses.field(default_factory=list)

    def run(self) -> int:
        """Run trials until all have ended or a signal is received; return the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self.stops.append(number))
        ended = {t.number for t in self.study.get_trials() if t.state.is_finished()}
        failed: list[str] = []
        while not (self.stops or failed) and (claimed := self._ask()):
            with claimed[1]:
                self._run_trial(*claimed)
            failed = self._first_failures(ended)
        self._report()
        if self.stops:
            print("the same command resumes this sweep", flush=True)
            return 128 + self.stops[0]
        if failed:
            output = self.folder / "trials" / failed[0] / "output.txt"
            print(f"the first three trials failed ({', '.join(failed)}): see {output}", flush=True)
            return 1
        bad = {TrialState.PRUNED, TrialState.FAIL}
        return int(bad >= {trial.state for trial in self.study.get_trials()})

    def _first_failures(self, ended: Collection[int]) -> list[str]:
        """Return the names of the first three trials if they failed and no trial succeeds, or [].

        All trials then probably have the same cause. Trials that had `ended` before this process
        began are not among the three, so that the sweep can be resumed when the cause is removed.
        A trial that runs in another process succeeds if it has reported the metric.
        """
        trials = [trial for trial in self.study.get_trials() if trial.params]
        states = {t.state for t in trials if t.state.is_finished() or t.intermediate_values}
        first = [trial for trial in trials if trial.number not in ended][:3]
        if states != {TrialState.FAIL} or [t.state for t in first] != 3 * [TrialState.FAIL]:
            return []
        return [f"{trial.number:04d}" for trial in first]

    def _ask(self) -> tuple[Trial, IO[bytes]] | None:
        """Return a trial and its lock: one that lost its process, or a new one; None at the end.

        A trial that is running according to Optuna, and whose lock is free, has lost its process.
        It is resumed with its values from the checkpoint in its folder.
        """
        space = self.file.space
        with lock(self.folder / "study.lock"):
            trials = self.study.get_trials()
            for old in trials:
                is_running = old.state == TrialState.RUNNING and len(old.params) == len(space)
                # Another process may have read a longer list.
                is_known = old.params.get(_LISTED, -1) < len(self.file.trials)
                if is_running and is_known and (held := self._try_lock(old.number)):
                    return Trial(self.study, old._trial_id), held
            if sum(bool(old.params) for old in trials) >= self.file.num_trials:
                return None
            self.study.sampler = self.file.make_sampler(sum(bool(old.params) for old in trials))
            trial = self.study.ask(space)
            # Optuna would also call the sampler of the study when the trial ends.
            self.study.sampler = samplers.RandomSampler()
            return (trial, held) if (held := self._try_lock(trial.number)) else None

    def _try_lock(self, number: int) -> IO[bytes] | None:
        return try_lock(self.folder / "trials" / f"{number:04d}" / "trial.lock")

    def _run_trial(self, trial: Trial, held: IO[bytes]) -> None:
        """Run the process of a trial and tell Optuna its end."""
        folder, label = Path(held.name).parent, f"trial {trial.number:04d}"
        fields = [*map(str, self.file.overrides(trial.params))]
        print(f"{label}: {' '.join(fields)}", flush=True)
        words = [*self.words, *fields, f"--job_log_dir={folder}", "--num_processes=1"]
        with open_append(folder / "output.txt") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "layerkit_runner.cli", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the sweep receives Ctrl-C and stops the trial
                pass_fds=[held.fileno()],  # the lock is free when both processes have ended
            )
        values = dict(self.study.get_trials()[trial.number].intermediate_values)
        state, code, num_sent = TrialState.COMPLETE, None, 0
        try:
            while code is None:
                time.sleep(0.5)
                code = process.poll()
                log = metrics_path(folder)
                metrics = read_metrics(log) if log.exists() else None
                evals = {} if metrics is None else metrics.evals
                for step, value in metric_series(evals, self.file.metric):
                    if step not in values and state == TrialState.COMPLETE:
                        print(f"{label}: {self.file.metric} {value:.5g} at step {step}", flush=True)
                        trial.report(value, step)
                        values[step] = value
                        if not math.isfinite(value):
                            state = TrialState.FAIL
                        elif code is None and trial.should_prune():
                            state = TrialState.PRUNED
                signals = [*self.stops, *[signal.SIGTERM] * (state != TrialState.COMPLETE)]
                if code is None and len(signals) > num_sent:
                    process.send_signal(signals[num_sent])
                    num_sent += 1
        finally:
            if code is None:  # the metric is unknown
                process.terminate()
                process.wait()
        ends = [] if metrics is None else [event.get("reason") for event in metrics.events[-1:]]
        is_over = code == 0 and ends != ["stopped by a signal"]
        if code == 0 and not is_over and state == TrialState.COMPLETE:
            print(f"{label}: saved on demand and stopped; it is resumed", flush=True)
            return
        if is_over and values and state != TrialState.FAIL:
            state = TrialState.COMPLETE
        elif self.stops and state == TrialState.COMPLETE:
            return
        elif state == TrialState.COMPLETE:
            state = TrialState.FAIL
            lines = (folder / "output.txt").read_text(errors="replace").splitlines()
            # JAX adds advice below the line with the error.
            errors = [line for line in lines[-50:] if "Error" in line or "runner: " in line]
            if code == 0 and not values:
                errors = [f"no {self.file.metric}; evaluated were {', '.join(evals) or 'no data'}"]
            trial.set_user_attr("reason", f"exit code {code}: {['no output', *lines, *errors][-1]}")
        last = values[max(values)] if state == TrialState.COMPLETE else None
        self.study.tell(trial.number, last, state=state)
        print(f"{label}: {state.name.lower()}", flush=True)

    def _report(self) -> None:
        """Print the trials from best to worst."""
        rows = []
        for trial in self.study.get_trials():
            values = trial.intermediate_values
            value = values[max(values)] if values else math.nan
            order = value if self.file.direction == "minimize" else -value
            cells = [f"{trial.number:04d}", f"{value:.5g}", trial.state.name.lower()]
            cells += [f"{max(values, default=0)}", trial.user_attrs.get("reason", "")]
            params = trial.params
            if _LISTED in params:
                params = {_LISTED: self.study.user_attrs[_RECORD][_TRIALS][params[_LISTED]]}
            cells += [str(params.get(path, "")) for path in self.file.space]
            rows.append((trial.state != TrialState.COMPLETE, not values, order, cells))
        rows.sort()
        head = ["trial", self.file.metric, "state", "step", "reason", *self.file.space]
        print("\n".join(draw_table((cells for *_, cells in rows), head=head)), flush=True)


def _words(trial: Mapping[str, Any]) -> str:
    """Return the values of a listed trial as shell words."""
    return shlex.join(f"{one.path}={one.text}" for one in field_overrides(trial))
