"""sweep.png: the metric over the trials, and against each field that was searched."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.observers.loss_curve import require_matplotlib
from layerkit_runner.tools.sweep.folder import SweepFolder
from layerkit_runner.tools.sweep.report import TrialResult, best_of
from layerkit_runner.tools.sweep.search_space import Choices, Parameter, Range
from layerkit_runner.tools.sweep.study_file import StudyFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_STYLES: dict[str, dict[str, Any]] = {
    "complete": {"marker": "o", "color": "tab:blue", "s": 28},
    "pruned": {"marker": "x", "color": "0.6", "s": 24, "linewidths": 1.2},
}


def draw_sweep(found: Sequence[TrialResult], file: StudyFile, folder: SweepFolder) -> str:
    """Draws what the trials found; returns the picture's path, as the folder was given.

    Raises:
      ValueError: no trial has a value.
    """
    png = io.BytesIO()
    sweep_figure(found, file).savefig(png, format="png")
    atomic_write(folder.path / "sweep.png", png.getvalue())
    return f"{folder.given.rstrip('/')}/sweep.png"


def sweep_figure(found: Sequence[TrialResult], file: StudyFile) -> Figure:
    """The picture: axes of the trials in order, then axes of each field.

    Args:
      found: The best first.
      file: What was searched.

    Raises:
      ValueError: no trial has a value.
      MissingExtraError: matplotlib is not installed.
    """
    drawn = [result for result in found if result.value is not None and result.state in _STYLES]
    if not drawn:
        raise ValueError(f"no trial has a value of {file.metric}")
    require_matplotlib()
    # Imported here, and without its window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_axes = 1 + len(file.space)
    columns = min(_COLUMNS, num_axes)
    rows = math.ceil(num_axes / columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    axes = list(itertools.chain(*grid))
    best = best_of(found)
    _draw_order(axes[0], drawn, file)
    for place, (path, parameter) in zip(axes[1:], file.space.items(), strict=False):
        _draw_parameter(place, drawn, path, parameter, best)
    _limit(axes[0], drawn, file.direction)
    for place in axes[:num_axes]:
        place.grid(alpha=0.3)
        place.spines[["top", "right"]].set_visible(False)
    for place in axes[num_axes:]:
        place.set_visible(False)
    for index in range(0, num_axes, columns):
        axes[index].set_ylabel(file.metric)
    figure.suptitle(f"{file.metric}, {file.direction}d over {len(found)} trials")
    return figure


def _draw_order(axes: Axes, drawn: Sequence[TrialResult], file: StudyFile) -> None:
    """In the order in which trials were begun, with the best so far as a line."""
    from matplotlib.ticker import MaxNLocator

    for state, style in _STYLES.items():
        chosen = [result for result in drawn if result.state == state]
        if chosen:
            numbers = [result.number for result in chosen]
            axes.scatter(numbers, _values(chosen), label=state, **style)
    complete = sorted((r for r in drawn if r.state == "complete"), key=lambda r: r.number)
    choose = min if file.direction == "minimize" else max
    numbers = [result.number for result in complete]
    last = max(result.number for result in drawn)
    if numbers:
        # Up to the last trial, since the best stays the best.
        so_far = list(itertools.accumulate(_values(complete), choose))
        axes.step(
            [*numbers, last],
            [*so_far, so_far[-1]],
            where="post",
            color="tab:orange",
            label="best so far",
        )
    axes.set_xlabel("trial")
    axes.set_xlim(-0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="best", fontsize=8)


def _draw_parameter(
    axes: Axes,
    drawn: Sequence[TrialResult],
    path: str,
    parameter: Parameter,
    best: TrialResult | None,
) -> None:
    from matplotlib.ticker import MaxNLocator

    if isinstance(parameter, Choices):
        labels = [str(value) for value in parameter.values]
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlim(-0.5, len(labels) - 0.5)
    else:
        if parameter.log:
            axes.set_xscale("log")
        elif isinstance(parameter.low, int):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        # All that was searched, so that a best value at the edge is seen to be there.
        axes.set_xlim(_widened(parameter))
    for state, style in _STYLES.items():
        chosen = [r for r in drawn if r.state == state and path in r.parameters]
        axes.scatter([_place(r, path, parameter) for r in chosen], _values(chosen), **style)
    if best is not None:
        axes.scatter(
            [_place(best, path, parameter)],
            _values([best]),
            marker="o",
            s=110,
            facecolors="none",
            edgecolors="tab:orange",
            linewidths=1.5,
        )
    axes.set_xlabel(path)


def _values(chosen: Sequence[TrialResult]) -> list[float]:
    return [result.value for result in chosen if result.value is not None]


def _place(result: TrialResult, path: str, parameter: Parameter) -> float:
    """Where a trial stands along the axis of a field."""
    value: Any = result.parameters[path]
    return parameter.values.index(value) if isinstance(parameter, Choices) else value


def _widened(parameter: Range) -> tuple[float, float]:
    if parameter.log:
        factor = (parameter.high / parameter.low) ** 0.04
        return parameter.low / factor, parameter.high * factor
    margin = 0.04 * (parameter.high - parameter.low)
    return parameter.low - margin, parameter.high + margin


def _limit(axes: Axes, drawn: Sequence[TrialResult], direction: str) -> None:
    """Keeps a few trials that went wrong from flattening all others; the best are always seen."""
    values = sorted(_values(drawn))
    low, high = values[0], values[-1]
    quarter, three_quarters = values[len(values) // 4], values[(3 * len(values)) // 4]
    reach = 3 * (three_quarters - quarter)
    if len(values) >= 8 and reach > 0:
        if direction == "minimize":
            high = min(high, three_quarters + reach)
        else:
            low = max(low, quarter - reach)
    margin = 0.08 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
