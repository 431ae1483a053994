"""The curves of a report, sampled so that spikes and steps without finite values stay visible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from layerkit_runner.observers.base import TOTAL_WEIGHT
from layerkit_runner.observers.metrics_log import smooth
from layerkit_runner.tools.report.record import JobRecord

# Points of all curves of a page together; a point takes about ten bytes.
_NUM_POINTS, _MAX_BUCKETS, _NUM_SMOOTHED = 24_000, 300, 100
_MAX_EVAL_CHARTS = 8
# Title and unit of each scalar of training; of two that share a line, the first that is recorded.
_CHARTS = (
    {"learning/lr": ("Learning rate", "")},
    {"learning/raw_grad_norm": ("Gradient norm", "before clipping")},
    {"learning/skipped_steps": ("Skipped steps", "so far")},
    {"tokens_per_sec": ("Speed", "tokens/s"), "examples_per_sec": ("Speed", "examples/s")},
    {"input_wait": ("Waiting for input", "share of the step time")},
    {"mfu": ("Model FLOP/s utilization", "share of the peak")},
    {
        "memory/device_bytes_in_use": ("Memory", "bytes of the fullest device"),
        "memory/host_rss_bytes": ("Memory", "bytes of the host"),
    },
)
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
    losses = [f"{program}/loss" for program in programs] or ["loss"]
    charts = {"loss": ("Loss", "", [line for name in losses for line in _lines(jobs, name)])}
    for choices in _CHARTS:
        drawn = [(name, [*_lines(jobs, name, evals=False)]) for name in choices]
        for name, lines in [pair for pair in drawn if any(line.values.any() for line in pair[1])][
            :1
        ]:
            charts[name] = (*choices[name], lines)
    records = [r for job in jobs for rows in job.metrics.evals.values() for r in rows]
    names = sorted({name for r in records for name in r}.difference(_NO_METRIC))
    for name in [n for n in names if not n.endswith(("_stderr", "/n"))][:_MAX_EVAL_CHARTS]:
        lines = [*_lines(jobs, name)]
        pairs = zip(lines, charts["loss"][2], strict=False)
        if not all(a.values.tolist() == b.values.tolist() for a, b in pairs):
            charts[name] = (name, "", lines)
    num_lines = sum(len(lines) for *_, lines in charts.values())
    buckets = min(_MAX_BUCKETS, max(_NUM_POINTS // (2 * max(num_lines, 1)), 20))
    return {
        name: {
            "title": title,
            "unit": unit,
            "log": not unit.startswith("share") and _spans_decades(lines),
            "curves": [
                c for line in lines for c in _curves(line, buckets, name not in _UNSMOOTHED)
            ],
        }
        for name, (title, unit, lines) in charts.items()
        if lines
    }


def _lines(jobs: Sequence[JobRecord], scalar: str, *, evals: bool = True) -> Iterator[_Line]:
    """Yield the line of each run's training, and those of its evaluations."""
    program = scalar.partition("/")[0] if scalar.endswith("/loss") else ""
    for run, job in enumerate(jobs):
        series = {program: job.metrics.train, **(job.metrics.evals if evals else {})}
        for dataset, records in series.items():
            if rows := [record for record in records if scalar in record]:
                values = np.array([row[scalar] for row in rows], np.float64)
                skipped = [row.get("learning/is_valid_step", 1.0) == 0.0 for row in rows]
                names = [*[job.name] * (len(jobs) > 1), *filter(None, [dataset])] or ["train"]
                steps, is_bad = np.array([row["step"] for row in rows]), ~np.isfinite(values)
                dashed = records is not job.metrics.train
                yield _Line(run, " · ".join(names), dashed, steps, values, is_bad | skipped)


def _spans_decades(lines: Sequence[_Line]) -> bool:
    """Return whether a linear axis would flatten a typical run beside the largest value."""
    finite = [line.values[np.isfinite(line.values) & (line.values > 0)] for line in lines]
    finite = [values for values in finite if len(values)]
    return bool(finite) and bool(max(map(np.max, finite)) > 10 * min(map(np.median, finite)))


def _curves(line: _Line, num_buckets: int, smooths: bool) -> Iterator[dict[str, Any]]:  # noqa: FBT001
    kept = sample(line.values, line.is_bad, num_buckets)
    finite = np.flatnonzero(np.isfinite(line.values))
    is_faint = smooths and not line.dashed and len(finite) > _NUM_SMOOTHED
    layers = [(line.steps[kept], line.values[kept], line.steps[kept][line.is_bad[kept]], is_faint)]
    if is_faint:
        means = np.array(smooth(line.values[finite].tolist(), half_width=len(finite) // 40))
        shown = np.linspace(0, len(finite) - 1, _NUM_SMOOTHED).astype(int)
        layers.append((line.steps[finite][shown], means[shown], np.zeros(0), False))
    for steps, values, bad, faint in layers:
        yield {
            "run": line.run,
            "color": line.run % 8,
            "label": line.label,
            "dashed": line.dashed,
            "faint": faint,
            "x": np.diff(steps, prepend=0).tolist(),
            "y": [float(f"{v:.4g}") if np.isfinite(v) else None for v in values.tolist()],
            "bad": bad.tolist(),
        }


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
    for low, high in itertools.pairwise(np.linspace(0, n, num_buckets + 1).astype(int).tolist()):
        finite = low + np.flatnonzero(np.isfinite(values[low:high]))
        kept.update((low + np.flatnonzero(is_bad[low:high])[:1]).tolist())
        if len(finite):
            kept |= {int(finite[pick(values[finite])]) for pick in (np.argmin, np.argmax)}
    return np.array(sorted(kept))
