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
from layerkit_inputs.packing import ranges

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
        self._shard_sizes = np.array([shard.num_ids for shard in self.split.shards], np.int64)
        self._shard_ends = np.cumsum(self._shard_sizes)
        blocks = -(-self._shard_sizes // self.about.block_length)
        self._block_ends = np.cumsum(blocks)
        self._block_begins = self._block_ends - blocks
        self._files = ArrayRecordFiles(
            [self._folder / shard.file for shard in self.split.shards],
            num_records=blocks.tolist(),
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

    def read(
        self, begins: np.ndarray, sizes: np.ndarray, bad: BadRecords
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stretches of ids from any places of the stream.

        Args:
          begins: int64 `[stretches]`: where each begins.
          sizes: int64 `[stretches]`: how many ids it has, at least 1.
          bad: What to do with damaged blocks.

        Returns:
          Ids, int32 `[sum of sizes]`, end to end, and bool `[stretches]`: whether all of it could
          be read; what could not is 0.

        Raises:
          BadRecordError: a block is damaged and `bad` refuses it, or a file cannot be opened.
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
        # The blocks of a stretch lie side by side, so it is whole in what was read.
        places = np.searchsorted(blocks, first)
        at = ranges((np.cumsum(block_sizes) - block_sizes)[places] + within, sizes)
        missing = np.append(0, np.cumsum(~is_read))
        return ids[at].astype(np.int32), missing[places + counts] == missing[places]

    def close(self) -> None:
        """Lets go of the shards; they are opened again when needed."""
        self._files.close()

    def _locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which blocks ids are in, and where in them."""
        shards = np.searchsorted(self._shard_ends, positions, side="right")
        inner = positions - (self._shard_ends - self._shard_sizes)[shards]
        blocks, within = np.divmod(inner, self.about.block_length)
        return blocks + self._block_begins[shards], within

    def _read_blocks(
        self, blocks: np.ndarray, sizes: np.ndarray, bad: BadRecords
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids of blocks of these sizes, end to end, and whether each could be read."""
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
