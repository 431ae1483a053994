"""`--study=FILE`: check flags, file, folder, space and metric, and only then write and run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, distribution_to_json

from layerkit.config import assigned_fields
from layerkit.errors import UserError
from layerkit_runner.config.config_text import config_json
from layerkit_runner.config.config_tree import value_at
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.overrides import Override, parse_fields, parse_override
from layerkit_runner.config.requests import ParsedFlags, flag_word
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.tools.sweep.study_file import (
    StudyFile,
    as_floats,
    end_values,
    override_text,
    read_study_file,
)
from layerkit_runner.tools.sweep.sweep import Study, Sweep
from layerkit_runner.tools.sweep.trials import SweepFolder

if TYPE_CHECKING:
    from layerkit_runner.config.requests import ResolvedExperiment

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


def run_study(flags: ParsedFlags, resolve: Resolve) -> int:
    """Check a sweep, run it and return the exit code.

    Args:
      flags: Flags of the command, including `--study` and `--job_log_dir`.
      resolve: Function that imports the experiment and applies overrides.
    """
    problems = {
        f"--{name}": "Each trial is a job of one process that starts from scratch."
        for name in _UNSUPPORTED
        if name in flags.values
    }
    if not flags.options.eval_on_test:
        problems["--noeval_on_test"] = "Evaluations report the metric."
    if flags.values.get("num_processes", 1) != 1:
        problems["--num_processes"] = "Start the command several times for parallel trials."
    for flag, hint in problems.items():
        raise UsageError("not supported with --study", field=flag, hint=hint)
    options, fixed = flags.options, flags.overrides
    file = read_study_file(options.study or "", num_trials=options.num_trials)
    folder = SweepFolder(options.job_log_dir or "")
    with as_usage_error(UserError, owner=f"--study={file.path}"):
        resolved = resolve(fixed)
        file = dataclasses.replace(file, space=fit_space(file, fixed, resolve, resolved))
    dataset = _dataset_of(file, resolved)
    storage = options.study_storage
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


def trial_words(
    flags: ParsedFlags, experiment: str, texts: Mapping[str, str], directory: str
) -> list[str]:
    """Return the arguments of a trial: those of the sweep, with its values and folder."""
    overrides = {override.path: override.text for override in flags.overrides} | dict(texts)
    passed = {name: value for name, value in flags.values.items() if name not in _NOT_PASSED_ON}
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
) -> dict[str, BaseDistribution]:
    """Return the search space with ranges of floats for fields that hold a float."""
    annotations = experiment_fields(type(base.experiment))
    present = {**config_json(base)["config"], **vars(base.experiment)}
    setters = {f"space.{path}": path for path in file.space}
    setters |= {str(override): override.path for override in fixed}
    fitted = dict(file.space)
    for path, distribution in file.space.items():
        for setter, other in setters.items():
            is_part = f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
            if is_part and setter != f"space.{path}":
                hint = f"{setter} sets it as well; keep one of them."
                raise UsageError("field set twice", field=f"space.{path}", hint=hint)
        for value in end_values(distribution):
            override = parse_override(path, override_text(value))
            if override.is_deep:
                root, *names = path.split(".")
                held = value_at(getattr(resolve([*fixed, override]), root), names)
            else:
                # Not resolved, since a value may be valid only with those of other fields.
                held = parse_fields(base.name, annotations, [override])[path]
            # A field without an annotation has the type of its value.
            if isinstance(held, float) or isinstance(present.get(path), float):
                fitted[path] = as_floats(distribution)
    return fitted


def _dataset_of(file: StudyFile, resolved: ResolvedExperiment) -> str:
    """Return the name of the data set or program whose evaluation reports the metric."""
    from layerkit_runner.data.host_inputs import dataset_name

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
    from layerkit_runner.run.job_folder import command_line, longer

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
        # The address of a database, without its password.
        "storage": None if storage is None else re.sub(r":[^:/@]*@", ":***@", storage),
        **{f"overrides.{override.path}": override.text for override in fixed},
        **{f"space.{p}": json.loads(distribution_to_json(d)) for p, d in study.space.items()},
    }


def check_same_sweep(folder: SweepFolder, ours: Mapping[str, Any]) -> None:
    """Raise UsageError with the differences if a folder holds another sweep."""
    recorded = folder.read_record()
    if recorded is None:
        return
    # A record without a metric: no trial has reported the one that was asked for.
    skipped = ("name", "metric") if recorded.get("metric") is None else ("name",)
    differences = [
        f"\n  {path}: recorded {json.dumps(recorded.get(path))}, now {json.dumps(ours.get(path))}"
        for path in sorted({**ours, **recorded})
        if path not in skipped and recorded.get(path) != ours.get(path)
    ]
    if differences:
        raise UsageError(
            "the folder holds another sweep",
            field="--job_log_dir",
            value=folder.given,
            hint=f"Choose another folder, or restore these values:{''.join(differences)}",
        )
