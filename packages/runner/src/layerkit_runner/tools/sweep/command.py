"""The command line of a sweep: `runner --exp=… --job_log_dir=DIR --study=FILE`.

Checks run in the order of their cost: the file and the fields of the experiment, the folder,
Optuna, and then the resolved experiment with its deeper fields and data sets. Nothing is
written before all checks have passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerkit.errors import first_names
from layerkit.near_names import near_names
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.flags import ParsedFlags, flag_word
from layerkit_runner.config.overrides import Override, parse_fields
from layerkit_runner.config.registry import ExperimentEntry, load_experiment
from layerkit_runner.errors import UsageError
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

# Flags of the sweep itself, and those of which each trial gets a value of its own.
_NOT_PASSED_ON = (
    *("exp", "fdl_config", "mode", "job_log_dir", "num_processes"),
    *("study", "num_trials", "study_storage"),
)
# A trial is a job of one process that starts from scratch.
_REFUSED = (
    *("coordinator_address", "process_id", "multiprocess_gpu"),
    *("restore_checkpoint_dir", "restore_checkpoint_step"),
)

Resolve = Callable[[Sequence[Override]], "ResolvedExperiment"]


def run_study(flags: ParsedFlags, entry: ExperimentEntry, resolve: Resolve) -> int:
    """Check a sweep, run it and return the exit code.

    Args:
      flags: Flags of the command, `--study` among them.
      entry: The experiment, not yet imported.
      resolve: Imports the experiment and applies overrides.

    Raises:
      UsageError: The command does not fit the file, the experiment or the folder; nothing was
        written.
    """
    file, folder = _checked(flags, entry)
    fixed, storage = flags.overrides, flags.options.study_storage
    resolved = resolve(fixed)
    file = dataclasses.replace(file, space=fitted_space(file, fixed, resolve, resolved))
    dataset = _dataset_of(file, resolved)
    # Loads Optuna and SQLAlchemy.
    from layerkit_runner.tools.sweep.sweep import Study, Sweep

    ours = description(file, experiment=resolved.name, fixed=fixed, storage=storage)
    check_same_sweep(folder, ours)
    with folder.deciding():
        # Another process may have started another sweep here since the first check.
        check_same_sweep(folder, ours)
        # The name stays as it began, also where the folder has been moved.
        recorded = {"name": f"{resolved.name} in {folder.path}", **(folder.recorded() or {})}
        folder.record({**recorded, **ours})
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
    """Check what can be checked before the experiment is resolved."""
    options = flags.options
    if options.study is None or options.job_log_dir is None:
        raise UsageError("--study=FILE needs a folder to write to: --job_log_dir=DIR")
    for name in _REFUSED:
        if name in flags.given:
            raise UsageError(f"--{name} does not go with --study: each trial is a job of its own.")
    if not options.eval_on_test:
        raise UsageError("--noeval_on_test does not go with --study: evaluations tell its metric.")
    if flags.given.get("num_processes", 1) != 1:
        raise UsageError(
            "--num_processes does not go with --study, whose trials are of one process; to run"
            " several trials at once, start the command several times."
        )
    file = read_study_file(options.study, num_trials=options.num_trials)
    annotations = experiment_fields(load_experiment(entry))
    check_fields(file, entry.name, flags.overrides, annotations)
    folder = SweepFolder(options.job_log_dir)
    if importlib.util.find_spec("optuna") is None:
        raise UsageError("--study needs optuna: pip install 'layerkit-runner[sweeps]'")
    return file, folder


def trial_words(
    flags: ParsedFlags, experiment: str, texts: Mapping[str, str], directory: str
) -> list[str]:
    """Return the arguments of a trial: those of the sweep, with its own values and folder."""
    overrides = {override.path: override.text for override in flags.overrides} | dict(texts)
    passed = {name: value for name, value in flags.given.items() if name not in _NOT_PASSED_ON}
    return [
        f"--exp={experiment}",
        *(f"--fdl.{path}={text}" for path, text in overrides.items()),
        *(flag_word(name, value) for name, value in passed.items()),
        f"--job_log_dir={directory}",
        # Without it, a trial below srun would wait for the processes of other sweeps.
        "--num_processes=1",
    ]


def fitted_space(
    file: StudyFile, fixed: Sequence[Override], resolve: Resolve, base: ResolvedExperiment
) -> dict[str, Parameter]:
    """Return the search space with ranges of floats where a field of `base` holds a float.

    A path that does not exist, and a value that does not fit there, is a UsageError.
    """
    # The experiment has been imported, so this loads nothing new.
    from layerkit_runner.config.config_text import config_json
    from layerkit_runner.config.experiment import experiment_fields

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
                    # Not resolved, since a value may need those of other searched fields.
                    held = parse_fields(base.name, annotations, [override])[path]
            except UsageError as error:
                raise UsageError(f"--study={file.path}: space.{path}: {error}") from error
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
        wanted = file.metric.partition("/")[0]
        raise UsageError(
            f"--study={file.path}: metric={file.metric!r} names no held-out data set"
            f"{near_names(wanted, names)} It is written DATASET/METRIC, and the data sets of"
            f" {resolved.name} are {first_names(names) or 'none'}."
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
    """Return what gives the results of a sweep their meaning, for `study.json`.

    The number of trials, the sampler and the pruner may change from one start to the next.
    """
    return {
        "experiment": experiment,
        "metric": study.metric,
        "direction": study.direction,
        "storage": _without_password(storage),
        "overrides": {override.path: override.text for override in fixed},
        "space": {path: parameter.described() for path, parameter in study.space.items()},
    }


def _without_password(storage: str | None) -> str | None:
    parts = urllib.parse.urlsplit(storage or "")
    if not parts.scheme or parts.password is None:
        return storage
    network = parts.netloc.replace(f":{parts.password}@", ":***@")
    return urllib.parse.urlunsplit(parts._replace(netloc=network))


def check_same_sweep(folder: SweepFolder, ours: Mapping[str, Any]) -> None:
    """Raise a UsageError that lists the differences if a folder holds another sweep."""
    recorded = folder.recorded()
    if recorded is None:
        return
    theirs, here = dict(_entries(recorded)), dict(_entries(ours))
    if theirs.get("metric") is None:  # no trial has reported it
        here.pop("metric")
    differences = [
        f"\n  {path}: {_shown(theirs.get(path))} there, {_shown(here.get(path))} here"
        for path in sorted(here.keys() | theirs.keys())
        if path.partition(".")[0] in ours and theirs.get(path) != here.get(path)
    ]
    if differences:
        raise UsageError(
            f"--job_log_dir={folder.given} holds another sweep; give each a folder of its own."
            + "".join(differences)
        )


def _entries(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if key in ("overrides", "space") and isinstance(value, dict):
            yield from ((f"{key}.{path}", entry) for path, entry in value.items())
        else:
            yield key, value


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
