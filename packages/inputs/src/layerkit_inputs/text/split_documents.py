"""SplitDocuments, the base of inputs of documents in local files, some of which are held out.

Files whose names say so are held out, else documents by their contents, so that the training split
and the held-out split share no document; see `text_files`.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from layerkit.config.checks import require
from layerkit.config.hparams import Conditions
from layerkit.errors import first_names
from layerkit_inputs.base.base_input import FIRST_TEXT_BYTES, NUM_FIRST_TEXTS, counted
from layerkit_inputs.base.errors import BadRecords, OnBadRecord
from layerkit_inputs.base.find_files import TextFile, find_text_files
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.packing.documents import DocumentInput, Documents
from layerkit_inputs.text.text_files import heldout_limit, share_of, split_by_names
from layerkit_inputs.text.tokenizers import ByteTokenizer

Split = Literal["train", "heldout", "test", "all"]
_MAX_FILES_SHOWN = 4


class SplitDocuments(DocumentInput):
    """Base class of inputs of documents in local files. The files are read on first use.

    A subclass defines `_begin`, `_texts`, `_add` and `_build`, and maybe `_find_files`.
    """

    token_unit: ClassVar[str] = "byte"
    used_only_if: ClassVar[Conditions] = {"heldout_fraction": "not heldout_paths"}
    paths: Sequence[str] | None = None
    """Files, folders or patterns. None: the standard library of the running interpreter."""
    heldout_paths: Sequence[str] | None = None
    """Files, folders or patterns of the held-out split, which the training split omits. None: files
    of `paths` that are named as held out, or else a share of the documents."""
    split: Split = "train"
    """`train`, `heldout`, `test` or `all`. `heldout` reads files that are named as validation, or
    as test if there are none; `test` only reads the latter."""
    heldout_fraction: float = 0.05
    """Share of the documents that is held out if no file is named as held out, by a hash of their
    contents. If each file is a document and the files are too few, share of the end of each."""
    max_bytes: int = 1 << 28
    """Maximum bytes of the documents of a split if each file is a document, else of the
    decompressed files that it is read from. Tokens are kept in memory, two bytes each, or four with
    a vocabulary of more than 65,536."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of the text. None: bytes."""
    on_bad_record: OnBadRecord = "refuse"
    """`refuse` raises for unreadable documents, such as invalid UTF-8 if the tokenizer needs text;
    `skip` skips and counts them."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        fraction = self.heldout_fraction
        expected = "a number in (0, 1)"
        require(0 < fraction < 1, self._label, "heldout_fraction", fraction, expected)
        self._tokenizer = ByteTokenizer() if self.tokenizer is None else self.tokenizer
        self._of_bytes = isinstance(self._tokenizer, ByteTokenizer)
        if not self._of_bytes:
            self.token_unit = "token"  # type: ignore[misc]

    # Methods that a reader defines.

    def _find_files(self, paths: Sequence[str] | None, field: str) -> list[TextFile]:
        """Return the files of `paths` or of `heldout_paths`, which `field` names."""
        return find_text_files(paths or (), field=field)

    def _begin(self) -> None:
        """Discard the documents that were added."""
        raise NotImplementedError

    def _texts(self, file: TextFile) -> Iterator[tuple[str, bytes]]:
        """Yield the place and the contents of each document of a file."""
        raise NotImplementedError

    def _add(self, where: str, parts: Iterable[bytes]) -> None:
        """Add a document by its place and consecutive parts of its contents."""
        raise NotImplementedError

    def _build(self) -> Documents:
        """Return the documents that were added."""
        raise NotImplementedError

    # The split.

    @functools.cached_property
    def _all_files(self) -> list[TextFile]:
        return self._find_files(self.paths, "paths")

    @functools.cached_property
    def _files_by_split(self) -> dict[str, list[TextFile]] | None:
        """Files of each split, or None if no file is declared or named as held out."""
        if self.heldout_paths is not None:
            heldout = self._find_files(self.heldout_paths, "heldout_paths")
            paths = {file.path.resolve() for file in heldout}
            train = [file for file in self._all_files if file.path.resolve() not in paths]
            return {"train": train, "heldout": heldout}
        return None if self.paths is None else split_by_names(self._all_files)

    def _is_whole(self, split: str) -> bool:
        """Return whether a split holds all documents of its files."""
        return split == "all" or self._files_by_split is not None

    def _files(self, split: str) -> list[TextFile]:
        """Return the files that a split is read from."""
        if split == "all" or (self._files_by_split is None and split != "test"):
            return self._all_files
        files = (self._files_by_split or {}).get(split, [])
        names = [file.name for file in self._all_files[:_MAX_FILES_SHOWN]]
        expected = f"a file of the split {split!r} by its name, or by heldout_paths"
        require(files, self._label, "paths", names, expected)
        return files

    @functools.cached_property
    def _documents(self) -> Documents:
        """Read the files and tokenize the documents of the split."""
        files, fraction = self._files(self.split), self.heldout_fraction
        limit = None if self._is_whole(self.split) else fraction
        shares = self._read_documents(files, limit)
        if shares and (limit := heldout_limit(shares, fraction=fraction)) != fraction:
            self._read_documents(files, limit)
        documents = self._build()
        has_text = self._num_bytes or self._bad.first or self.split == "all"
        if not (len(documents) and has_text):
            problem = f"no text in {first_names(str(file.path) for file in files)}"
            first = f"First problem: {self._bad.first[0]}" if self._bad.first else None
            raise self._config_error(
                problem, field="number of skipped documents", value=self.num_skipped, hint=first
            )
        return documents

    def _read_documents(self, files: Sequence[TextFile], limit: float | None) -> list[float]:
        """Add the documents of the split.

        Args:
          files: Files of the split.
          limit: Documents whose `share_of` is below it are held out. None: all are of the split.

        Returns:
          Lowest and highest share of all documents, empty if there is no limit.
        """
        self._bad, self._checksum, self._num_bytes = BadRecords(self.on_bad_record), 0, 0
        self._texts_to_check: list[bytes] = []
        self._begin()
        shares: list[float] = []
        for file in files:
            self._update_checksum(file.name.encode("utf-8", "replace"))
            for where, text in self._texts(file):
                if limit is not None:
                    share = share_of(text)
                    shares = [min(share, *shares), max(share, *shares)] if shares else [share] * 2
                    if (share < limit) != (self.split != "train"):
                        continue
                self._add(where, [text])
        return shares

    def _check_size(self, num_bytes: int) -> None:
        """Raise `ConfigError` if the split has more than `max_bytes` of text."""
        expected = f"at least the {num_bytes} bytes of the {self.split} files, kept in memory"
        is_enough = num_bytes <= self.max_bytes
        require(is_enough, self._label, "max_bytes", self.max_bytes, expected)

    def _count(self, part: bytes, text: bytes | None = None) -> None:
        """Count a part of a document that was added, whose text is `text`, or else the part."""
        self._update_checksum(part)
        self._num_bytes += len(part)
        if len(self._texts_to_check) < NUM_FIRST_TEXTS:
            self._texts_to_check.append((text or part)[:FIRST_TEXT_BYTES])

    def _update_checksum(self, data: bytes) -> None:
        self._checksum = zlib.crc32(data, self._checksum)

    def _fingerprint(self) -> dict[str, Any]:
        tokenizer = {} if self._of_bytes else {"tokenizer": self._tokenizer.fingerprint()}
        # The same text in other documents is other data.
        checksum = zlib.crc32(self._documents.ends.astype("<i8").tobytes(), self._checksum)
        return {"split": self.split, "documents_crc32": checksum, **tokenizer}

    def _data_text(self) -> str:
        counts = (counted(len(self._documents), "document"), counted(self._num_bytes, "byte"))
        files = self._files(self.split)
        is_declared = self.heldout_paths is not None and self.split == "heldout"
        paths = self.heldout_paths if is_declared else self.paths
        what = "Python's standard library" if paths is None else first_names(paths)
        return f"{what}: {counted(len(files), 'file')}, {', '.join(counts)}; {self._split_text()}"

    def _split_text(self) -> str:
        """Return how files or documents were assigned to the split."""
        by_split = self._files_by_split
        if self.split == "all":
            return "all documents"
        if by_split is None:
            share = f"{100 * self.heldout_fraction:g}%"
            return f"{share} of the documents are held out, by a hash of their text"
        names = first_names((file.name for file in by_split[self.split]), limit=_MAX_FILES_SHOWN)
        if self.heldout_paths is not None:
            return f"split by heldout_paths: {names}"
        others = {name: files for name, files in by_split.items() if files != by_split["heldout"]}
        if "test" in others and self.split != "test":
            names += f" (not read: {first_names(file.name for file in others['test'])})"
        return f"split by the names of files: {names}"

    def _first_texts(self) -> list[bytes]:
        return self._texts_to_check if len(self._documents) else []
