"""The batches of each host: which rows of the global batch it reads, and their one check.

The sharding of a batch determines the rows that each process reads. If every process holds
different rows, each process is a feed. If a batch is smaller than the number of devices (a
fractional batch per core), several processes hold the same rows and form one feed. The sharding is
given as the rows of each process's devices (in JAX: `NamedSharding.devices_indices_map`), so feeds
need neither JAX nor devices.

The runner checks every batch that a program reads. A wrong number of rows would count examples
wrongly or let processes wait for one another, and JAX wraps integers around without a word.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput

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
      ConfigError: The feeds are not equal parts of the rows from 0 on. Feeds overlap, for example,
        if a mesh of 2 × 3 devices is split over processes of two devices.
    """
    processes_of: dict[tuple[RowRange, ...], list[int]] = {}
    for process, ranges in sorted(rows_by_process.items()):
        processes_of.setdefault(_merged(ranges), []).append(process)
    feeds = tuple(
        Feed(rows=rows, processes=tuple(processes))
        for rows, processes in sorted(processes_of.items())
    )
    bounds = sorted(bounds for feed in feeds for bounds in feed.rows)
    has_all = all(a[1] == b[0] for a, b in itertools.pairwise([(0, 0), *bounds]))
    is_equal = len({feed.num_rows for feed in feeds}) == 1
    rows = [feed.rows for feed in feeds]
    require(has_all and is_equal, None, "rows of each feed", rows, "equal parts of all rows")
    return FeedPlan(feeds)


def _merged(ranges: Iterable[RowRange | slice]) -> tuple[RowRange, ...]:
    merged: list[RowRange] = []
    for start, stop in sorted((r.start, r.stop) if isinstance(r, slice) else r for r in ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


class ArraySpec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        """Return dtype and shape, such as `int32[8, 128]`."""
        return f"{self.dtype.name}{list(self.shape)}"


def spec_of(batch: NestedMap) -> NestedMap:
    """Return a batch with an ArraySpec in place of each array."""
    return batch.transform(lambda array: ArraySpec(np.shape(array), np.asarray(array).dtype))


def check_batch(source: BaseInput, batch: NestedMap, *, is_padded: bool = False) -> NestedMap:
    """Return a batch of an input if JAX can hold it and it has the rows that the input declares.

    It reads only shapes, dtypes and 64-bit integers. `get_next_padded` makes a padded batch.

    Raises:
      ConfigError: An array has the wrong number of rows, or an integer does not fit the dtype to
        which JAX converts it.
    """
    rows = source.local_batch_size + (source.batch_padding_size if is_padded else 0)
    for path, leaf in batch.flatten_items():
        shape = list(np.shape(leaf))
        expected = f"{rows} rows, which the input declares; `pad_rows` adds rows of weight 0"
        require(shape[:1] == [rows], source._label, f"shape of {path}", shape, expected)
        value, kind = _overflowing(leaf), getattr(leaf, "dtype", None)
        expected = "a value of 32 bits, to which JAX converts it, or JAX_ENABLE_X64=1"
        require(value is None, source._label, f"{kind} value of {path}", value, expected)
    return batch


def dtype_in_jax(dtype: np.dtype) -> np.dtype:
    """Return the dtype to which JAX converts arrays of the host."""
    import jax  # late, since data workers do not load JAX

    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _overflowing(leaf: Any) -> int | None:
    """Return a value of an integer array that its dtype in JAX cannot hold, if there is one."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "iu" or leaf.dtype.itemsize < 8:
        return None
    limits = np.iinfo(dtype_in_jax(leaf.dtype))
    extremes = (int(leaf.min()), int(leaf.max())) if leaf.size else ()
    return next((x for x in extremes if not limits.min <= x <= limits.max), None)
