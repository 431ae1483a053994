"""loss_curve.png, the plot of a run's losses from its metrics.jsonl.

The extra `plots` installs matplotlib, which is imported when a picture is drawn.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epath

from layerkit.errors import ConfigError, pip_install
from layerkit_inputs.base.errors import MissingExtraError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers.metrics_log import Metrics, Record, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS_PER_HALF_WIDTH = 40


def draw_loss_curve(
    metrics_path: epath.PathLike,
    picture_path: epath.PathLike | None = None,
    *,
    baselines: Mapping[str, float] | None = None,
    key: str = "loss",
    y_label: str | None = None,
) -> epath.Path:
    """Draw training loss (raw and smoothed) and held-out loss over the steps; return the path.

    Args:
      metrics_path: metrics.jsonl, or the job folder that holds it.
      picture_path: Path of the PNG; None for loss_curve.png beside the record.
      baselines: Reference losses by name, each drawn as a dashed line.
      key: Scalar to draw.
      y_label: Label of the y axis; None for `key`.

    Raises:
      ConfigError: The record has no finite value of `key`.
      MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"drawing requires matplotlib. Run {pip_install('layerkit-runner', 'plots')} and then"
            " the same command."
        ) from error
    record_path = epath.Path(metrics_path)
    folder = record_path if record_path.is_dir() else record_path.parent
    metrics = read_metrics(record_path)
    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    heights = _draw_training(axes, metrics, key) + _draw_evals(axes, metrics, key)
    if not heights:
        raise ConfigError(
            owner=str(record_path), field="key", value=key, expected="a scalar with finite values"
        )
    for name, value in (baselines or {}).items():
        axes.axhline(value, color="0.35", linestyle="--", linewidth=1, label=f"{name} {value:.2f}")
        heights.append(value)
    # Limits that keep single raw spikes from flattening the curve.
    margin = 0.06 * (max(heights) - min(heights)) or 0.1
    axes.set_ylim(min(heights) - margin, max(heights) + margin)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set(xlabel="steps", ylabel=y_label or key, title=str(metrics.info.get("experiment", "")))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 2k steps
    png = io.BytesIO()
    figure.savefig(png, format="png")
    picture = epath.Path(picture_path) if picture_path is not None else folder / "loss_curve.png"
    atomic_write(picture, png.getvalue())
    return picture


def smooth(values: Sequence[float], *, half_width: int) -> list[float]:
    """Return the means over a window of up to `half_width` values on either side of each value.

    The window is centered and shrinks at the start. At the end only its right side shrinks.

    >>> smooth([9.0, 6.0, 3.0, 0.0], half_width=1)
    [9.0, 6.0, 3.0, 1.5]
    """
    sums = [0.0, *itertools.accumulate(values)]
    smoothed = []
    for i in range(len(values)):
        low = max(i - half_width, 0)
        high = min(i + half_width, 2 * i, len(values) - 1)
        smoothed.append((sums[high + 1] - sums[low]) / (high + 1 - low))
    return smoothed


def _points(records: Sequence[Record], key: str) -> tuple[list[float], list[float]]:
    points = [(r["step"], r[key]) for r in records if math.isfinite(r.get(key, math.nan))]
    return [x for x, _ in points], [y for _, y in points]


def _draw_training(axes: Axes, metrics: Metrics, key: str) -> list[float]:
    """Draw one curve, or one for each of several training programs; return the heights drawn."""
    programs = metrics.info.get("train_programs") or []
    names = {f"train {name}": f"{name}/{key}" for name in programs} or {"train": key}
    heights: list[float] = []
    for label, name in names.items():
        xs, ys = _points(metrics.train, name)
        half_width = len(ys) // _POINTS_PER_HALF_WIDTH
        if half_width:
            (raw,) = axes.plot(xs, ys, alpha=0.25, linewidth=0.8)
            ys = smooth(ys, half_width=half_width)
            axes.plot(xs, ys, color=raw.get_color(), label=f"{label} (smoothed)")
        elif xs:
            axes.plot(xs, ys, label=label, marker="." if len(xs) < 3 else "")
        heights += ys
    return heights


def _draw_evals(axes: Axes, metrics: Metrics, key: str) -> list[float]:
    heights: list[float] = []
    for name, records in metrics.evals.items():
        xs, ys = _points(records, key)
        if xs:
            axes.plot(xs, ys, marker="o", markersize=4, linewidth=1, label=f"{name} {ys[-1]:.3f}")
        heights += ys
    return heights
