"""Hugging Face data sets on this machine: opened, checked, and refused in words.

`datasets` reads JSON lines, Parquet, Arrow, CSV and plain text, and folders written by
`save_to_disk` or holding such files. What is added here: nothing is looked up on the network unless
asked for (a misspelt path would otherwise be sought on the Hub, with retries); a missing split or
column is answered with the near ones; and where a file cannot be read, the file and the record in
it are named, which the library does not do.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from layerkit.near_names import near_names
from layerkit_inputs.bad_records import BadRecordError, BadRecords, OnBadRecord
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.extras import require
from layerkit_inputs.hugging_face.faults import faulty_file, first_unreadable
from layerkit_inputs.parquet_bounds import MAX_ROW_GROUP_BYTES, check_row_groups

_FORMATS = ("arrow", "csv", "json", "parquet", "text")
_FILES_OF_SAVE_TO_DISK = ("dataset_dict.json", "state.json")
_STREAMED_SHARDS = 64
"""Into how many shards a data set of `save_to_disk` is cut, for hosts and for shuffling."""


class HuggingFaceData(BaseInput):
    """Which data set, for readers of Hugging Face's; it is opened when first needed.

    A subclass may define `_open_mapped` or `_open_streamed` to hand in a data set of its making.
    """

    path: str | None = None
    """The format of `data_files` (`json`, `parquet`, `arrow`, `csv`, `text`), or a folder."""
    data_files: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    """Files or patterns, of the split `train`, or by split."""
    config_name: str | None = None
    """Which configuration of a data set that has several."""
    split: str = "train"
    """Which split; of data sets that are not streamed also a slice, such as `train[:10%]`."""
    cache_dir: str | None = None
    """Where `datasets` keeps what it converts. None: its default."""
    allow_network: bool = False
    """Whether `path` may be sought on the Hub and `data_files` may be addresses."""
    on_bad_record: OnBadRecord = "refuse"
    """`refuse` examples that cannot be used and files of `data_files` that are empty or truncated,
    or `skip` and count them. A broken line of JSON in the midst of a file is always refused."""
    max_row_group_bytes: int = MAX_ROW_GROUP_BYTES
    """Most bytes that a row group of a Parquet file may declare."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None:
            raise self._config_error(f"path is not set; expected a folder, or one of {_FORMATS}.")
        if self.on_bad_record not in get_args(OnBadRecord):
            raise self._config_error(
                f"on_bad_record={self.on_bad_record!r}; expected one of {get_args(OnBadRecord)}."
            )
        if self.data_files is not None and not self.data_files:
            raise self._config_error(f"data_files={self.data_files!r}; expected at least one file.")
        if self.path in _FORMATS and self.data_files is None:
            raise self._config_error(
                f"path={self.path!r} is a format; name the files by data_files."
            )
        self._bad = BadRecords(self.on_bad_record)
        self._files: list[str] = []
        self._format = str(self.path)

    @property
    def num_skipped(self) -> int:
        """Examples and files that this host left out; what it reads again counts again."""
        return self._bad.num_skipped

    def _library(self) -> Any:
        datasets = require("datasets", needed_by=type(self).__qualname__)
        if not self.allow_network:
            # Else it tells the Hub of every data set opened, also of files of this machine, and
            # waits where there is no network.
            datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        return datasets

    def _open_mapped(self) -> Any:
        """The split as a `datasets.Dataset`."""
        datasets = self._library()
        if self._is_saved_to_disk():
            return self._open_saved(datasets)
        builder = self._builder(datasets)
        try:
            builder.download_and_prepare()
            return builder.as_dataset(split=self.split)
        except Exception as error:  # of any reader of any format below
            raise self._unreadable(error) from error

    def _open_streamed(self) -> Any:
        """The split as a `datasets.IterableDataset`."""
        datasets = self._library()
        if not re.fullmatch(r"\w[\w.-]*", self.split):
            raise self._config_error(
                f"split={self.split!r}; a stream has no slices, name a whole split."
            )
        if self._is_saved_to_disk():
            saved = self._open_saved(datasets)
            return saved.to_iterable_dataset(num_shards=max(min(len(saved), _STREAMED_SHARDS), 1))
        builder = self._builder(datasets)
        try:
            return builder.as_streaming_dataset(split=self.split)
        except Exception as error:  # StopIteration among them, which would pass for an end of data
            raise self._unreadable(error) from error

    def _is_saved_to_disk(self) -> bool:
        return any(Path(str(self.path), name).is_file() for name in _FILES_OF_SAVE_TO_DISK)

    def _open_saved(self, datasets: Any) -> Any:
        try:
            saved = datasets.load_from_disk(str(self.path))
        except Exception as error:  # pyarrow's, or of broken JSON beside the data
            self._files = self._arrow_files()
            raise self._unreadable(error) from error
        self._files, self._format = self._arrow_files(), "arrow"
        splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        self._check_split([self.split], splits)
        return splits[self.split]

    def _arrow_files(self) -> list[str]:
        return sorted(glob.glob(f"{glob.escape(str(self.path))}/**/*.arrow", recursive=True))

    def _builder(self, datasets: Any) -> Any:
        """What reads the files, each of which is there."""
        self._check_path()
        wanted = re.findall(r"(?:^|\+)([^\[+]+)", self.split)
        files = self._files_by_split(wanted)
        try:
            builder = datasets.load_dataset_builder(
                str(self.path), self.config_name, data_files=files, cache_dir=self.cache_dir
            )
        except (ValueError, OSError) as error:
            raise self._config_error(f"path={self.path!r} cannot be opened: {error}") from error
        self._format = builder.name
        found = builder.config.data_files or {}
        if found:
            self._check_split(wanted, found)
            self._files = [str(file) for name in wanted for file in found[name]]
        if builder.name == "parquet":
            self._check_parquet(builder.config)
        return builder

    def _check_parquet(self, config: Any) -> None:
        """Have page checksums verified, and refuse files that declare too large row groups."""
        parquet = require("pyarrow.parquet", needed_by=type(self).__qualname__)
        if getattr(config, "fragment_scan_options", self) is None:  # since datasets 4.2
            dataset = require("pyarrow.dataset", needed_by=type(self).__qualname__)
            config.fragment_scan_options = dataset.ParquetFragmentScanOptions(
                page_checksum_verification=True
            )
        for file in self._files:
            try:
                if Path(file).is_file():
                    metadata = parquet.read_metadata(file)
                    check_row_groups(metadata, max_bytes=self.max_row_group_bytes)
            except BadRecordError as error:
                raise self._config_error(f"{file}: {error}") from None
            except Exception as error:  # of any reader of any format below
                raise self._unreadable(error) from error

    def _check_path(self) -> None:
        path = str(self.path)
        if self.allow_network or path in _FORMATS or Path(path).is_dir():
            return
        raise self._config_error(
            f"path={path!r} is neither a folder nor a format{near_names(path, _FORMATS)} Expected "
            f"a folder or one of {_FORMATS}; to seek it on the Hub, set allow_network=True."
        )

    def _files_by_split(self, wanted: Sequence[str]) -> dict[str, list[str]] | None:
        """`data_files` of the wanted splits, patterns resolved and files checked."""
        if self.data_files is None:
            return None
        by_split = (
            self.data_files if isinstance(self.data_files, Mapping) else {"train": self.data_files}
        )
        self._check_split(wanted, by_split)
        files = {}
        for name in wanted:
            entries = by_split[name]
            entries = [entries] if isinstance(entries, str) else entries
            found = [file for entry in entries for file in self._matches(str(entry))]
            files[name] = [file for file in found if not self._is_faulty(file)]
            if not files[name]:
                raise self._config_error(
                    f"data_files of {name!r}: all {len(found)} files are left out."
                )
        return files

    def _matches(self, entry: str) -> list[str]:
        if "://" in entry:
            if not self.allow_network:
                raise self._config_error(f"data_files: {entry!r} needs allow_network=True.")
            return [entry]
        matches = sorted(str(Path(match).absolute()) for match in glob.glob(entry, recursive=True))
        if not matches:
            folder = Path(entry).parent
            names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
            raise FileNotFoundError(
                f"data_files: nothing to read at {entry!r}{near_names(Path(entry).name, names)}"
            )
        return matches

    def _is_faulty(self, file: str) -> bool:
        problem = None if "://" in file else faulty_file(file, str(self.path))
        if problem is not None:
            self._bad.report(file=file, record=None, problem=problem)
        return problem is not None

    def _check_split(self, wanted: Sequence[str], there_are: Iterable[Any]) -> None:
        names = [str(name) for name in there_are]
        for name in wanted:
            if name not in names:
                raise self._config_error(
                    f"split={self.split!r}: there is no split {name!r}{near_names(name, names)} "
                    f"There are: {', '.join(names)}."
                )

    def _check_column(self, field: str, column: str, there_are: Sequence[str]) -> None:
        if column not in there_are:
            raise self._config_error(
                f"{field}={column!r}: there is no such column{near_names(column, there_are)} "
                f"There are: {', '.join(there_are)}."
            )

    def _data_in_words(self) -> str:
        files = f" of {len(self._files)} file(s), first {self._files[0]}" if self._files else ""
        return f"the split {self.split!r}{files}"

    def _unreadable(self, error: Exception) -> Exception:
        """What to raise where the library could not read: file and record, if they are found."""
        found = first_unreadable(self._files, self._format)
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__  # the library wraps what its readers raise
        if found is None:
            words = " ".join(str(error).split()) or type(error).__name__
            return self._config_error(f"{self._data_in_words()} cannot be read: {words}")
        return self._config_error(f"{found}; repair or remove it.")

    def _guarded(self, tables: Iterator[Any]) -> Iterator[Any]:
        """`tables` of a stream; what the library raises names the file."""
        try:
            yield from tables
        except Exception as error:  # of any reader of any format below
            raise self._unreadable(error) from error
