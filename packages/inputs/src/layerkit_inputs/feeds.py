"""Feeds: which process reads which rows of the global batch.

How a batch is sharded decides who must read what. Where every process holds rows of its own, each
is a feed; where a batch is smaller than the number of devices (a fractional batch per core),
several processes hold the same rows and must read the same. The sharding is given as the rows that
the devices of each process hold (with JAX: from `NamedSharding.devices_indices_map`), so this
module needs no JAX and its answers no machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

RowRange = tuple[int, int]
"""Rows `[start, stop)`."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """One stream of input, read alike by every process that needs its rows."""

    rows: tuple[RowRange, ...]
    """Rows of the global batch, in order; neighbours are joined."""
    processes: tuple[int, ...]
    """Processes that hold exactly these rows."""

    @property
    def num_rows(self) -> int:
        """Rows of each batch of this feed."""
        return sum(stop - start for start, stop in self.rows)


@dataclasses.dataclass(frozen=True)
class FeedPlan:
    """All feeds of a batch, in the order of their first rows."""

    feeds: tuple[Feed, ...]

    @property
    def num_infeed_hosts(self) -> int:
        """What an input's `num_infeed_hosts` should be."""
        return len(self.feeds)

    @property
    def batch_size(self) -> int:
        """What an input's `batch_size` should be: rows of each feed."""
        return self.feeds[0].num_rows

    def infeed_host_index(self, process_index: int) -> int:
        """What an input's `infeed_host_index` should be on this process.

        Raises:
          ValueError: the process holds no rows.
        """
        for index, feed in enumerate(self.feeds):
            if process_index in feed.processes:
                return index
        raise ValueError(
            f"process {process_index} holds no rows of the batch; feeds: {self.feeds}."
        )


def plan_feeds(rows_by_process: Mapping[int, Iterable[RowRange | slice]]) -> FeedPlan:
    """Groups processes into feeds.

    Args:
      rows_by_process: For each process the rows that its devices hold, `(start, stop)` or slices
        with both ends given; repetitions (replicas in one process) are welcome.

    Raises:
      ValueError: the rows do not begin at 0 or leave gaps, or processes hold rows that overlap
        without being equal, or unlike numbers of rows: no set of equal readers feeds such a batch.
    """
    processes_of: dict[tuple[RowRange, ...], list[int]] = {}
    for process, ranges in sorted(rows_by_process.items()):
        processes_of.setdefault(_joined(process, ranges), []).append(process)
    feeds = tuple(
        Feed(rows=rows, processes=tuple(processes))
        for rows, processes in sorted(processes_of.items())
    )
    _check_cover(feeds)
    return FeedPlan(feeds)


def _joined(process: int, ranges: Iterable[RowRange | slice]) -> tuple[RowRange, ...]:
    plain = {(r.start, r.stop) if isinstance(r, slice) else tuple(r) for r in ranges}
    for bounds in plain:
        if not all(isinstance(bound, int) for bound in bounds) or not 0 <= bounds[0] < bounds[1]:
            raise ValueError(f"process {process}: expected rows (start, stop), got {bounds}.")
    joined: list[RowRange] = []
    for start, stop in sorted(plain):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    if not joined:
        raise ValueError(f"process {process} holds no rows of the batch.")
    return tuple(joined)


def _check_cover(feeds: tuple[Feed, ...]) -> None:
    at = 0
    for start, stop in sorted(bounds for feed in feeds for bounds in feed.rows):
        if start != at:
            problem = "are held by no process" if start > at else "are held by unlike processes"
            raise ValueError(
                f"rows {min(start, at)} to {max(start, at)} of the batch {problem}; feeds: {feeds}."
            )
        at = stop
    if len({feed.num_rows for feed in feeds}) != 1:
        raise ValueError(f"every feed must hold as many rows as the others; feeds: {feeds}.")
