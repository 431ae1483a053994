"""ParquetRows: rows of Parquet files, interleaved and shuffled in a window, through Grain.

Parquet is read by row groups. Each host reads its own row groups, interleaves a few of them, and
shuffles rows in a window. The state holds the positions in these row groups. To shuffle all rows,
or to resume on any number of hosts, write the data as token records or ArrayRecord files.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.config.checks import check_choice, require
from layerkit.errors import first_names
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.base.errors import BadRecordError, is_storage_failure, require_extra
from layerkit_inputs.base.find_files import find_text_files
from layerkit_inputs.grain.iter_input import GrainStream
from layerkit_inputs.parquet.row_group_sizes import MAX_ROW_GROUP_BYTES
from layerkit_inputs.parquet.row_groups import RowGroup, open_row_group


def _transformed(row: Any, *, transform: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the transformed row, or a BadRecordError (not raised) if it cannot be read."""
    if isinstance(row, BadRecordError):
        return row
    try:
        return transform(row)
    except ValueError as error:
        return BadRecordError(str(error), owner=getattr(transform, "__qualname__", str(transform)))


class ParquetRows(GrainStream):
    """An input of rows of Parquet files, dictionaries of their columns.

    Columns of numbers or booleans become numbers, and columns of lists of these become arrays
    `[length]`. Text and binary columns become str and bytes, which `transform` has to convert to
    arrays. Each host reads every `num_infeed_hosts`-th row group; training needs at least one per
    host. Memory holds `cycle_length` row groups, `shuffle_window` rows and the prefetched rows of
    `num_workers`.

    `on_bad_record` applies to files that cannot be opened, row groups that cannot be decoded, rows
    with a null, and rows for which `transform` raises ValueError. Damage inside a page is only
    detected reliably in files with page checksums (`write_page_checksum=True`).
    """

    paths: Sequence[str] | None = None
    """Files, folders (all `*.parquet` in them) or patterns. Required."""
    columns: Sequence[str] | None = None
    """Names of the columns to read. None: all."""
    transform: Callable[[dict[str, Any]], Any] | None = None
    """Function from a row of columns to the row of a batch. None: the row is used unchanged."""
    cycle_length: int = 4
    """Number of row groups that are interleaved."""
    shuffle_window: int | None = None
    """Number of rows in the shuffle window. None: 1024 in training, else 1 (no shuffling)."""
    max_row_group_bytes: int = MAX_ROW_GROUP_BYTES
    """Largest size in bytes of the decoded columns of a row group; `cycle_length` row groups are in
    memory."""

    def __post_init__(self) -> None:
        """Set the default of `shuffle_window` and check the fields."""
        super().__post_init__()
        if self.shuffle_window is None:
            self.shuffle_window = 1024 if self.is_training else 1
        self._check_at_least(1, "cycle_length", "shuffle_window")

    @functools.cached_property
    def _row_groups(self) -> list[RowGroup]:
        """Row groups of all files in the order of file names; only footers are read."""
        paths = self.paths or ()
        groups: list[RowGroup] = []
        others = [path for path in paths if not Path(path).is_dir()]
        named = {file.path.resolve() for file in (find_text_files(others) if others else ())}
        for file in find_text_files(paths):
            # Other files of folders are left out.
            if file.path.suffix == ".parquet" or file.path.resolve() in named:
                groups += self._row_groups_of(file.path)
        require(groups, self._label, "paths", list(paths), "Parquet files with rows")
        return groups

    def _row_groups_of(self, path: Path) -> list[RowGroup]:
        arrow = require_extra("pyarrow", needed_by="ParquetRows")
        parquet = require_extra("pyarrow.parquet", needed_by="ParquetRows")
        try:
            metadata = parquet.read_metadata(path)
            names = metadata.schema.to_arrow_schema().names
        except (arrow.ArrowException, OSError) as error:
            if is_storage_failure(error):
                raise
            problem = f"cannot be read as Parquet ({str(error).rstrip('.')})."
            self._bad.report(file=str(path), record=None, problem=problem)
            return []
        for name in self.columns or ():
            check_choice(f"{self._label}: {path}", names, columns=name)
        numbers = range(metadata.num_row_groups)
        groups = [RowGroup(str(path), n, metadata.row_group(n).num_rows) for n in numbers]
        return [group for group in groups if group.num_rows]

    def _make_dataset(self, *, host_index: int, num_hosts: int, seed: int) -> Any:
        grain = require_extra("grain", needed_by="ParquetRows")
        count = len(self._row_groups)
        expected = f"at least {num_hosts}, one for each host in training"
        is_enough = count >= num_hosts or not self.is_training
        require(is_enough, self._label, "number of row groups", count, expected)
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

    def _data_text(self) -> str:
        files = {group.path for group in self._row_groups}
        rows = sum(group.num_rows for group in self._row_groups)
        size = sum(Path(file).stat().st_size for file in files)
        counts = (counted(len(files), "file"), counted(rows, "row"), counted(size, "byte"))
        return f"{first_names(self.paths or ())}: {', '.join(counts)}"

    def _fingerprint(self) -> dict[str, Any]:
        sizes = [[Path(group.path).name, *group[1:]] for group in self._row_groups]
        return {
            "row_groups_crc32": zlib.crc32(repr(sizes).encode()),
            "columns": None if self.columns is None else list(self.columns),
            "cycle_length": self.cycle_length,
            "shuffle_window": self.shuffle_window,
        }
