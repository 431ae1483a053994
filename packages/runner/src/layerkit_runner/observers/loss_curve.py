"""loss_curve.png, the plot of the losses in metrics.jsonl.

The extra `plots` installs matplotlib, which is imported when a picture is drawn. While a job
trains, a process of its own draws, so that no step waits:

    python -m layerkit_runner.observers.loss_curve FOLDER KEY LABEL
"""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Mapping, Sequence

from etils import epath

from layerkit.errors import ConfigError, pip_install
from layerkit_inputs.base.errors import MissingExtraError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers.metrics_log import Record, read_metrics, smooth

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
    programs = metrics.info.get("train_programs") or []
    names = {f"train {name}": f"{name}/{key}" for name in programs} or {"train": key}
    raw = []
    for label, name in names.items():
        if points := _points(metrics.train, name):
            xs, ys = zip(*points, strict=True)
            half_width = len(ys) // _POINTS_PER_HALF_WIDTH
            label += " (smoothed)" if half_width else ""
            marker = "." if len(xs) < 3 else ""
            (line,) = axes.plot(xs, smooth(ys, half_width=half_width), label=label, marker=marker)
            raw.append((xs, ys, line.get_color()))
    for name, records in metrics.evals.items():
        if points := _points(records, key):
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, marker="o", markersize=4, linewidth=1, label=f"{name} {ys[-1]:.3f}")
    if not axes.lines:
        raise ConfigError(
            owner=str(record_path), field="key", value=key, expected="a scalar with finite values"
        )
    for name, value in (baselines or {}).items():
        axes.axhline(value, color="0.35", linestyle="--", linewidth=1, label=f"{name} {value:.2f}")
    axes.set_ylim(*axes.get_ylim())  # single spikes of the raw values do not flatten the curve
    for xs, ys, color in raw:
        axes.plot(xs, ys, alpha=0.25, linewidth=0.8, color=color, zorder=1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set(xlabel="steps", ylabel=y_label or key, title=str(metrics.info.get("experiment", "")))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 2k steps
    png = io.BytesIO()
    figure.savefig(png, format="png")
    picture = epath.Path(picture_path) if picture_path is not None else folder / "loss_curve.png"
    atomic_write(picture, png.getvalue())
    return picture


def _points(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    return [(r["step"], r[key]) for r in records if math.isfinite(r.get(key, math.nan))]


if __name__ == "__main__":
    os.nice(10)
    draw_loss_curve(sys.argv[1], key=sys.argv[2], y_label=sys.argv[3])
