"""TokenStore, a folder of tokenized documents with random access to tokens.

    FOLDER/
      about.json                     description of the files, written last
      train/                         one folder for each split
        document_ends.int64          [documents], little-endian, memory-mapped
        tokens-00000.array_record    shards

The ids of a split are one stream: start id, tokens and end id of each document, if the tokenizer
has such ids. A document of n + 1 ids gives n predictions. `document_ends` is the cumulative sum of
the predictions, and determines the positions of documents and ids. A shard holds whole documents,
cut into blocks of `block_length` ids; the last block is shorter. A record is a block,
little-endian. So a row of a batch takes one or two reads, and memory does not grow with the data.

ArrayRecord stores a hash of every block. `about.json` adds the sizes and CRC-32s of shards. The
states of readers identify the data by a SHA-256 of this description.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layerkit.config.checks import check_choice, require
from layerkit_inputs.base.errors import BadRecordError, BadRecords, MissingFileError
from layerkit_inputs.grain.array_records import ArrayRecordFiles
from layerkit_inputs.packing.documents import ranges

ABOUT_FILE = "about.json"
ENDS_FILE = "document_ends.int64"
FORMAT = "layerkit token store"
VERSION = 1
BLOCK_LENGTH = 4096
"""Ids of a block, 8 or 16 KiB. A row of some thousand ids needs one or two blocks."""

_DTYPES = ("uint16", "int32")
_CHECKSUM_STEP = 1 << 17


class Shard(NamedTuple):
    """A file of a split."""

    file: str
    """Name in the folder of the split."""
    num_bytes: int
    num_ids: int
    crc32: int
    """CRC-32 of the ids in the file."""
    last_block_crc32: int
    """CRC-32 of the last block, which detects a file of another build on first use."""


@dataclasses.dataclass(frozen=True)
class SplitAbout:
    """Description of a split."""

    num_documents: int
    num_ids: int
    """Number of ids of the stream: predicted ids and the first id of each document."""
    ends_crc32: int
    """CRC-32 of the bytes of `document_ends`."""
    shards: tuple[Shard, ...]

    @property
    def num_predictions(self) -> int:
        """Number of labels of the split."""
        return self.num_ids - self.num_documents


@dataclasses.dataclass(frozen=True)
class About:
    """Contents of `about.json`."""

    dtype: str
    """Dtype of ids, `uint16` or `int32`, little-endian."""
    block_length: int
    tokenizer: dict[str, Any]
    """Properties `fingerprint`, `vocab_size` and `pad_id`; `start_id` and `eos_id`, or None."""
    num_skipped: int
    """Number of documents that could not be read and were skipped."""
    splits: dict[str, SplitAbout]

    def write(self, folder: Path) -> None:
        """Write `about.json` and flush it to disk."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        for split in content["splits"].values():
            split["shards"] = [Shard(*shard)._asdict() for shard in split["shards"]]
        with (folder / ABOUT_FILE).open("w") as file:
            file.write(json.dumps(content, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: str | Path) -> About:
        """Read `about.json`.

        Raises:
          MissingFileError: The folder does not hold token records, or its build did not finish.
          BadRecordError: The file is damaged, or has an unsupported version.
        """
        path = Path(folder, ABOUT_FILE)
        if not path.is_file():
            raise MissingFileError(
                f"{ABOUT_FILE} not found",
                field="path",
                value=str(folder),
                expected="a folder of token records whose build has finished",
                hint="Build one: python -m layerkit_inputs.tools.build_token_records",
            )
        try:
            content = json.loads(path.read_bytes())
            version = [content.pop("format"), content.pop("version")]
            if version != [FORMAT, VERSION]:
                raise ValueError(f"its version is {version}, expected {[FORMAT, VERSION]}")
            for name, split in content["splits"].items():
                split["shards"] = tuple(Shard(**shard) for shard in split["shards"])
                content["splits"][name] = SplitAbout(**split)
            about = About(**content)
            check_choice(None, _DTYPES, dtype=about.dtype)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadRecordError(f"cannot read the file ({error})", owner=str(path)) from None
        return about


class TokenStore:
    """A reader of one split of a folder.

    Opening it reads `about.json` and checks the sizes of the files and the checksum of the index,
    which takes about a second for a hundred million documents. Shards are read on demand.
    """

    def __init__(self, folder: str | Path, split: str):
        """Open a split.

        Raises:
          MissingFileError: The folder is missing.
          ConfigError: The folder has no such split.
          BadRecordError: A file is missing, truncated or damaged.
        """
        self.about = About.read(folder)
        check_choice(str(folder), sorted(self.about.splits), split=split)
        self.split = self.about.splits[split]
        self._folder = Path(folder, split)
        self.document_ends = self._open_ends()
        self._shard_sizes = np.array([shard.num_ids for shard in self.split.shards], np.int64)
        self._shard_ends = np.cumsum(self._shard_sizes)
        blocks = -(-self._shard_sizes // self.about.block_length)
        self._block_ends = np.cumsum(blocks)
        self._block_begins = self._block_ends - blocks
        self._files = ArrayRecordFiles(
            [self._folder / shard.file for shard in self.split.shards],
            num_records=blocks.tolist(),
        )
        self._is_checked = np.zeros(len(blocks), bool)
        for shard in self.split.shards:
            _check_size(self._folder / shard.file, shard.num_bytes)

    @functools.cached_property
    def identity(self) -> str:
        """Return a SHA-256 of the contents and tokenizer of the split, at any location."""
        held = [
            self.about.tokenizer,
            self.split.num_documents,
            self.split.ends_crc32,
            [[shard.num_ids, shard.crc32] for shard in self.split.shards],
        ]
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()

    def read(
        self, begins: np.ndarray, sizes: np.ndarray, bad: BadRecords
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read stretches of ids at any positions of the stream.

        Args:
          begins: Position of each stretch, int64 `[stretches]`.
          sizes: Number of ids of each stretch, at least 1, int64 `[stretches]`.
          bad: Policy for damaged blocks.

        Returns:
          (concatenated ids, int32 `[sum of sizes]`, 0 in damaged blocks; bool `[stretches]`,
          whether all ids of a stretch could be read).

        Raises:
          BadRecordError: A block is damaged and the policy is `refuse`, or a file cannot be opened.
        """
        first, within = self._locate(begins)
        last, _ = self._locate(begins + sizes - 1)
        counts = last - first + 1
        blocks = np.unique(ranges(first, counts))
        shards = np.searchsorted(self._block_ends, blocks, side="right")
        self._check_shards(np.unique(shards), bad)
        before = (blocks - self._block_begins[shards]) * self.about.block_length
        block_sizes = np.minimum(self._shard_sizes[shards] - before, self.about.block_length)
        ids, is_read = self._read_blocks(blocks, block_sizes, bad)
        # The blocks of a stretch are adjacent, so the stretch is contiguous in `ids`.
        places = np.searchsorted(blocks, first)
        at = ranges((np.cumsum(block_sizes) - block_sizes)[places] + within, sizes)
        missing = np.append(0, np.cumsum(~is_read))
        return ids[at].astype(np.int32), missing[places + counts] == missing[places]

    def close(self) -> None:
        """Close the shards. They are opened again on demand."""
        self._files.close()

    def _locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (blocks of some positions, positions within the blocks)."""
        shards = np.searchsorted(self._shard_ends, positions, side="right")
        inner = positions - (self._shard_ends - self._shard_sizes)[shards]
        blocks, within = np.divmod(inner, self.about.block_length)
        return blocks + self._block_begins[shards], within

    def _read_blocks(
        self, blocks: np.ndarray, sizes: np.ndarray, bad: BadRecords
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (concatenated ids of blocks, whether each block could be read)."""
        dtype = np.dtype(self.about.dtype).newbyteorder("<")
        contents = []
        is_read = np.zeros(len(blocks), bool)
        records = self._files.read(blocks, bad)
        for place, (record, size) in enumerate(zip(records, sizes.tolist(), strict=True)):
            if record is not None and len(record) != size * dtype.itemsize:
                file, number = self._files.locate(int(blocks[place]))
                expected = f"expected {size * dtype.itemsize} of {self.about.dtype}"
                bad.report(file=file, record=number, problem=f"{len(record)} bytes, {expected}.")
                record = None
            if record is None:
                contents.append(np.zeros(size, dtype))
                continue
            contents.append(np.frombuffer(record, dtype))
            is_read[place] = True
        return np.concatenate(contents), is_read

    def _check_shards(self, shards: np.ndarray, bad: BadRecords) -> None:
        """Raise on the first use of a shard that is not damaged but from another build."""
        for shard in shards[~self._is_checked[shards]].tolist():
            self._is_checked[shard] = True
            (record,) = self._files.read([self._block_ends[shard] - 1], bad)
            expected = self.split.shards[shard].last_block_crc32
            if record is not None and zlib.crc32(record) != expected:
                problem = f"the shard is from another build than {ABOUT_FILE}"
                raise BadRecordError(problem, owner=str(self._files.paths[shard]))

    def _open_ends(self) -> np.ndarray:
        path = self._folder / ENDS_FILE
        _check_size(path, self.split.num_documents * 8)
        ends = np.asarray(np.memmap(path, "<i8", mode="r"))
        crc32 = 0
        for begin in range(0, len(ends), _CHECKSUM_STEP):
            crc32 = zlib.crc32(ends[begin : begin + _CHECKSUM_STEP].data, crc32)
        if crc32 != self.split.ends_crc32:
            raise BadRecordError("the index is damaged", owner=str(path))
        return ends


def _check_size(path: Path, num_bytes: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    expected = f"{num_bytes}, of a whole file of this build. Copy the folder again"
    require(size == num_bytes, str(path), "size in bytes", size, expected, BadRecordError)
