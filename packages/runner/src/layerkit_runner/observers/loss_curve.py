"""loss_curve.png: what a run learned, at a glance, drawn from its metrics.jsonl.

matplotlib is imported only when a picture is drawn, and without its window system. It comes with
the extra `plots`.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from etils import epath

from layerkit_inputs.extras import MissingExtraError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers.metrics_log import Metrics, Record, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN_COLORS = ("tab:blue", "tab:cyan", "tab:olive", "tab:gray")
_EVAL_COLORS = ("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")
_POINTS_PER_HALF_WIDTH = 40


def require_matplotlib() -> None:
    """Raise an error that says how to get the picture if matplotlib is not installed.

    Raises:
      MissingExtraError: It is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "drawing needs matplotlib. To get the picture, pip install 'layerkit-runner[plots]' and"
            " run the same command again."
        ) from error


def draw_loss_curve(
    metrics_path: epath.PathLike,
    picture_path: epath.PathLike | None = None,
    *,
    x: Literal["steps", "tokens"] = "steps",
    baselines: Mapping[str, float] | None = None,
    key: str = "loss",
    y_label: str | None = None,
    title: str | None = None,
) -> epath.Path:
    """Draws training loss (raw and smoothed) and held-out loss, and returns the picture's path.

    Args:
      metrics_path: metrics.jsonl, or the job folder that holds it.
      picture_path: where the PNG goes; None means loss_curve.png beside the record.
      x: what runs along the x axis; tokens need the record's `tokens_per_step`.
      baselines: losses to compare with, by name, each drawn as a dashed line with name and value.
      key: the scalar to draw.
      y_label: label of the y axis; None means `key`.
      title: None means the experiment's name.

    Raises:
      ValueError: the record holds no finite value of `key`, or tokens are asked for but unknown.
      MissingExtraError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    record_path = epath.Path(metrics_path)
    folder = record_path if record_path.is_dir() else record_path.parent
    metrics = read_metrics(record_path)
    scale = _units_per_step(metrics, x)
    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    heights = _draw_training(axes, metrics, key, scale) + _draw_evals(axes, metrics, key, scale)
    if not heights:
        raise ValueError(f"{record_path} holds no finite {key!r} to draw")
    _draw_baselines(axes, baselines or {})
    _finish(axes, heights, baselines or {})
    axes.set_xlabel(x)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 2k steps, 16M tokens
    axes.set_ylabel(key if y_label is None else y_label)
    axes.set_title(title if title is not None else str(metrics.info.get("experiment", "")))
    png = io.BytesIO()
    figure.savefig(png, format="png")
    picture = epath.Path(picture_path) if picture_path is not None else folder / "loss_curve.png"
    atomic_write(picture, png.getvalue())
    return picture


def smooth(values: Sequence[float], *, half_width: int) -> list[float]:
    """Means over a window of up to `half_width` values on either side, as many as `values`.

    The window is centred, so a falling curve is not drawn late, and at the start it shrinks to stay
    so. At the end it is cut off on one side instead, where a curve is flat and noise would mislead.

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


def _units_per_step(metrics: Metrics, x: str) -> int:
    if x == "steps":
        return 1
    tokens = metrics.info.get("tokens_per_step", 0)
    if x != "tokens" or not tokens:
        raise ValueError(
            f"x={x!r}: expected 'steps', or 'tokens' where the record's tokens_per_step is known "
            f"(it is {tokens})"
        )
    return int(tokens)


def _points(records: Sequence[Record], key: str, scale: int) -> tuple[list[float], list[float]]:
    found = [(r["step"] * scale, r[key]) for r in records if math.isfinite(r.get(key, math.nan))]
    return [x for x, _ in found], [y for _, y in found]


def _draw_training(axes: Axes, metrics: Metrics, key: str, scale: int) -> list[float]:
    """A curve for each training program, where there are several, else one."""
    paths = {name: f"{name}/{key}" for name in metrics.info.get("train_programs") or []}
    # There may have been one data set before there were several.
    alone = [each for each in metrics.train if not any(path in each for path in paths.values())]
    curves = {f"train {name}": _points(metrics.train, path, scale) for name, path in paths.items()}
    heights = []
    for index, (label, points) in enumerate(
        {"train": _points(alone, key, scale), **curves}.items()
    ):
        heights += _draw_train(axes, points, label, color=_TRAIN_COLORS[index % len(_TRAIN_COLORS)])
    return heights


def _draw_train(
    axes: Axes, points: tuple[list[float], list[float]], label: str, *, color: str
) -> list[float]:
    xs, ys = points
    if not xs:
        return []
    half_width = len(ys) // _POINTS_PER_HALF_WIDTH
    if half_width == 0:
        axes.plot(xs, ys, color=color, label=label, marker="." if len(xs) < 3 else "")
        return ys
    smoothed = smooth(ys, half_width=half_width)
    axes.plot(xs, ys, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(xs, smoothed, color=color, label=f"{label} (smoothed)")
    return smoothed


def _draw_evals(axes: Axes, metrics: Metrics, key: str, scale: int) -> list[float]:
    heights = []
    for index, (name, records) in enumerate(metrics.evals.items()):
        xs, ys = _points(records, key, scale)
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


def _finish(axes: Axes, heights: Sequence[float], baselines: Mapping[str, float]) -> None:
    """Limits that keep single raw spikes from flattening the curve, a grid and a legend."""
    low = min([*heights, *baselines.values()])
    high = max([*heights, *baselines.values()])
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
