"""`runner --exp=… --job_log_dir=DIR --study=FILE`: from the command line to a sweep.

In the order of what it costs: the file and the fields that are known without an import, the folder,
Optuna, and then the experiment, which tells the deeper fields and the data sets. Nothing is written
before all of it is found right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerkit.near_names import near_names
from layerkit_runner.config.flags import ParsedFlags
from layerkit_runner.config.overrides import Override, parse_fields
from layerkit_runner.config.run_words import flag_word
from layerkit_runner.errors import UsageError, first_names
from layerkit_runner.tools.sweep.folder import SweepFolder, check_same_sweep, description
from layerkit_runner.tools.sweep.search_space import Parameter, Range, override_text
from layerkit_runner.tools.sweep.study_file import StudyFile, check_fields, read_study_file

if TYPE_CHECKING:
    from layerkit_runner.config.registry import ExperimentEntry
    from layerkit_runner.config.resolve import ResolvedExperiment

# Flags that are the sweep's own, or that each trial gets a value of its own for.
_NOT_PASSED_ON = (
    "exp",
    "fdl_config",
    "mode",
    "job_log_dir",
    "study",
    "num_trials",
    "study_storage",
    "num_processes",
)
# A trial is one process, which is not told of others.
_REFUSED = (
    "coordinator_address",
    "process_id",
    "multiprocess_gpu",
    "restore_checkpoint_dir",
    "restore_checkpoint_step",
)

Resolve = Callable[[Sequence[Override]], "ResolvedExperiment"]


def run_study(flags: ParsedFlags, entry: ExperimentEntry, resolve: Resolve) -> int:
    """Checks a sweep, runs it and returns the exit code.

    Args:
      flags: With `--study`.
      entry: The experiment.
      resolve: Imports the experiment and applies these overrides.

    Raises:
      UsageError: something does not fit; nothing was written.
    """
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
    annotations = {name: field.annotation for name, field in entry.fields.items()}
    check_fields(file, entry.name, flags.overrides, annotations if entry.complete else None)
    folder = SweepFolder(options.job_log_dir)
    if importlib.util.find_spec("optuna") is None:
        raise UsageError("--study needs optuna: pip install 'layerkit-runner[sweeps]'")
    resolved = resolve(flags.overrides)
    file = dataclasses.replace(file, space=fitted_space(file, flags.overrides, resolve, resolved))
    dataset = _dataset_of(file, resolved)
    ours = description(
        file, experiment=resolved.name, fixed=flags.overrides, storage=options.study_storage
    )
    check_same_sweep(folder, ours)
    return _run(flags, file, folder, resolved, dataset=dataset, ours=ours)


def _run(
    flags: ParsedFlags,
    file: StudyFile,
    folder: SweepFolder,
    resolved: ResolvedExperiment,
    *,
    dataset: str,
    ours: Mapping[str, Any],
) -> int:
    # Loads Optuna and SQLAlchemy.
    from layerkit_runner.tools.sweep.study import Study
    from layerkit_runner.tools.sweep.sweep import Sweep

    with folder.deciding():
        # Somebody else may have begun another sweep here since.
        check_same_sweep(folder, ours)
        # Its name stays as it began, also where the folder has moved since.
        recorded = {"name": f"{resolved.name} in {folder.path}", **(folder.recorded() or {})}
        folder.record({**recorded, **ours})
    study = Study(file, folder, name=recorded["name"], storage=flags.options.study_storage)
    with contextlib.closing(study):
        sweep = Sweep(
            file=file,
            folder=folder,
            study=study,
            experiment=resolved.name,
            dataset=dataset,
            command=lambda texts, directory: trial_words(flags, resolved.name, texts, directory),
            longer=lambda texts, step: _longer(flags, resolved, texts, step),
            say=lambda line: print(line, flush=True),
        )
        return sweep.run()


def trial_words(
    flags: ParsedFlags, experiment: str, texts: Mapping[str, str], directory: str
) -> list[str]:
    """The words of a trial's command: those of the sweep, with values and a folder of its own."""
    overrides = {override.path: override.text for override in flags.overrides} | dict(texts)
    passed = {name: value for name, value in flags.given.items() if name not in _NOT_PASSED_ON}
    return [
        f"--exp={experiment}",
        *(f"--fdl.{path}={text}" for path, text in overrides.items()),
        *(flag_word(name, value) for name, value in passed.items()),
        f"--job_log_dir={directory}",
        # Whatever started the sweep, as srun does several at once, started no processes of trials.
        "--num_processes=1",
    ]


def fitted_space(
    file: StudyFile, fixed: Sequence[Override], resolve: Resolve, base: ResolvedExperiment
) -> dict[str, Parameter]:
    """The search space as the fields take it: ranges are of floats where the field holds one.

    Args:
      file: What to search.
      fixed: Overrides of all trials.
      resolve: Applies overrides to the experiment.
      base: The experiment with those of all trials alone.

    Raises:
      UsageError: a path leads nowhere, or a value does not fit there.
    """
    # Loads nothing new: the experiment has been imported.
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
                    # Not resolved: a value may need those of other fields that are searched too.
                    held = parse_fields(base.name, annotations, [override])[path]
            except UsageError as error:
                raise UsageError(f"--study={file.path}: space.{path}: {error}") from error
            # Fields without a type, such as a learning rate, are known by what they hold.
            is_float = isinstance(held, float) or isinstance(present.get(path), float)
            if isinstance(parameter, Range) and is_float:
                fitted[path] = parameter.as_floats()
    return fitted


def _dataset_of(file: StudyFile, resolved: ResolvedExperiment) -> str:
    """The evaluation that reports the metric: a data set's name, or that of a program.

    Raises:
      UsageError: there is none.
    """
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
    # Loads the file system library, which no sweep needs before its end.
    from layerkit_runner.trainer.job_folder import command_line, longer

    given = (flags.options.job_log_dir or "").rstrip("/")
    options = dataclasses.replace(flags.options, job_log_dir=f"{given}/best")
    changes = {**texts, **longer(resolved, 2 * step)}
    return command_line(resolved, options, changes=changes)
