"""HuggingFaceData: the base of inputs that read a Hugging Face data set on this machine.

`datasets` reads JSON lines, Parquet, Arrow, CSV and plain text, and folders that hold such files or
were written by `save_to_disk`. This module adds three things. It uses the network only if
`allow_network` is set; `datasets` looks up an unknown path on the Hub, with retries. Errors about a
missing split or column suggest similar names. Errors about an unreadable file name the file and the
record.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from layerkit.config.checks import check_choice, require
from layerkit_inputs.base.bad_records import BadRecordError, BadRecords, OnBadRecord
from layerkit_inputs.base.base_input import BaseInput, counted
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.hugging_face.unreadable_files import faulty_file, first_unreadable
from layerkit_inputs.parquet.row_group_sizes import MAX_ROW_GROUP_BYTES, check_row_group

_FORMATS = ("arrow", "csv", "json", "parquet", "text")
# Files in which a folder may name its data files.
_SETTINGS = ("README.md", ".huggingface.yaml")
_READ_URLS = "To read URLs, set allow_network=True."
_FILES_OF_SAVE_TO_DISK = ("dataset_dict.json", "state.json")
_STREAMED_SHARDS = 64
"""Number of shards of a streamed `save_to_disk` data set, for hosts and for shuffling."""


class HuggingFaceData(BaseInput):
    """Base of inputs over one split of a Hugging Face data set, which is opened when first needed.

    A subclass may override `_open_mapped` or `_open_streamed` to supply its own data set.
    """

    path: str | None = None
    """The format of `data_files` (`json`, `parquet`, `arrow`, `csv`, `text`), or a folder."""
    data_files: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    """Files or patterns of the split `train`, or a mapping from splits to these."""
    config_name: str | None = None
    """Name of the configuration, for a data set that has several."""
    split: str = "train"
    """Name of the split. Also a slice such as `train[:10%]` or a sum such as `train+test`, unless
    the data set is streamed or was written by `save_to_disk`."""
    cache_dir: str | None = None
    """Folder in which `datasets` caches converted files. None: the default of `datasets`."""
    allow_network: bool = False
    """True to look up `path` on the Hub and to allow URLs in `data_files`."""
    on_bad_record: OnBadRecord = "refuse"
    """Policy for examples that cannot be used, and for files in `data_files` that are empty or
    truncated: `refuse` raises, `skip` counts them. An invalid line of JSON always raises."""
    max_row_group_bytes: int = MAX_ROW_GROUP_BYTES
    """Largest size in bytes that a row group of a Parquet file may declare."""

    def __post_init__(self) -> None:
        """Check the fields; no file is opened."""
        super().__post_init__()
        label, files = self._label, self.data_files
        require(self.path is not None, label, "path", None, f"a folder, or one of {_FORMATS}")
        check_choice(label, get_args(OnBadRecord), on_bad_record=self.on_bad_record)
        needs_files = files is not None or self.path in _FORMATS
        require(files or not needs_files, label, "data_files", files, "at least one file")
        self._bad = BadRecords(self.on_bad_record)
        self._files: list[str] = []
        self._format = str(self.path)

    @property
    def num_skipped(self) -> int:
        """Number of examples and files that this host skipped, counted at each reading."""
        return self._bad.num_skipped

    def _library(self) -> Any:
        datasets = require_extra("datasets", needed_by=type(self).__qualname__)
        if not self.allow_network:
            # Otherwise `datasets` reports every opened data set to the Hub, also local files, and
            # waits if there is no network.
            datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        return datasets

    def _open_mapped(self) -> Any:
        """Return the split as a `datasets.Dataset`."""
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
        """Return the split as a `datasets.IterableDataset`."""
        datasets = self._library()
        is_whole = re.fullmatch(r"\w[\w.-]*", self.split)
        require(is_whole, self._label, "split", self.split, "a whole split, since this is a stream")
        if self._is_saved_to_disk():
            saved = self._open_saved(datasets)
            return saved.to_iterable_dataset(num_shards=max(min(len(saved), _STREAMED_SHARDS), 1))
        builder = self._builder(datasets)
        try:
            return builder.as_streaming_dataset(split=self.split)
        except Exception as error:  # also StopIteration, which would look like the end of the data
            raise self._unreadable(error) from error

    def _is_saved_to_disk(self) -> bool:
        return any(Path(str(self.path), name).is_file() for name in _FILES_OF_SAVE_TO_DISK)

    def _open_saved(self, datasets: Any) -> Any:
        try:
            saved = datasets.load_from_disk(str(self.path))
        except Exception as error:  # errors of pyarrow, or of invalid JSON metadata
            self._files = self._arrow_files()
            raise self._unreadable(error) from error
        self._files, self._format = self._arrow_files(), "arrow"
        splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        self._check_split([self.split], splits)
        return splits[self.split]

    def _arrow_files(self) -> list[str]:
        return sorted(glob.glob(f"{glob.escape(str(self.path))}/**/*.arrow", recursive=True))

    def _builder(self, datasets: Any) -> Any:
        """Return the `datasets` builder of the files, after checks that they exist."""
        self._check_path()
        wanted = [name.strip() for name in re.findall(r"(?:^|\+)([^\[+]+)", self.split)]
        files = self._files_by_split(wanted)
        try:
            builder = datasets.load_dataset_builder(
                str(self.path), self.config_name, data_files=files, cache_dir=self.cache_dir
            )
        except (ValueError, OSError) as error:
            raise self._config_error(
                f"cannot be opened ({error})", field="path", value=self.path
            ) from error
        self._format = builder.name
        found = builder.config.data_files or {}
        if found:
            self._check_split(wanted, found)
            self._files = [str(file) for name in wanted for file in found[name]]
        if builder.name == "parquet":
            self._check_parquet(builder.config)
        return builder

    def _check_parquet(self, config: Any) -> None:
        """Enable verification of page checksums, and check the declared sizes of row groups."""
        parquet = require_extra("pyarrow.parquet", needed_by=type(self).__qualname__)
        has_options = hasattr(config, "fragment_scan_options")  # since datasets 4.2
        if has_options and config.fragment_scan_options is None:
            dataset = require_extra("pyarrow.dataset", needed_by=type(self).__qualname__)
            config.fragment_scan_options = dataset.ParquetFragmentScanOptions(
                page_checksum_verification=True
            )
        for file in self._files:
            try:
                if Path(file).is_file():
                    metadata = parquet.read_metadata(file)
                    for number in range(metadata.num_row_groups):
                        check_row_group(
                            metadata, number, columns=None, max_bytes=self.max_row_group_bytes
                        )
            except BadRecordError as error:
                raise self._config_error(f"{file}: {error}") from None
            except Exception as error:  # of any reader of any format below
                raise self._unreadable(error) from error

    def _check_path(self) -> None:
        path = str(self.path)
        if self.allow_network or path in _FORMATS:
            return
        if Path(path).is_dir():
            for name in _SETTINGS:
                if urls := _urls_of_settings(Path(path, name)):
                    field = f"configs in {name}"
                    raise self._config_error(field=field, value=urls[0], hint=_READ_URLS)
            return
        raise self._config_error(
            field="path",
            value=path,
            expected="an existing folder, or a format",
            choices=_FORMATS,
            hint="To look it up on the Hub, set allow_network=True.",
        )

    def _files_by_split(self, wanted: Sequence[str]) -> dict[str, list[str]] | None:
        """Return the checked files of the wanted splits in `data_files`, or None if it is unset."""
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
                    f"all {len(found)} files of split {name!r} were skipped",
                    field="data_files",
                    value=entries,
                )
        return files

    def _matches(self, entry: str) -> list[str]:
        if "://" in entry:
            if not self.allow_network:
                raise self._config_error(field="data_files", value=entry, hint=_READ_URLS)
            return [entry]
        matches = sorted(str(Path(match).absolute()) for match in glob.glob(entry, recursive=True))
        if not matches:
            folder = Path(entry).parent
            names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
            raise self._config_error(
                field="data_files",
                value=entry,
                expected="an existing file, or a pattern that matches files",
                choices=[str(folder / name) for name in names],
            )
        return matches

    def _is_faulty(self, file: str) -> bool:
        problem = None if "://" in file else faulty_file(file, str(self.path))
        if problem is not None:
            self._bad.report(file=file, record=None, problem=problem)
        return problem is not None

    def _check_split(self, wanted: Sequence[str], found: Iterable[Any]) -> None:
        for name in wanted:
            check_choice(self._label, [str(name) for name in found], split=name)

    def _describe_files(self) -> str:
        files = f" of {len(self._files)} file(s), first {self._files[0]}" if self._files else ""
        return f"split {self.split!r}{files}"

    def _data_text(self) -> str:
        count = self._num_documents()  # which opens the files
        documents = "documents not counted" if count is None else counted(count, "document")
        sizes = [Path(file).stat().st_size for file in self._files if Path(file).is_file()]
        return (
            f"split {self.split!r} of {self.path}: {counted(len(self._files), 'file')},"
            f" {documents}, {counted(sum(sizes), 'byte')}"
        )

    def _num_documents(self) -> int | None:
        """Open the files and return the number of documents, or None if it is unknown."""
        raise NotImplementedError

    def _unreadable(self, error: Exception) -> Exception:
        """Return an error that names the unreadable file and record, if they can be found."""
        found = first_unreadable(self._files, self._format)
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__  # the library wraps what its readers raise
        if found is None:
            words = " ".join(str(error).split()) or type(error).__name__
            return self._config_error(f"cannot read {self._describe_files()}: {words}")
        return self._config_error(found, hint="Repair or remove the file.")

    def _guarded(self, tables: Iterator[Any]) -> Iterator[Any]:
        """Yield the tables of a stream; errors of the library become errors that name the file."""
        try:
            yield from tables
        except Exception as error:  # of any reader of any format below
            raise self._unreadable(error) from error


def _urls_of_settings(file: Path) -> list[str]:
    """Return the URLs of data files that the YAML of a data set's folder names."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".md":
        front_matter = re.match(r"\s*---[^\S\n]*\n(.*?)\n---", text, re.DOTALL)
        text = front_matter[1] if front_matter else ""
    settings = require_extra("yaml", needed_by="HuggingFaceData").safe_load(text)
    configs = settings.get("configs") if isinstance(settings, dict) else None
    return re.findall(r"\w+://[^\s'\"]+", str(configs))
