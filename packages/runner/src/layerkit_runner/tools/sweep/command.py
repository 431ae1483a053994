"""The command line of a sweep: `runner --exp=… --job_log_dir=DIR --study=FILE`.

Checks run in the order of their cost: the file and the fields of the experiment, the folder,
Optuna, and then the resolved experiment with its deeper fields and data sets. Nothing is written
before all checks have passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.flags import ParsedFlags, flag_word
from layerkit_runner.config.overrides import Override, parse_fields
from layerkit_runner.config.registry import ExperimentEntry, load_experiment
from layerkit_runner.errors import UsageError, to_usage_error
from layerkit_runner.tools.sweep.study_file import (
    Parameter,
    Range,
    StudyFile,
    check_fields,
    override_text,
    read_study_file,
)
from layerkit_runner.tools.sweep.trials import SweepFolder

if TYPE_CHECKING:
    from layerkit_runner.config.resolve import ResolvedExperiment

# Flags of the sweep itself, and flags with another value for each trial.
_NOT_PASSED_ON = (
    *("exp", "fdl_config", "mode", "job_log_dir", "num_processes"),
    *("study", "num_trials", "study_storage"),
)
_UNSUPPORTED = (
    *("coordinator_address", "process_id", "multiprocess_gpu"),
    *("restore_checkpoint_dir", "restore_checkpoint_step"),
)

Resolve = Callable[[Sequence[Override]], "ResolvedExperiment"]


def run_study(flags: ParsedFlags, entry: ExperimentEntry, resolve: Resolve) -> int:
    """Check a sweep, run it and return the exit code.

    Args:
      flags: Flags of the command, including `--study` and `--job_log_dir`.
      entry: Experiment, not yet imported.
      resolve: Function that imports the experiment and applies overrides.

    Raises:
      UsageError: The command contradicts the file, the experiment or the folder.
    """
    file, folder = _checked(flags, entry)
    fixed, storage = flags.overrides, flags.options.study_storage
    resolved = resolve(fixed)
    file = dataclasses.replace(file, space=fit_space(file, fixed, resolve, resolved))
    dataset = _dataset_of(file, resolved)
    # Loads Optuna and SQLAlchemy.
    from layerkit_runner.tools.sweep.sweep import Study, Sweep

    ours = description(file, experiment=resolved.name, fixed=fixed, storage=storage)
    check_same_sweep(folder, ours)
    with folder.locked():
        # Another process may have started another sweep here since the first check.
        check_same_sweep(folder, ours)
        # The name does not change if the folder is moved.
        recorded = {"name": f"{resolved.name} in {folder.path}", **(folder.read_record() or {})}
        folder.write_record({**recorded, **ours})
    with contextlib.closing(Study(file, folder, name=recorded["name"], storage=storage)) as study:
        return Sweep(
            file=file,
            folder=folder,
            study=study,
            experiment=resolved.name,
            dataset=dataset,
            command=lambda texts, directory: trial_words(flags, resolved.name, texts, directory),
            longer=lambda texts, step: _longer(flags, resolved, texts, step),
        ).run()


def _checked(flags: ParsedFlags, entry: ExperimentEntry) -> tuple[StudyFile, SweepFolder]:
    """Return the study file and the folder, checked against the unresolved experiment."""
    options = flags.options
    unsupported = {
        f"--{name}": "Each trial is a job of one process that starts from scratch."
        for name in _UNSUPPORTED
        if name in flags.given
    }
    if not options.eval_on_test:
        unsupported["--noeval_on_test"] = "Evaluations report the metric."
    if flags.given.get("num_processes", 1) != 1:
        unsupported["--num_processes"] = "Start the command several times for parallel trials."
    for flag, hint in unsupported.items():
        raise UsageError("not supported with --study", field=flag, hint=hint)
    file = read_study_file(options.study or "", num_trials=options.num_trials)
    annotations = experiment_fields(load_experiment(entry))
    check_fields(file, entry.name, flags.overrides, annotations)
    folder = SweepFolder(options.job_log_dir or "")
    if importlib.util.find_spec("optuna") is None:
        hint = "Install it: pip install 'layerkit-runner[sweeps]'"
        raise UsageError("optuna is not installed", field="--study", hint=hint)
    return file, folder


def trial_words(
    flags: ParsedFlags, experiment: str, texts: Mapping[str, str], directory: str
) -> list[str]:
    """Return the arguments of a trial: those of the sweep, with its values and folder."""
    overrides = {override.path: override.text for override in flags.overrides} | dict(texts)
    passed = {name: value for name, value in flags.given.items() if name not in _NOT_PASSED_ON}
    return [
        f"--exp={experiment}",
        *(f"--fdl.{path}={text}" for path, text in overrides.items()),
        *(flag_word(name, value) for name, value in passed.items()),
        f"--job_log_dir={directory}",
        # Without it, a trial under srun would wait for the processes of other tasks.
        "--num_processes=1",
    ]


def fit_space(
    file: StudyFile, fixed: Sequence[Override], resolve: Resolve, base: ResolvedExperiment
) -> dict[str, Parameter]:
    """Return the search space with ranges of floats for fields that hold a float.

    Args:
      file: Study file.
      fixed: Overrides of the command line.
      resolve: Function that applies overrides to the experiment.
      base: Experiment with the fixed overrides.

    Raises:
      UsageError: A path does not exist, or a value has the wrong type.
    """
    # The experiment has imported the modules that this import needs.
    from layerkit_runner.config.config_text import config_json

    annotations = experiment_fields(type(base.experiment))
    present = {**config_json(base)["config"], **vars(base.experiment)}
    fitted = dict(file.space)
    for path, parameter in file.space.items():
        for value in parameter.samples():
            override = Override(path, override_text(value))
            try:
                if override.is_deep:
                    held = config_json(resolve([*fixed, override]))["config"][path]
                else:
                    # Not resolved, since a value may be valid only with those of other fields.
                    held = parse_fields(base.name, annotations, [override])[path]
            except UsageError as error:
                raise to_usage_error(error, owner=f"--study={file.path}") from error
            # A field without an annotation has the type of its value.
            is_float = isinstance(held, float) or isinstance(present.get(path), float)
            if isinstance(parameter, Range) and is_float:
                fitted[path] = parameter.as_floats()
    return fitted


def _dataset_of(file: StudyFile, resolved: ResolvedExperiment) -> str:
    """Return the name of the data set or program whose evaluation reports the metric."""
    from layerkit.config import assigned_fields
    from layerkit_runner.data.infeed import dataset_name

    if resolved.eval_programs is None:
        names = [dataset_name(config) for config in resolved.datasets if not config.is_training]
    else:
        fields = [assigned_fields(config) for config in resolved.eval_programs]
        names = [str(given.get("name", given.get("dataset"))) for given in fields]
    found = [name for name in names if file.metric.startswith(f"{name}/")]
    if not found:
        name = file.metric.partition("/")[2]
        raise UsageError(
            owner=f"--study={file.path}",
            field="metric",
            value=file.metric,
            expected=f"DATASET/METRIC with a data set that {resolved.name} evaluates",
            choices=[f"{dataset}/{name}" for dataset in names],
        )
    return max(found, key=len)


def _longer(
    flags: ParsedFlags, resolved: ResolvedExperiment, texts: Mapping[str, str], step: int
) -> str:
    from layerkit_runner.trainer.job_folder import command_line, longer

    given = (flags.options.job_log_dir or "").rstrip("/")
    options = dataclasses.replace(flags.options, job_log_dir=f"{given}/best")
    changes = {**texts, **longer(resolved, 2 * step)}
    return command_line(resolved, options, changes=changes)


def description(
    study: StudyFile, *, experiment: str, fixed: Sequence[Override], storage: str | None
) -> dict[str, Any]:
    """Return the properties of a sweep that must not change, for `study.json`.

    The number of trials, the sampler and the pruner may differ when a sweep is resumed.
    """
    return {
        "experiment": experiment,
        "metric": study.metric,
        "direction": study.direction,
        "storage": _without_password(storage),
        "overrides": {override.path: override.text for override in fixed},
        "space": {path: parameter.to_json() for path, parameter in study.space.items()},
    }


def _without_password(storage: str | None) -> str | None:
    parts = urllib.parse.urlsplit(storage or "")
    if not parts.scheme or parts.password is None:
        return storage
    network = parts.netloc.replace(f":{parts.password}@", ":***@")
    return urllib.parse.urlunsplit(parts._replace(netloc=network))


def check_same_sweep(folder: SweepFolder, ours: Mapping[str, Any]) -> None:
    """Raise UsageError with the differences if a folder holds another sweep."""
    recorded = folder.read_record()
    if recorded is None:
        return
    theirs, here = dict(_entries(recorded)), dict(_entries(ours))
    if theirs.get("metric") is None:  # no trial has reported the metric
        here.pop("metric")
    differences = [
        f"\n  {path}: recorded {_shown(theirs.get(path))}, now {_shown(here.get(path))}"
        for path in sorted(here.keys() | theirs.keys())
        if path.partition(".")[0] in ours and theirs.get(path) != here.get(path)
    ]
    if differences:
        raise UsageError(
            "the folder holds another sweep",
            field="--job_log_dir",
            value=folder.given,
            hint=f"Choose another folder, or restore these values:{''.join(differences)}",
        )


def _entries(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if key in ("overrides", "space") and isinstance(value, dict):
            yield from ((f"{key}.{path}", entry) for path, entry in value.items())
        else:
            yield key, value


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
