"""A folder of tokenised documents, any token of which is found by its number.

    FOLDER/
      about.json                     what the files hold; written last
      train/                         a folder for each split
        document_ends.int64          [documents], little-endian, memory-mapped
        tokens-00000.array_record    the shards

The ids of a split are one stream: each document's start id, tokens and (where the tokenizer has
one) end id, one after the other. A document of n + 1 ids gives n predictions, each of an id from
those before it, and `document_ends` is the running sum of these, so it alone says where documents
and their ids lie. A shard holds whole documents, cut into blocks of `block_length` ids (the last
one shorter); a record is a block, little-endian. So however long or short documents are, a row of
a batch costs one or two reads, and what a process holds in memory does not grow with the data.

ArrayRecord keeps a hash of every block. `about.json` adds the shards' sizes and CRC-32s, and its
own SHA-256 is the identity of the data in the states of readers.
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

from layerkit.near_names import near_names
from layerkit_inputs.bad_records import BadRecordError, BadRecords
from layerkit_inputs.grain_adaptor.array_records import ArrayRecordFiles

ABOUT_FILE = "about.json"
ENDS_FILE = "document_ends.int64"
FORMAT = "layerkit token store"
VERSION = 1
BLOCK_LENGTH = 4096
"""Ids of a block: 8 or 16 KiB, of which a row of some thousand ids needs one or two."""

_DTYPES = ("uint16", "int32")
_CHECKED_AT_ONCE = 1 << 17


class Shard(NamedTuple):
    """A file of a split."""

    file: str
    """Its name in the folder of the split."""
    num_bytes: int
    num_ids: int
    crc32: int
    """Of the ids as they are written."""
    last_block_crc32: int
    """Of the last block alone; tells a file of another build when it is first read from."""


@dataclasses.dataclass(frozen=True)
class SplitAbout:
    """What a split holds."""

    num_documents: int
    num_ids: int
    """Ids of the stream: those that are predicted, and one start id for every document."""
    ends_crc32: int
    """CRC-32 of the bytes of `document_ends`."""
    shards: tuple[Shard, ...]

    @property
    def num_predictions(self) -> int:
        """Labels of the split."""
        return self.num_ids - self.num_documents


@dataclasses.dataclass(frozen=True)
class About:
    """What `about.json` says."""

    dtype: str
    """`uint16` or `int32`; little-endian."""
    block_length: int
    tokenizer: dict[str, Any]
    """`fingerprint`, `vocab_size`, `pad_id`, `start_id` and `eos_id` (or None)."""
    num_skipped: int
    """Documents that could not be read and were left out."""
    splits: dict[str, SplitAbout]

    def write(self, folder: Path) -> None:
        """Writes `about.json`, to the disk itself."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        for split in content["splits"].values():
            split["shards"] = [Shard(*shard)._asdict() for shard in split["shards"]]
        with (folder / ABOUT_FILE).open("w") as file:
            file.write(json.dumps(content, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: str | Path) -> About:
        """Reads `about.json`.

        Raises:
          FileNotFoundError: the folder is none that was built to its end.
          BadRecordError: the file is damaged, or of another version.
        """
        path = Path(folder, ABOUT_FILE)
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder}: no {ABOUT_FILE} there, so this is no folder of token records, or its "
                "build was not finished; python -m layerkit_inputs.tools.build_token_records makes "
                "one."
            )
        try:
            content = json.loads(path.read_bytes())
            named = content.pop("format"), content.pop("version")
            if named == (FORMAT, VERSION):
                for split in content["splits"].values():
                    split["shards"] = tuple(Shard(**shard) for shard in split["shards"])
                content["splits"] = {
                    name: SplitAbout(**split) for name, split in content["splits"].items()
                }
                about = About(**content)
                if about.dtype not in _DTYPES:
                    raise ValueError(f"dtype {about.dtype!r}, expected one of {_DTYPES}")
                return about
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadRecordError(f"{path}: damaged ({error}).") from None
        raise BadRecordError(
            f"{path}: {named[0]!r} of version {named[1]}; this reader knows {FORMAT!r} of version "
            f"{VERSION}. Build the folder again."
        )


