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

from layerkit.errors import ConfigError
from layerkit_inputs.extras import MissingExtraError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers.metrics_log import Metrics, Record, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN_COLORS = ("tab:blue", "tab:cyan", "tab:olive", "tab:gray")
_EVAL_COLORS = ("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
_POINTS_PER_HALF_WIDTH = 40


def require_matplotlib() -> None:
    """Raise an error if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "drawing requires matplotlib. Run pip install 'layerkit-runner[plots]' and then the"
            " same command."
        ) from error


def draw_loss_curve(
    metrics_path: epath.PathLike,
    picture_path: epath.PathLike | None = None,
    *,
    baselines: Mapping[str, float] | None = None,
    key: str = "loss",
    y_label: str | None = None,
) -> epath.Path:
    """Draw training loss (raw and smoothed) and held-out loss over the steps.

    Args:
      picture_path: Path of the PNG; None for loss_curve.png beside the record.
      baselines: Reference losses by name, each drawn as a dashed line with name and value.
      y_label: Label of the y axis; None for `key`.

    Returns:
      The path of the picture.

    Raises:
      ConfigError: The record has no finite value of `key`.
      MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    record_path = epath.Path(metrics_path)
    folder = record_path if record_path.is_dir() else record_path.parent
    metrics = read_metrics(record_path)
    figure = Figure(figsize=(8, 4.8), dpi=120)
    FigureCanvasAgg(figure)
    # A layout engine would draw the figure twice.
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.11, top=0.93)
    axes = figure.add_subplot()
    heights = _draw_training(axes, metrics, key) + _draw_evals(axes, metrics, key)
    if not heights:
        raise ConfigError(
            owner=str(record_path), field="key", value=key, expected="a scalar with finite values"
        )
    _draw_baselines(axes, baselines or {})
    # Limits that keep single raw spikes from flattening the curve.
    heights += (baselines or {}).values()
    margin = 0.06 * (max(heights) - min(heights)) or 0.1
    axes.set_ylim(min(heights) - margin, max(heights) + margin)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    axes.set_xlabel("steps")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 2k steps
    axes.set_ylabel(key if y_label is None else y_label)
    axes.set_title(str(metrics.info.get("experiment", "")))
    png = io.BytesIO()
    figure.savefig(png, format="png")
    picture = epath.Path(picture_path) if picture_path is not None else folder / "loss_curve.png"
    atomic_write(picture, png.getvalue())
    return picture


def smooth(values: Sequence[float], *, half_width: int) -> list[float]:
    """Return the means over a window of up to `half_width` values on either side of each value.

    The window is centered, so that the curve does not lag, and shrinks at the start. At the end,
    where curves are flat and noise misleads, only its right side shrinks.

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
    found = [(r["step"], r[key]) for r in records if math.isfinite(r.get(key, math.nan))]
    return [x for x, _ in found], [y for _, y in found]


def _draw_training(axes: Axes, metrics: Metrics, key: str) -> list[float]:
    """Draw one curve, or one for each of several training programs; return the heights drawn."""
    paths = {name: f"{name}/{key}" for name in metrics.info.get("train_programs") or []}
    # Records from before the job had several programs.
    alone = [each for each in metrics.train if not any(path in each for path in paths.values())]
    curves = {"train": _points(alone, key)}
    curves |= {f"train {name}": _points(metrics.train, path) for name, path in paths.items()}
    heights: list[float] = []
    for index, (label, (xs, ys)) in enumerate(curves.items()):
        if not xs:
            continue
        color = _TRAIN_COLORS[index % len(_TRAIN_COLORS)]
        half_width = len(ys) // _POINTS_PER_HALF_WIDTH
        if half_width == 0:
            axes.plot(xs, ys, color=color, label=label, marker="." if len(xs) < 3 else "")
        else:
            axes.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
            ys = smooth(ys, half_width=half_width)
            axes.plot(xs, ys, color=color, label=f"{label} (smoothed)")
        heights += ys
    return heights


def _draw_evals(axes: Axes, metrics: Metrics, key: str) -> list[float]:
    heights: list[float] = []
    for index, (name, records) in enumerate(metrics.evals.items()):
        xs, ys = _points(records, key)
        if xs:
            label = f"{name} {ys[-1]:.3f}"
            color = _EVAL_COLORS[index % len(_EVAL_COLORS)]
            axes.plot(xs, ys, color=color, marker="o", markersize=4, linewidth=1, label=label)
        heights += ys
    return heights


def _draw_baselines(axes: Axes, baselines: Mapping[str, float]) -> None:
    for name, value in baselines.items():
        axes.axhline(value, color="0.35", linestyle="--", linewidth=1)
        axes.annotate(
            f"{name} {value:.2f}",
            xy=(1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            horizontalalignment="right",
            color="0.25",
            fontsize=9,
        )
