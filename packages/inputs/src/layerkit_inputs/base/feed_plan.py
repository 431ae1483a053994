"""Assignment of the rows of the global batch to processes.

The sharding of a batch determines the rows that each process reads. If every process holds
different rows, each process is a feed. If a batch is smaller than the number of devices (a
fractional batch per core), several processes hold the same rows and form one feed. The sharding is
given as the rows of each process's devices (in JAX: `NamedSharding.devices_indices_map`), so this
module needs neither JAX nor devices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from layerkit.config.checks import require

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
        """Return the value for the field `infeed_host_index` of an input on a process."""
        return next(n for n, feed in enumerate(self.feeds) if process_index in feed.processes)


def plan_feeds(rows_by_process: Mapping[int, Iterable[RowRange | slice]]) -> FeedPlan:
    """Group processes into feeds.

    Args:
      rows_by_process: Rows of the devices of each process, as `(start, stop)` or as slices with
        both ends. Ranges may occur several times, for replicas in one process.

    Raises:
      ConfigError: The feeds are not equal parts of the rows from 0 on.
    """
    processes_of: dict[tuple[RowRange, ...], list[int]] = {}
    for process, ranges in sorted(rows_by_process.items()):
        processes_of.setdefault(_merged(ranges), []).append(process)
    feeds = tuple(
        Feed(rows=rows, processes=tuple(processes))
        for rows, processes in sorted(processes_of.items())
    )
    _check_cover(feeds)
    return FeedPlan(feeds)


def _merged(ranges: Iterable[RowRange | slice]) -> tuple[RowRange, ...]:
    merged: list[RowRange] = []
    for start, stop in sorted((r.start, r.stop) if isinstance(r, slice) else r for r in ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _check_cover(feeds: tuple[Feed, ...]) -> None:
    bounds = sorted(bounds for feed in feeds for bounds in feed.rows)
    has_all = all(a[1] == b[0] for a, b in itertools.pairwise([(0, 0), *bounds]))
    is_equal = len({feed.num_rows for feed in feeds}) == 1
    rows = [feed.rows for feed in feeds]
    require(has_all and is_equal, None, "rows of each feed", rows, "equal parts of all rows")