class TokenStore:
    """One split of a folder, for reading.

    Opening it reads `about.json`, checks the sizes of the files and reads through the index to
    check that too, about a second for a hundred million documents. Nothing else is read before it
    is asked for.
    """

    def __init__(self, folder: str | Path, split: str):
        """Opens a split.

        Raises:
          FileNotFoundError: the folder, a shard or the index is missing.
          ValueError: there is no such split.
          BadRecordError: a file is truncated or damaged.
        """
        self.about = About.read(folder)
        if split not in self.about.splits:
            raise ValueError(
                f"split={split!r} is none of {folder}{near_names(split, self.about.splits)} Its "
                f"splits: {', '.join(sorted(self.about.splits))}."
            )
        self.split = self.about.splits[split]
        self._folder = Path(folder, split)
        self.document_ends = self._open_ends()
        self._shard_ends = np.cumsum([shard.num_ids for shard in self.split.shards], dtype=np.int64)
        length = self.about.block_length
        blocks = [-(-shard.num_ids // length) for shard in self.split.shards]
        self._block_ends = np.cumsum(blocks, dtype=np.int64)
        self._files = ArrayRecordFiles(
            [self._folder / shard.file for shard in self.split.shards],
            num_records=blocks,
            num_bytes=[shard.num_bytes for shard in self.split.shards],
        )
        self._is_checked = np.zeros(len(blocks), bool)
        self._check_sizes()

    @functools.cached_property
    def identity(self) -> str:
        """SHA-256 of what the split holds and how it was tokenised; not of where it lies."""
        held = [
            self.about.tokenizer,
            self.split.num_documents,
            self.split.ends_crc32,
            [[shard.num_ids, shard.crc32] for shard in self.split.shards],
        ]
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()

    def gather(self, positions: np.ndarray, bad: BadRecords) -> tuple[np.ndarray, np.ndarray]:
        """The ids at any positions of the stream.

        Args:
          positions: int64, of any shape, each below `split.num_ids`.
          bad: What to do with damaged blocks.

        Returns:
          Ids, int32, and whether each could be read, bool; both of the shape of `positions`.

        Raises:
          BadRecordError: a block is damaged and `bad` refuses it, or a file cannot be opened.
        """
        shards = np.searchsorted(self._shard_ends, positions, side="right")
        within = positions - _before(self._shard_ends)[shards]
        blocks = within // self.about.block_length + _before(self._block_ends)[shards]
        # Positions side by side are in one block as a rule, so few of them have to be sorted.
        runs = np.flatnonzero(np.diff(blocks.ravel(), prepend=-1))
        needed, block_of_run = np.unique(blocks.ravel()[runs], return_inverse=True)
        which = np.repeat(block_of_run, np.diff(runs, append=blocks.size)).reshape(blocks.shape)
        self._check_shards(np.unique(np.searchsorted(self._block_ends, needed, side="right")), bad)
        ids, is_read = self._read_blocks(needed, bad)
        return ids[which, within % self.about.block_length], is_read[which]

    def close(self) -> None:
        """Lets go of the shards; they are opened again when needed."""
        self._files.close()

    def _read_blocks(self, blocks: np.ndarray, bad: BadRecords) -> tuple[np.ndarray, np.ndarray]:
        ids = np.zeros((len(blocks), self.about.block_length), np.int32)
        is_read = np.zeros(len(blocks), bool)
        dtype = np.dtype(self.about.dtype).newbyteorder("<")
        for place, record in enumerate(self._files.read(blocks, bad)):
            if record is None:
                continue
            size, expected = len(record), self._block_size(int(blocks[place])) * dtype.itemsize
            if size != expected:
                file, number = self._files.locate(int(blocks[place]))
                problem = f"{size} bytes, expected {expected} of {self.about.dtype}."
                bad.report(file=file, record=number, problem=problem)
                continue
            ids[place, : size // dtype.itemsize] = np.frombuffer(record, dtype)
            is_read[place] = True
        return ids, is_read

    def _check_shards(self, shards: np.ndarray, bad: BadRecords) -> None:
        """Refuses, when they are first read from, shards that are whole but of another build."""
        for shard in shards[~self._is_checked[shards]].tolist():
            self._is_checked[shard] = True
            (record,) = self._files.read([self._block_ends[shard] - 1], bad)
            if (
                record is not None
                and zlib.crc32(record) != self.split.shards[shard].last_block_crc32
            ):
                raise BadRecordError(
                    f"{self._files.paths[shard]}: not the shard that {ABOUT_FILE} describes; files "
                    "of two builds are mixed. Copy the folder again."
                )

    def _block_size(self, block: int) -> int:
        """Ids of a block: as many as all have, unless it is the last of its shard."""
        shard = int(np.searchsorted(self._block_ends, block, side="right"))
        before = (block - int(_before(self._block_ends)[shard])) * self.about.block_length
        return min(self.about.block_length, self.split.shards[shard].num_ids - before)

    def _open_ends(self) -> np.ndarray:
        path = self._folder / ENDS_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{path}: the index is missing.")
        size, expected = path.stat().st_size, self.split.num_documents * 8
        if size != expected:
            raise BadRecordError(
                f"{path}: {size} bytes, but {expected} were written; the index is truncated or "
                "another. Copy the folder again."
            )
        ends = np.asarray(np.memmap(path, "<i8", mode="r"))
        crc32 = 0
        for begin in range(0, len(ends), _CHECKED_AT_ONCE):
            crc32 = zlib.crc32(ends[begin : begin + _CHECKED_AT_ONCE].data, crc32)
        if crc32 != self.split.ends_crc32:
            raise BadRecordError(f"{path}: the index is damaged. Copy the folder again.")
        return ends

    def _check_sizes(self) -> None:
        for shard in self.split.shards:
            path = self._folder / shard.file
            if not path.is_file():
                raise FileNotFoundError(f"{path}: the shard is missing.")
            if path.stat().st_size != shard.num_bytes:
                raise BadRecordError(
                    f"{path}: {path.stat().st_size} bytes, but {shard.num_bytes} were written; the "
                    "shard is truncated or another. Copy the folder again."
                )


def _before(ends: np.ndarray) -> np.ndarray:
    """Where each of the parts begins that end at `ends`."""
    return ends - np.diff(ends, prepend=0)
