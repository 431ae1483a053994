"""Draw the records: loss over steps and its reference levels."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layerkit_runner.observers.metrics_log import smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAINED, HELD_OUT, RESUMED, LEVEL = "tab:blue", "tab:orange", "black", "0.35"


def draw(record_path: Path) -> Path:
    """Draw a record as a PNG of 800 pixels width beside it; return its path."""
    from matplotlib.figure import Figure

    record = json.loads(record_path.read_text())
    if "stages" in record:
        figure = Figure(figsize=(10, 5), dpi=100, layout="constrained")
        draw_stages(figure, record["stages"])
        return save(figure, record_path.with_suffix(".png"))
    asks = "last_word_accuracy" in record
    figure = Figure(figsize=(8, 6.4 if asks else 4.8), dpi=100, layout="constrained")
    if asks:
        losses, accuracies = figure.subplots(2, sharex=True)
        draw_accuracy(accuracies, record)
    else:
        losses = accuracies = figure.add_subplot()
    draw_losses(losses, record)
    losses.set_title(f"{record['experiment']}, narrower")
    accuracies.set_xlabel("steps")
    for axes in {losses, accuracies}:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return save(figure, record_path.with_suffix(".png"))


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG with a palette; return the path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    colors = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(64)
    colors.save(path, optimize=True)  # the palette reduces the size to a third
    return path


def draw_stages(figure: Figure, stages: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the losses of stages over their steps, and below the shares of their answers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes = figure.subplots(2, len(stages), squeeze=False)
    for (name, stage), losses, shares in zip(stages.items(), *axes, strict=True):
        losses.plot(*columns(stage["train"], 1.0), color=TRAINED)
        losses.set(title=name, yscale="log", xlabel="" if stage["answers"] else "steps")
        losses.yaxis.set_major_formatter("{x:g}")
        losses.yaxis.set_major_locator(FixedLocator([0.01, 0.03, 0.1, 0.3, 1, 3]))
        losses.yaxis.set_minor_locator(NullLocator())
        for index, (label, color) in enumerate(
            {"right": HELD_OUT, "courteous": "tab:green"}.items()
        ):
            points = [(step, share[index]) for step, *share in stage["answers"]]
            steps, heights = columns(points, 0.01)
            shares.plot(steps, heights, color=color, marker="o", markersize=3, label=label)
        shares.set(ylim=(-4, 104), xlabel="steps", visible=bool(stage["answers"]))
        for one in (losses, shares):
            one.grid(alpha=0.3)
            one.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("training loss")
    axes[1][1].set_ylabel("% of held-out answers")
    axes[1][1].legend(frameon=False, loc="center right")


def draw_losses(axes: Axes, record: Mapping[str, Any]) -> None:
    """Draw training loss, held-out loss and levels; byte losses are in bits instead of nats."""
    from matplotlib.ticker import FixedLocator, NullLocator

    of_bytes = record["unit"] == "nats per byte"
    scale = math.log(2) if of_bytes else 1.0
    steps, raw = columns(record["train"], scale)
    smoothed = smooth(raw, half_width=len(raw) // 40)
    axes.plot(steps, raw, color=TRAINED, alpha=0.3, linewidth=2)
    axes.plot(steps, smoothed, color=TRAINED, label="training text (smoothed)")
    parts = "held out, a part at a time" if "all_heldout" in record else "held out"
    heldout = columns(record["heldout"], scale)
    axes.plot(*heldout, color=HELD_OUT, marker="o", markersize=4, label=parts)
    if "all_heldout" in record:
        step, loss = record["all_heldout"]
        label = f"everything held out: {loss / scale:.2f}"
        axes.plot(
            step, loss / scale, color=HELD_OUT, marker="*", markersize=13, linestyle="", label=label
        )
    if "resumed" in record:
        draw_resumed(axes, record["resumed"], scale)
    levels = {name: loss / scale for name, loss in record["levels"].items()}
    reached_late = {name for name, loss in levels.items() if loss < smoothed[len(smoothed) // 3]}
    draw_levels(axes, levels, left=reached_late)
    heights = [*smoothed[len(smoothed) // 50 :], *levels.values()]
    axes.set_yscale("log")  # separates close levels at the bottom
    axes.set_ylim(0.85 * min(heights), 1.4 * max(heights))
    axes.yaxis.set_major_locator(FixedLocator([0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("loss (bits per byte)" if of_bytes else f"loss ({record['unit']})")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.16, 1))


def draw_resumed(axes: Axes, resumed: Mapping[str, Any], scale: float) -> None:
    """Draw the killed and resumed run over the uninterrupted one, and mark both steps."""
    steps, raw = columns(resumed["train"], scale)
    label = (
        f"killed after step {resumed['killed_after']}, resumed from {resumed['from_step']}:\n"
        f"largest difference {resumed['largest_difference']:g}"
    )
    axes.plot(steps, raw, color=RESUMED, linewidth=0.5, label=label)
    for step in (resumed["from_step"], resumed["killed_after"]):
        axes.axvline(step, color=RESUMED, linewidth=0.8, linestyle=":")


def draw_accuracy(axes: Axes, record: Mapping[str, Any]) -> None:
    """Draw the last-word accuracy of the model and of guesses."""
    steps, shares = columns(record["last_word_accuracy"], 0.01)
    axes.plot(
        steps, shares, color=HELD_OUT, marker="o", markersize=4, label="last words that are right"
    )
    guesses = {name: 100 * share for name, share in record["guesses"].items()}
    draw_levels(axes, guesses, left={max(guesses, key=guesses.get)}, form="{:.0f} %")
    axes.set_ylim(-8, 104)
    axes.set_ylabel("LAMBADA, % of last words")
    axes.legend(frameon=False, loc="upper left")


def draw_levels(
    axes: Axes, levels: Mapping[str, float], *, left: Collection[str], form: str = "{:.2f}"
) -> None:
    """Draw dashed lines with name and height; the lower of two close ones is labeled below.

    Args:
      axes: Axes to draw on.
      levels: Height of each level by name.
      left: Names of the levels that are labeled at the left; the others are at the right.
      form: Format of a height.
    """
    above = math.inf
    for name, height in sorted(levels.items(), key=lambda level: -level[1]):
        below = height == min(levels.values()) or above < 1.12 * height
        above = height
        axes.axhline(height, color=LEVEL, linestyle="--", linewidth=1)
        axes.annotate(
            f"{name} {form.format(height)}",
            xy=(0 if name in left else 1, height),
            xycoords=("axes fraction", "data"),
            xytext=(4 if name in left else -4, -4 if below else 3),
            textcoords="offset points",
            horizontalalignment="left" if name in left else "right",
            verticalalignment="top" if below else "bottom",
            color="0.25",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )


def columns(points: Sequence[Sequence[float]], scale: float) -> tuple[list[float], list[float]]:
    """Return the steps, and the heights divided by `scale`."""
    return [step for step, _ in points], [height / scale for _, height in points]
