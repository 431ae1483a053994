"""`runner scaling plan | fit | grade`: a ladder of runs, their law, and a graded prediction.

runner scaling plan --exp=NAME --flops=1e12,1e13 --predict=1e14 --job_log_dir=DIR
runner --exp=NAME --study=DIR/ladder.toml --job_log_dir=DIR
runner scaling fit DIR        print the law of the rungs, and write DIR/prediction.json
runner scaling grade DIR      print the prediction beside the result of the run in DIR/larger
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from layerkit.config.checks import require
from layerkit_runner.config.config_tree import config_json, field_value
from layerkit_runner.config.flags import parse_flags, read_flags
from layerkit_runner.config.help import flag_rows, table
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.config.requests import ResolvedExperiment, field_overrides, flag_word
from layerkit_runner.data.host_inputs import dataset_name
from layerkit_runner.errors import UsageError, as_usage_error
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.files.bounded_documents import parse_json, parse_toml, read_text
from layerkit_runner.files.text import draw_table
from layerkit_runner.observers.metrics_log import metric_series, metrics_path, read_metrics
from layerkit_runner.partitioning.mesh import num_mesh_devices
from layerkit_runner.run.job import environment
from layerkit_runner.run.job_errors import job_errors
from layerkit_runner.run.resolve import resolve_entry
from layerkit_runner.run_options import Flag, RunOptions, positive
from layerkit_runner.tools.report.record import JobRecord, read_jobs
from layerkit_runner.tools.scaling.fit import LEVEL, Law, fit_law
from layerkit_runner.tools.scaling.ladder import (
    Rung,
    Size,
    ladder_text,
    plan_rungs,
    repeat_with_seeds,
    step_size,
)

# Rungs whose D/N differ by less are one ray: N and D have one term together. Rungs whose N, or D,
# differ by less do not identify its term in L(N, D).
_MIN_SPREAD = 2.0
_SIZE_TOLERANCE = 1e-3


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(map(float, text.split(",")))
    if not all(0 < value < math.inf for value in values):
        raise ValueError("numbers above 0, with commas between them")
    return values


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


_FLAGS = (
    Flag("flops", _numbers, "model FLOPs of the rungs", "C,C"),
    Flag("predict", _numbers, "model FLOPs of the larger run", "C"),
    Flag("tokens_per_weight", _numbers, "D/N: one for a ray, several for L(N, D)", "D/N", (20.0,)),
    Flag("metric", str, "held-out metric of the law", "NAME/loss"),
    Flag("seeds", _counts, "runs of a rung: one number, or one for each of --flops", "N,N", (1,)),
    Flag("help", bool, "print these flags"),
)


Result = tuple[JobRecord, Size, float]  # A finished run, its size and its last held-out loss.


def run_scaling(words: Sequence[str]) -> int:
    """Plan, fit or grade a ladder; return the exit code."""
    values, others = read_flags(words, _FLAGS, known_only=True)
    name, *rest = others or [""]
    if values.get("help"):
        print("\n".join([__doc__ or "", *table(flag_rows(_FLAGS))]))
    elif name == "plan":
        _plan({row.name: values.get(row.name, row.default) for row in _FLAGS}, rest)
    else:
        is_known = name in ("fit", "grade") and len(rest) == 1 and not values
        expected = "plan with flags, fit DIR or grade DIR"
        require(is_known, "`runner scaling`", "words", words, expected, UsageError)
        (_fit if name == "fit" else _grade)(Path(rest[0]).expanduser().absolute())
    return 0


def _plan(values: Mapping[str, Any], words: Sequence[str]) -> None:
    flags, owner = parse_flags(words), "`runner scaling plan`"
    is_whole = flags.values.keys() == {"exp", "job_log_dir"} and values["flops"] is not None
    more = "--predict, --tokens_per_weight, --metric, --seeds, --fdl"
    expected = f"--flops, --exp and --job_log_dir; others are {more}"
    require(is_whole, owner, "flags", [*flags.values], expected, UsageError)
    predicted = values["predict"] or ()
    require(len(predicted) <= 1, owner, "--predict", predicted, "one number", UsageError)
    num_rungs, seeds = len(values["flops"]), values["seeds"]
    is_paired, expected = len(seeds) in (1, num_rungs), f"1 or {num_rungs}, as of --flops"
    require(is_paired, owner, "number of --seeds", len(seeds), expected, UsageError)
    seeds = seeds if len(seeds) > 1 else seeds * num_rungs
    directory = flags.options.job_log_dir or ""
    require("://" not in directory, owner, "--job_log_dir", directory, "a local folder", UsageError)
    folder = Path(directory).expanduser().absolute()
    path, entry = folder / "ladder.toml", find_experiment(flags.exp or "")
    require(not path.exists(), owner, "--job_log_dir", str(folder), "no ladder.toml", UsageError)
    base = resolve_entry(entry, flags.overrides)
    metric = _held_out_metric(base, values["metric"])
    rungs: list[Rung] = []
    larger: list[Rung] = []
    with job_errors("plan", base):
        for ratio in values["tokens_per_weight"]:
            budgets = [*values["flops"], *(() if larger else predicted)]
            planned = plan_rungs(
                budgets, flags.overrides, lambda o: resolve_entry(entry, o), ratio=ratio
            )
            for rung, num_seeds in zip(planned, seeds, strict=False):
                rungs += repeat_with_seeds(rung, base, num_seeds=num_seeds)
            larger = larger or planned[num_rungs:]
    text = ladder_text(metric, rungs, larger)
    _write(path, text)
    run = ["runner", f"--exp={base.name}", f"--job_log_dir={folder}", f"--study={path}"]
    print(f"{text}\nwrote {path}\n{shlex.join(run)}\nrunner scaling fit {folder}", flush=True)
    if num_mesh_devices(base.partitioner) is None:
        print(f"D is counted for the {jax.device_count()} devices here; the mesh has all there are")


def _held_out_metric(base: ResolvedExperiment, metric: str | None) -> str:
    """Return the metric that all rungs are scored by, on all rows of a held-out data set."""
    held_out = {f"{dataset_name(one)}/": one for one in base.datasets if not one.is_training}
    chosen = [name for name in held_out if metric is None or metric[: len(name)] == name != metric]
    expected = f"a metric of one of the held-out data sets: {', '.join(held_out) or 'none'}"
    require(len(chosen) == 1, base.name, "--metric", metric, expected, UsageError)
    (name,) = chosen
    field = f"datasets.{base.datasets.index(held_out[name])}.eval_loop_num_batches"
    most = field_value(held_out[name], "eval_loop_num_batches")
    expected = f"None, as with --fdl.{field}=None, since other batches would score other rows"
    require(most is None, base.name, field, most, expected, UsageError)
    return metric or f"{name}loss"


def _measure(job: JobRecord, metric: str) -> Result:
    """Return the result of a finished run; raise `UsageError` if it has none."""
    info, state = job.metrics.info, "; ".join([job.state, *job.errors[-1:]])
    require(job.state == "finished", job.folder, "state", state, "finished", UsageError)
    with as_usage_error(UsageError, owner=job.folder):
        # Evaluations in other modes may be of other data.
        series = metric_series(read_metrics(job.folder).evals, metric)
    losses = [loss for step, loss in series if step == info["num_train_steps"]]
    is_loss = losses and 0 < losses[0] < math.inf
    require(is_loss, job.folder, metric, losses, "a finite loss of the last step", UsageError)
    step = Size(info["num_params"], info["tokens_per_step"], info["flops_per_step"])
    is_counted, expected = min(step) > 0, "above 0, as of language models"
    require(is_counted, job.folder, "N, D, C of a step", [*step], expected, UsageError)
    return job, step.times(info["num_train_steps"]), losses[0]


def choose_law(sizes: Sequence[Size], losses: Sequence[float]) -> Law:
    """Fit the law with the most parameters that runs of these sizes identify.

    Runs of one size are one rung, whose logarithmic loss is their mean: a law misses rungs by more
    than seeds differ, so the seeds of a small rung should not count more than a large rung.

    Raises:
      UsageError: They identify none, since they are too few, or too alike in N or D.
    """
    by_size: dict[tuple[float, ...], list[np.ndarray]] = {}
    for row in np.log([(*size, loss) for size, loss in zip(sizes, losses, strict=True)]):
        by_size.setdefault(tuple(row[:-1].round(2)), []).append(row)
    rungs = np.array([np.mean(rows, axis=0) for rows in by_size.values()]).reshape(-1, 4)
    num, num_repeats = len(rungs), len(losses) - len(rungs)
    squares = sum(len(rows) * np.var([row[-1] for row in rows]) for rows in by_size.values())
    ratios = [size.D / size.N for size in sizes] or [1.0]
    is_ray = max(ratios) < _MIN_SPREAD * min(ratios)
    expected = "at least 3 finished ones of different sizes, or 4 to identify E"
    if not is_ray:
        expected = f"at least 6, for L(N, D), since D/N is {min(ratios):.3g} to {max(ratios):.3g}"
    require(num >= (3 if is_ray else 6), None, "rungs", num, expected, UsageError)
    columns = dict(zip(Size._fields, np.exp(rungs.T), strict=False))
    chosen = {name: columns[name] for name in ("C" if is_ray else "ND")}
    for name, values in chosen.items():
        low, high = min(values), max(values)
        expected = f"a spread by a factor of {_MIN_SPREAD:g} or more, for L({', '.join(chosen)})"
        is_spread = high >= _MIN_SPREAD * low or is_ray
        require(is_spread, "rungs", name, f"{low:.4g} to {high:.4g}", expected, UsageError)
    noise = math.sqrt(squares / num_repeats) if num_repeats else 0.0
    return fit_law(chosen, np.exp(rungs[:, -1]), has_floor=num >= 4, noise=noise)


def _fit(folder: Path) -> None:
    ladder = _read(folder / "ladder.toml", parse_toml)
    results: list[Result] = []
    for job in read_jobs([folder]):
        try:
            results += [_measure(job, ladder["metric"])] if job.folder != str(folder) else []
        except UsageError as error:
            print(f"left out: {error}")
    law = choose_law([size for _, size, _ in results], [loss for *_, loss in results])
    cells = []
    for job, size, loss in results:
        miss = loss / law.predict(size._asdict())[0] - 1
        texts = (
            f"{size.C:.4g} {size.N:,} {size.D:,.0f} {size.D / size.N:.3g} {loss:.5g} {miss:+.2%}"
        )
        cells.append([Path(job.folder).name, *texts.split()])
    if (num_missing := len(ladder.get("trials", ())) - len(results)) > 0:
        print(f"{num_missing} of {len(ladder['trials'])} runs of the ladder have no result")
    head = ["trial", "C (FLOPs)", "N (weights)", "D (tokens)", "D/N", ladder["metric"], "residual"]
    print("\n".join(draw_table(cells, head=head, right=range(1, 7))))
    print(f"{law.text()}; {LEVEL:.0%} intervals by a parametric bootstrap:")
    for name, values in law.parameters().items():
        text = "{:.4g} ({:.4g} to {:.4g})".format(*values) if values else "not identified"
        print(f"{name:<16} {text}")
    if ladder.get("larger"):
        _predict(folder, ladder, law, results)


def _predict(folder: Path, ladder: Mapping[str, Any], law: Law, results: Sequence[Result]) -> None:
    larger, file = folder / "larger", folder / "prediction.json"
    is_new, expected = not metrics_path(larger).exists(), "no run before its prediction"
    require(is_new, "`runner scaling fit`", "larger run", str(larger), expected, UsageError)
    tables, larger_fields = ladder.get("trials", ()), ladder["larger"]
    paths = {path for table in [*tables, larger_fields] for path in table}
    missing = [path for path in paths - {*larger_fields} if all(path in table for table in tables)]
    owner, expected = str(folder / "ladder.toml"), "the fields that all trials have"
    require(not missing, owner, "larger", missing, expected, UsageError)
    for job, *_ in results:
        others = {p: text for p, text in job.config.overrides.items() if p not in paths}
        expected = f"fields of {owner}; set others in its [larger], too"
        require(not others, job.folder, "fields", others, expected, UsageError)
    first = results[-1][0]
    starts, num_devices = began = _starts(first), first.metrics.info["num_devices"]
    for job, *_ in results:
        same = _starts(job), job.metrics.info["num_devices"]
        expected = f"{began}, as of {first.folder}"
        require(same == began, job.folder, "flags, devices", same, expected, UsageError)
    overrides, experiment = field_overrides(larger_fields), first.config.experiment
    resolved = resolve_entry(find_experiment(experiment), overrides)
    step = step_size(resolved, num_devices=num_devices)
    size = step.times(resolved.task.train.num_train_steps)
    ratios, ratio = [one.D / one.N for _, one, _ in results], size.D / size.N
    is_near = min(ratios) / _MIN_SPREAD < ratio < _MIN_SPREAD * max(ratios)
    expected = f"that of the rungs, {min(ratios):.3g} to {max(ratios):.3g}"
    require(is_near or law.names != ("C",), "larger run", "D/N", ratio, expected, UsageError)
    value, *interval = law.predict(size._asdict())
    command = ["runner", f"--exp={experiment}", f"--job_log_dir={larger}", *map(str, overrides)]
    command += [flag_word(name, value) for name, value in starts.items()]
    document = {
        "time": time.time(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "metric": ladder["metric"],
        "prediction": value,
        "interval": interval,
        "level": LEVEL,
        "law": law.text(),
        "size": size._asdict(),
        "command": shlex.join(command),
        "config_sha256": _digest(config_json(resolved)["config"]),
        "environment": environment(),
        "rungs": [{"folder": j.folder, **s._asdict(), "loss": loss} for j, s, loss in results],
    }
    _write(file, json.dumps(document, indent=2) + "\n")
    print(
        f"prediction for {size.C:.4g} FLOPs on {num_devices} devices: {value:.5g}"
        f" ({interval[0]:.5g} to {interval[1]:.5g})"
    )
    print(f"wrote {file}\n{shlex.join(command)}\nrunner scaling grade {folder}", flush=True)


def _starts(job: JobRecord) -> dict[str, Any]:
    """Return the flags with which a run began, such as `--init_from`."""
    default, given = RunOptions(), job.config.first_start_options()
    return {name: value for name, value in given.items() if value != getattr(default, name)}


def _grade(folder: Path) -> None:
    file, larger = folder / "prediction.json", folder / "larger"
    told, (job,) = _read(file, parse_json), read_jobs([larger])
    (_, size, loss), began = _measure(job, told["metric"]), job.metrics.events[0]["time"]
    planned = Size(**told["size"])
    is_same = np.allclose(size, planned, rtol=_SIZE_TOLERANCE)
    require(is_same, str(larger), "N, D, C", [*size], f"{[*planned]}, as predicted", UsageError)
    expected = f"before {began:.0f}, when {larger} began"
    require(told["time"] < began, str(file), "time", told["time"], expected, UsageError)
    if (digest := _digest(job.config.config)) != told["config_sha256"]:
        hint = f"The fields that differ: {told['command']} --diff_config={larger}"
        problem = "the larger run has another configuration than its prediction"
        raise UsageError(problem, owner=str(larger), value=digest, hint=hint)
    low, high = told["interval"]
    place = "inside" if low <= loss <= high else "outside"
    print(f"predicted {told['prediction']:.5g} ({low:.5g} to {high:.5g}) at {told['date']}")
    error = told["prediction"] / loss - 1
    print(f"measured  {loss:.5g}: error {error:+.2%}, {place} the interval", flush=True)


def _read(path: Path, parse: Any) -> Any:
    with as_usage_error(OSError, ValueError, owner=str(path)):
        return parse(read_text(path))


def _write(path: Path, text: str) -> None:
    with as_usage_error(OSError, owner=str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
