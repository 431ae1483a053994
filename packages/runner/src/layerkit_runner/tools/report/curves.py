"""The curves of a report, sampled so that spikes and steps without finite values stay visible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from layerkit_runner.observers.base import TOTAL_WEIGHT
from layerkit_runner.observers.metrics_log import smooth
from layerkit_runner.tools.report.record import JobRecord

# Points of all curves of a page together; a point takes about ten bytes.
_NUM_POINTS, _MAX_BUCKETS, _NUM_SMOOTHED = 24_000, 300, 100
_MAX_EVAL_CHARTS = 8
# Title and unit of each scalar of training, and the scalar drawn for records that have both.
_CHARTS = {
    "learning/lr": ("Learning rate", "", None),
    "learning/raw_grad_norm": ("Gradient norm", "before clipping", None),
    "learning/skipped_steps": ("Skipped steps", "so far", None),
    "tokens_per_sec": ("Speed", "tokens/s", None),
    "examples_per_sec": ("Speed", "examples/s", "tokens_per_sec"),
    "input_wait": ("Waiting for input", "share of the step time", None),
    "mfu": ("Model FLOP/s utilization", "share of the peak", None),
    "memory/device_bytes_in_use": ("Memory", "bytes of the fullest device", None),
    "memory/host_rss_bytes": ("Memory", "bytes of the host", "memory/device_bytes_in_use"),
}
_UNSMOOTHED = ("learning/lr", "learning/skipped_steps")
_NO_METRIC = ("step", "time", "dataset", "loss", TOTAL_WEIGHT)


class _Line(NamedTuple):
    run: int
    label: str
    dashed: bool
    steps: np.ndarray  # int64 [records]
    values: np.ndarray  # float64 [records]
    is_bad: np.ndarray  # bool [records]: a value that is not finite, or a step that was skipped


def make_charts(jobs: Sequence[JobRecord]) -> dict[str, Any]:
    """Return the charts of several runs by name, in the form that `pages/charts.js` draws."""
    programs = {p: 0 for job in jobs for p in job.metrics.info.get("train_programs") or ()}
    names = {program: f"{program}/loss" for program in programs} or {"": "loss"}
    losses = [line for p, name in names.items() for line in _lines(jobs, name, program=p)]
    losses += _lines(jobs, "loss", held_out=True)
    charts = {"loss": ("Loss", "", losses)}
    for name, (title, unit, better) in _CHARTS.items():
        lines = [*_lines(jobs, name, better=better)]
        if any(line.values.any() for line in lines):
            charts[name] = title, unit, lines
    records = [row for job in jobs for rows in job.metrics.evals.values() for row in rows]
    metrics = sorted({name for row in records for name in row}.difference(_NO_METRIC))
    for name in [n for n in metrics if not n.endswith(("_stderr", "/n"))][:_MAX_EVAL_CHARTS]:
        lines = [*_lines(jobs, name), *_lines(jobs, name, held_out=True)]
        if [line.values.tolist() for line in lines] != [line.values.tolist() for line in losses]:
            charts[name] = name, "", lines
    num_lines = sum(len(lines) for *_, lines in charts.values())
    buckets = min(_MAX_BUCKETS, max(_NUM_POINTS // (2 * max(num_lines, 1)), 20))
    return {
        name: {
            "title": title,
            "unit": unit,
            "log": not unit.startswith("share") and _spans_decades(lines),
            "curves": [
                c for line in lines for c in _curves(line, buckets, smooths=name not in _UNSMOOTHED)
            ],
        }
        for name, (title, unit, lines) in charts.items()
        if lines
    }


def _lines(
    jobs: Sequence[JobRecord],
    scalar: str,
    *,
    program: str = "",
    better: str | None = None,
    held_out: bool = False,
) -> Iterator[_Line]:
    """Yield the training of each run, or its evaluations, without records that have `better`."""
    for run, job in enumerate(jobs):
        series = job.metrics.evals if held_out else {program: job.metrics.train}
        for dataset, records in series.items():
            if rows := [row for row in records if scalar in row and better not in row]:
                names = [*[job.name] * (len(jobs) > 1), *filter(None, [dataset])]
                steps = np.array([row["step"] for row in rows])
                values = np.array([row[scalar] for row in rows], np.float64)
                skipped = [row.get("learning/is_valid_step", 1.0) == 0.0 for row in rows]
                is_bad = ~np.isfinite(values) | skipped
                yield _Line(run, " · ".join(names) or "train", held_out, steps, values, is_bad)


def _spans_decades(lines: Sequence[_Line]) -> bool:
    """Return whether a linear axis would flatten a typical run beside the largest value."""
    finite = [line.values[np.isfinite(line.values)] for line in lines]
    positive = [values[values > 0] for values in finite if (values > 0).any()]
    if not positive or any((values < 0).any() for values in finite):
        return False
    return bool(max(map(np.max, positive)) > 10 * min(map(np.median, positive)))


def _curves(line: _Line, num_buckets: int, *, smooths: bool) -> Iterator[dict[str, Any]]:
    """Yield the sampled values of a line, and their mean if there are many."""
    kept = sample(line.values, line.is_bad, num_buckets)
    finite = np.flatnonzero(np.isfinite(line.values))
    style = {"run": line.run, "label": line.label, "dashed": line.dashed}
    is_faint = smooths and not line.dashed and len(finite) > _NUM_SMOOTHED
    bad = line.steps[kept][line.is_bad[kept]].tolist()
    yield style | {"faint": is_faint, "bad": bad} | _points(line.steps[kept], line.values[kept])
    if is_faint:
        means = np.array(smooth(line.values[finite].tolist(), half_width=len(finite) // 40))
        shown = np.linspace(0, len(finite) - 1, _NUM_SMOOTHED).astype(int)
        style |= {"label": f"{line.label} (mean)", "faint": False, "bad": []}
        yield style | _points(line.steps[finite][shown], means[shown])


def _points(steps: np.ndarray, values: np.ndarray) -> dict[str, list[Any]]:
    rounded = [float(f"{value:.4g}") for value in values.tolist()]
    y = [value if np.isfinite(value) else None for value in rounded]
    return {"x": np.diff(steps, prepend=0).tolist(), "y": y}


def sample(values: np.ndarray, is_bad: np.ndarray, num_buckets: int) -> np.ndarray:
    """Return the indices of the points that show a series in at most `3 * num_buckets + 2` points.

    Each of the buckets, of equal size, keeps its lowest and highest finite value and its first bad
    step, so that a spike of one step stays whatever the number of steps.

    Args:
      values: float `[n]`.
      is_bad: bool `[n]`, steps to mark.
      num_buckets: Number of buckets.

    Returns:
      int `[kept]`, ascending; all indices if there are at most two for each bucket.
    """
    n = len(values)
    if n <= 2 * num_buckets:
        return np.arange(n)
    kept = {0, n - 1}
    for part in np.array_split(np.arange(n), num_buckets):
        finite = part[np.isfinite(values[part])]
        kept.update(part[is_bad[part]][:1].tolist())
        if len(finite):
            kept |= {int(finite[pick(values[finite])]) for pick in (np.argmin, np.argmax)}
    return np.array(sorted(kept))
