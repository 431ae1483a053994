"""ParquetRows: rows of Parquet files, interleaved and shuffled in a window, by way of Grain.

Parquet is read a row group at a time, so rows are dealt out by row groups: each host reads its own
ones, a few of them interleaved, through a window in which rows are shuffled. States are the
positions inside these few row groups. For rows in any order, or on any number of hosts, write the
data as token records or ArrayRecord files.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.near_names import near_names
from layerkit_inputs.bad_records import BadRecordError
from layerkit_inputs.extras import require
from layerkit_inputs.grain_adaptor.iter_input import GrainIterInput
from layerkit_inputs.grain_adaptor.row_groups import RowGroup, open_row_group
from layerkit_inputs.parquet_bounds import MAX_ROW_GROUP_BYTES
from layerkit_inputs.text_files import find_text_files


def _transformed(row: Any, *, transform: Callable[[dict[str, Any]], Any]) -> Any:
    """What `transform` makes of a row; what cannot be read goes on as an error, not raised."""
    if isinstance(row, BadRecordError):
        return row
    try:
        return transform(row)
    except ValueError as error:
        return BadRecordError(f"{getattr(transform, '__qualname__', transform)}: {error}")


class ParquetRows(GrainIterInput):
    """Rows of Parquet files, dictionaries of their columns.

    A column of numbers or booleans gives numbers, one of lists of these gives arrays
    `[length]`; text and binary columns give str and bytes, which `transform` has to turn into
    arrays. Each host reads every `num_infeed_hosts`-th row group; while training there must be one
    for each. In memory are `cycle_length` row groups, `shuffle_window` rows and what `num_workers`
    keep ready.

    Files that cannot be opened, row groups that cannot be decoded, rows with a null, and rows of
    which `transform` raises ValueError are refused, or skipped and counted, by `on_bad_record`.
    Damage inside a page is noticed for certain only in files written with checksums
    (`write_page_checksum=True`).
    """

    paths: Sequence[str] | None = None
    """Files, folders (all `*.parquet` in them) or patterns. Required."""
    columns: Sequence[str] | None = None
    """Which columns to read. None: all."""
    transform: Callable[[dict[str, Any]], Any] | None = None
    """Makes a row of columns the row of a batch. None: it is one already."""
    cycle_length: int = 4
    """Row groups that are read by turns."""
    shuffle_window: int | None = None
    """Rows among which the next is drawn. None: 1024 while training, else rows keep their order."""
    max_row_group_bytes: int = MAX_ROW_GROUP_BYTES
    """Most bytes that the columns of a row group may decode to; `cycle_length` of them are in
    memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle_window is None:
            self.shuffle_window = 1024 if self.is_training else 1
        self._check_at_least(1, "cycle_length", "shuffle_window", "max_row_group_bytes")

    def _check_dataset(self) -> None:
        if self.dataset is not None:
            raise self._config_error("dataset is made of paths; set those alone.")
        if isinstance(self.paths, str) or not self.paths:
            raise self._config_error(f"paths={self.paths!r}; expected a list of at least one path.")

    @functools.cached_property
    def _row_groups(self) -> list[RowGroup]:
        """All of them, in the order of the files' names; only the files' footers are read."""
        assert self.paths is not None
        found = []
        for file in find_text_files(self.paths):
            if file.path.suffix == ".parquet" or str(file.path) in self.paths:
                found += self._row_groups_of(file.path)
        if not found:
            raise self._config_error(
                f"paths={list(self.paths)!r}: no rows in any Parquet file there."
            )
        return found

    def _row_groups_of(self, path: Path) -> list[RowGroup]:
        arrow = require("pyarrow", needed_by="ParquetRows")
        parquet = require("pyarrow.parquet", needed_by="ParquetRows")
        try:
            metadata = parquet.read_metadata(path)
            schema = metadata.schema.to_arrow_schema()
        except (arrow.ArrowException, OSError) as error:
            problem = f"cannot be read as Parquet ({str(error).rstrip('.')})."
            self._bad.report(file=str(path), record=None, problem=problem)
            return []
        for name in self.columns or ():
            if name not in schema.names:
                near = near_names(name, schema.names)
                raise self._config_error(
                    f"columns: {path} has no column {name!r}{near} Its columns: "
                    f"{', '.join(schema.names)}."
                )
        groups = range(metadata.num_row_groups)
        sizes = [metadata.row_group(group).num_rows for group in groups]
        return [RowGroup(str(path), n, size) for n, size in zip(groups, sizes, strict=True) if size]

    def _make_dataset(self, *, host_index: int, num_hosts: int, seed: int) -> Any:
        grain = require("grain", needed_by="ParquetRows")
        if self.is_training and len(self._row_groups) < num_hosts:
            raise self._config_error(
                f"{len(self._row_groups)} row groups for {num_hosts} hosts; while training each "
                "needs one. Write the files with smaller row groups."
            )
        numbers = np.arange(len(self._row_groups))
        if self.is_training:
            numbers = np.random.default_rng(seed).permutation(numbers)
        mine = [self._row_groups[number] for number in numbers[host_index::num_hosts]]
        if not mine:
            return grain.MapDataset.source([]).to_iter_dataset()
        open_group = functools.partial(
            open_row_group, columns=self.columns, max_bytes=self.max_row_group_bytes
        )
        rows = grain.experimental.InterleaveIterDataset(
            grain.MapDataset.source(mine).map(open_group), cycle_length=self.cycle_length
        )
        if self.transform is not None:
            rows = rows.map(functools.partial(_transformed, transform=self.transform))
        assert self.shuffle_window is not None
        if self.shuffle_window > 1:
            rows = grain.experimental.WindowShuffleIterDataset(
                rows, window_size=self.shuffle_window, seed=seed
            )
        return rows

    def _rows_of_hosts(self) -> list[int]:
        hosts = range(self.num_infeed_hosts)
        return [
            sum(group.num_rows for group in self._row_groups[host :: self.num_infeed_hosts])
            for host in hosts
        ]

    @functools.cached_property
    def _row_groups_crc32(self) -> int:
        sizes = [[Path(group.path).name, *group[1:]] for group in self._row_groups]
        return zlib.crc32(repr(sizes).encode())

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "row_groups_crc32": self._row_groups_crc32,
            "columns": None if self.columns is None else list(self.columns),
            "cycle_length": self.cycle_length,
            "shuffle_window": self.shuffle_window,
        }
