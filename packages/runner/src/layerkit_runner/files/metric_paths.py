"""How metrics of several programs are named together: `NAME/METRIC`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def by_path(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several programs as `NAME/METRIC`."""
    return {
        f"{name}/{metric}": value
        for name, metrics in found.items()
        for metric, value in metrics.items()
    }


def program_of(metric: str, names: Iterable[str]) -> str | None:
    """Which of these programs a metric `NAME/METRIC` is of; None if it is of none.

    Args:
      metric: Its path.
      names: Of all programs, since one may be called as the beginning of another: `heldout` and
        `heldout/averaged`.
    """
    return max((name for name in names if metric.startswith(f"{name}/")), key=len, default=None)
