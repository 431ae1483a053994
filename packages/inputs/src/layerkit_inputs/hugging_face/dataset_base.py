"""HuggingFaceData: the base of inputs that read a Hugging Face data set on this machine.

`datasets` reads JSON lines, Parquet, Arrow, CSV and plain text, and folders that hold such files or
were written by `save_to_disk`. This module adds three things. It uses the network only if
`allow_network` is set; `datasets` looks up an unknown path on the Hub, with retries. Errors about a
missing split or column suggest similar names. Errors about an unreadable file name the file and the
record.
"""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerkit.config.checks import check_choice, require
from layerkit_inputs.base.base_input import BaseInput, counted
from layerkit_inputs.base.errors import OnBadRecord, is_storage_failure, require_extra
from layerkit_inputs.hugging_face.unreadable_files import FORMATS, find_fault, first_unreadable
from layerkit_inputs.parquet.row_group_sizes import (
    MAX_ROW_GROUP_BYTES,
    declared_bytes,
    too_large_error,
)

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
        self._files: list[str] = []
        self._format = str(self.path)

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
        with self._naming_unreadable_files():
            builder.download_and_prepare()
            return builder.as_dataset(split=self.split)

    def _open_streamed(self) -> Any:
        """Return the split as a `datasets.IterableDataset`."""
        datasets = self._library()
        if self._is_saved_to_disk():
            saved = self._open_saved(datasets)
            return saved.to_iterable_dataset(num_shards=max(min(len(saved), _STREAMED_SHARDS), 1))
        builder = self._builder(datasets)
        with self._naming_unreadable_files():
            return builder.as_streaming_dataset(split=self.split)

    def _is_saved_to_disk(self) -> bool:
        return any(Path(str(self.path), name).is_file() for name in _FILES_OF_SAVE_TO_DISK)

    def _open_saved(self, datasets: Any) -> Any:
        pattern = f"{glob.escape(str(self.path))}/**/*.arrow"
        self._files, self._format = sorted(glob.glob(pattern, recursive=True)), "arrow"
        with self._naming_unreadable_files():
            saved = datasets.load_from_disk(str(self.path))
        splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
        check_choice(self._label, list(splits), split=self.split)
        return splits[self.split]

    def _builder(self, datasets: Any) -> Any:
        """Return the `datasets` builder of the files, after checks that they exist."""
        path = str(self.path)
        if not self.allow_network:
            if path not in FORMATS and not Path(path).is_dir():
                raise self._config_error(
                    field="path",
                    value=self.path,
                    expected="an existing folder, or a format",
                    choices=FORMATS,
                    hint="To look it up on the Hub, set allow_network=True.",
                )
            for url in self._urls():
                raise self._config_error(field="data_files", value=url, hint=_READ_URLS)
        splits = [name.strip() for name in re.findall(r"(?:^|\+)([^\[+]+)", self.split)]
        files = self._files_by_split(splits)
        with self._naming_unreadable_files():
            builder = datasets.load_dataset_builder(
                path, self.config_name, data_files=files, cache_dir=self.cache_dir
            )
        self._format = builder.name
        if by_split := builder.config.data_files:
            for split in splits:
                check_choice(self._label, list(map(str, by_split)), split=split)
            self._files = [str(file) for split in splits for file in by_split[split]]
        if builder.name == "parquet":
            self._bound_parquet(builder.config)
        return builder

    def _bound_parquet(self, config: Any) -> None:
        """Enable verification of page checksums, and check the declared sizes of row groups."""
        parquet = require_extra("pyarrow.parquet", needed_by=type(self).__qualname__)
        if config.fragment_scan_options is None:
            dataset = require_extra("pyarrow.dataset", needed_by=type(self).__qualname__)
            config.fragment_scan_options = dataset.ParquetFragmentScanOptions(
                page_checksum_verification=True
            )
        most = self.max_row_group_bytes
        for file in self._files:
            if not Path(file).is_file():
                continue
            with self._naming_unreadable_files():
                metadata = parquet.read_metadata(file)
            for number in range(metadata.num_row_groups):
                if (size := declared_bytes(metadata, number, columns=None)) > most:
                    owner = f"{self._label}: {file}, row group {number}"
                    raise too_large_error(size, most, owner=owner)

    def _urls(self) -> Iterator[str]:
        """Yield the URLs in `data_files`, or those that a folder names in its settings."""
        for entries in self._entries.values():
            yield from (entry for entry in entries if "://" in entry)
        for name in _SETTINGS:
            yield from _urls_of_settings(Path(str(self.path), name))

    @property
    def _entries(self) -> dict[str, list[str]]:
        """Files and patterns of `data_files` by split."""
        files = self.data_files or {}
        by_split = files if isinstance(files, Mapping) else {"train": files}
        return {k: [v] if isinstance(v, str) else list(v) for k, v in by_split.items()}

    def _files_by_split(self, splits: Sequence[str]) -> dict[str, list[str]] | None:
        """Return the checked files of some splits in `data_files`, or None if it is unset."""
        if self.data_files is None:
            return None
        by_split, files = self._entries, {}
        for split in splits:
            check_choice(self._label, list(by_split), split=split)
            entries = by_split[split]
            matches = [file for entry in entries for file in self._matches(entry)]
            files[split] = [file for file in matches if not self._is_faulty(file)]
            expected = f"files of split {split!r} that can be read"
            require(files[split], self._label, "data_files", entries, expected)
        return files

    def _matches(self, entry: str) -> list[str]:
        if "://" in entry:
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
        fault = None if "://" in file else find_fault(file, str(self.path))
        if fault is not None:
            self._bad.report(file=file, record=None, problem=fault)
        return fault is not None

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

    @contextlib.contextmanager
    def _naming_unreadable_files(self) -> Iterator[None]:
        """Raise errors of the library as ones that name the unreadable file and record.

        Failures of the storage are raised as they are.
        """
        try:
            yield
        except Exception as error:  # of any reader of any format, also StopIteration
            cause = error
            while isinstance(cause.__cause__, Exception):
                cause = cause.__cause__  # the library wraps what its readers raise
            if is_storage_failure(cause):
                raise cause from None
            problem = first_unreadable(self._files, self._format)
            if problem is None:
                words = " ".join(str(cause).split()) or type(cause).__name__
                problem = f"cannot read {self._describe_files()}: {words}"
            raise self._config_error(problem) from error


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
