"""Assignment of the rows of the global batch to processes.

The sharding of a batch determines the rows that each process reads. If every process holds
different rows, each process is a feed. If a batch is smaller than the number of devices (a
fractional batch per core), several processes hold the same rows and form one feed. The sharding is
given as the rows of each process's devices (in JAX: `NamedSharding.devices_indices_map`), so this
module needs neither JAX nor devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from layerkit.errors import ConfigError

RowRange = tuple[int, int]
"""Start and end of a half-open range of rows, `[start, stop)`."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """A stream of batches that all processes with the same rows read."""

    rows: tuple[RowRange, ...]
    """Rows of the global batch in order. Adjacent ranges are merged."""
    processes: tuple[int, ...]
    """Indices of the processes that hold exactly these rows."""

    @property
    def num_rows(self) -> int:
        """Number of rows of each batch of this feed."""
        return sum(stop - start for start, stop in self.rows)


@dataclasses.dataclass(frozen=True)
class FeedPlan:
    """All feeds of a batch, in the order of their first rows."""

    feeds: tuple[Feed, ...]

    @property
    def num_infeed_hosts(self) -> int:
        """Value for the field `num_infeed_hosts` of an input."""
        return len(self.feeds)

    @property
    def batch_size(self) -> int:
        """Value for the field `batch_size` of an input: rows of each feed."""
        return self.feeds[0].num_rows

    def infeed_host_index(self, process_index: int) -> int:
        """Return the value for the field `infeed_host_index` of an input on a process.

        Raises:
          ConfigError: The process holds no rows.
        """
        for index, feed in enumerate(self.feeds):
            if process_index in feed.processes:
                return index
        raise ConfigError(
            "a process holds no rows of the batch",
            field="process_index",
            value=process_index,
            choices=[process for feed in self.feeds for process in feed.processes],
        )


def plan_feeds(rows_by_process: Mapping[int, Iterable[RowRange | slice]]) -> FeedPlan:
    """Group processes into feeds.

    Args:
      rows_by_process: Rows of the devices of each process, as `(start, stop)` or as slices with
        both ends. Ranges may occur several times, for replicas in one process.

    Raises:
      ConfigError: The rows do not begin at 0 or have gaps, rows of processes overlap without being
        equal, or processes hold different numbers of rows.
    """
    processes_of: dict[tuple[RowRange, ...], list[int]] = {}
    for process, ranges in sorted(rows_by_process.items()):
        processes_of.setdefault(_merged(process, ranges), []).append(process)
    feeds = tuple(
        Feed(rows=rows, processes=tuple(processes))
        for rows, processes in sorted(processes_of.items())
    )
    _check_cover(feeds)
    return FeedPlan(feeds)


def _merged(process: int, ranges: Iterable[RowRange | slice]) -> tuple[RowRange, ...]:
    plain = {(r.start, r.stop) if isinstance(r, slice) else tuple(r) for r in ranges}
    for bounds in plain:
        if not all(isinstance(bound, int) for bound in bounds) or not 0 <= bounds[0] < bounds[1]:
            raise ConfigError(
                field=f"rows of process {process}", value=bounds, expected="(start, stop)"
            )
    merged: list[RowRange] = []
    for start, stop in sorted(plain):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    if not merged:
        raise ConfigError(
            field=f"rows of process {process}", value=[], expected="rows of the batch"
        )
    return tuple(merged)


def _check_cover(feeds: tuple[Feed, ...]) -> None:
    at = 0
    for start, stop in sorted(bounds for feed in feeds for bounds in feed.rows):
        if start != at:
            problem = "no process holds" if start > at else "processes with different rows hold"
            raise ConfigError(
                f"{problem} some rows of the batch",
                field="rows",
                value=(min(start, at), max(start, at)),
                expected="rows of exactly one feed",
                hint=f"Feeds: {feeds}.",
            )
        at = stop
    sizes = [feed.num_rows for feed in feeds]
    if len(set(sizes)) != 1:
        raise ConfigError(field="rows of each feed", value=sizes, expected="equal numbers of rows")
