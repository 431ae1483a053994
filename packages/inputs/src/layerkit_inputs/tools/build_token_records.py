"""Turns text into a folder of token records, which TokenRecords reads.

    python -m layerkit_inputs.tools.build_token_records \\
        --input texts/ --output tokens/ --tokenizer c4.model --heldout_fraction 0.001 --workers 8

The input is a folder, file or pattern of text files, JSON lines (`.jsonl`, also `.jsonl.gz`) or
Parquet files; see `raw_documents`. The result depends on the input, the tokenizer and the options
that say what is in it, not on the number of workers.

It is built in a hidden folder beside the output and renamed when all of it is on the disk, so a
build that was stopped or killed leaves nothing that could be taken for one that was finished. What
a killed one leaves is removed by the next build of that output.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures.process
import contextlib
import fcntl
import functools
import glob
import hashlib
import multiprocessing
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layerkit.config import build
from layerkit_inputs.bad_records import BadRecords, OnBadRecord
from layerkit_inputs.text_files import TextFile, find_text_files
from layerkit_inputs.token_store import BLOCK_LENGTH, About
from layerkit_inputs.tokenizers import SpecialTokensInText, Tokenizer, tokenizer_config
from layerkit_inputs.tools.raw_documents import (
    MAX_DOCUMENT_BYTES,
    RawDocument,
    read_raw_documents,
    text_of,
)
from layerkit_inputs.tools.token_store_writer import SplitWriter

_WORK_BYTES = 1 << 18
_WORK_DOCUMENTS = 1000
"""What is sent to a worker at once."""
_PROGRESS_SECONDS = 5.0


class _Encoded(NamedTuple):
    """What became of a document."""

    where: str
    ids: np.ndarray | None
    """None where it cannot be read."""
    problem: str
    share: float
    """A number in [0, 1) that depends on the text alone: which split it belongs to."""
    position: float
    """How much of the whole input, in bytes, comes before its end."""


@functools.cache
def make_tokenizer(name: str, special_tokens_in_text: SpecialTokensInText = "ids") -> Tokenizer:
    """Return the tokenizer that `--tokenizer` names; see `tokenizer_config`."""
    return build(tokenizer_config(name, special_tokens_in_text=special_tokens_in_text))


def build_token_records(
    inputs: Sequence[str],
    output: str | Path,
    *,
    tokenizer: str,
    special_tokens_in_text: SpecialTokensInText = "ids",
    field: str = "text",
    num_shards: int = 1,
    workers: int = 0,
    heldout_fraction: float = 0.0,
    on_bad_record: OnBadRecord = "refuse",
    block_length: int = BLOCK_LENGTH,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    say: Callable[[str], None] | None = None,
) -> About:
    """Builds a folder of token records.

    Args:
      inputs: Files, folders and patterns.
      output: The folder to make.
      tokenizer: See `tokenizer_config`.
      special_tokens_in_text: See `tokenizer_config`.
      field: Of JSON lines the key of the text, of Parquet the column.
      num_shards: Files of each split, of about as many bytes of input each; fewer, where there are
        fewer documents.
      workers: Processes that tokenise; 0: this one does.
      heldout_fraction: Share of the documents that make up the split `heldout`, by a hash of their
        text: a document that occurs twice is in one split alone.
      on_bad_record: What to do with a document that cannot be read.
      block_length: Ids of a record.
      max_document_bytes: Most bytes that a document of a compressed file may unpack to.
      say: Takes lines about the progress, every few seconds.

    Returns:
      What was written.

    Raises:
      FileExistsError: the output is there already.
      FileNotFoundError: there is no input, or no tokenizer.
      BadRecordError: a document cannot be read and `on_bad_record` is `refuse`.
      ValueError: an option cannot work, or a split would have no documents.
    """
    _check_options(num_shards, workers, heldout_fraction, block_length, max_document_bytes)
    files = find_text_files(inputs)
    model = make_tokenizer(tokenizer, special_tokens_in_text)
    dtype = "uint16" if model.vocab_size <= 1 << 16 else "int32"
    bad = BadRecords(on_bad_record)
    if say and (note := getattr(model, "note", None)):
        say(note)
    progress = _Progress(sum(file.path.stat().st_size for file in files), say)
    with _appears_whole(Path(output)) as folder, contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                SplitWriter(folder / name, dtype=dtype, block_length=block_length)
            )
            for name in ("train", *(["heldout"] if heldout_fraction else []))
        }
        encode = functools.partial(
            _encode,
            tokenizer=tokenizer,
            special_tokens_in_text=special_tokens_in_text,
            field=field,
        )
        encoded = _in_order(encode, _work(files, field, max_document_bytes), workers)
        for document in stack.enter_context(contextlib.closing(encoded)):
            if document.ids is None:
                bad.report(file=document.where, record=None, problem=document.problem)
                continue
            progress.add(document)
            if len(document.ids) >= 2:  # else there is nothing to predict
                split = "heldout" if document.share < heldout_fraction else "train"
                # By its place in the input: that keeps the order and makes shards of like size.
                writers[split].add(document.ids, place=progress.share_of(num_shards))
        about = About(
            dtype=dtype,
            block_length=block_length,
            tokenizer=_describe(model),
            num_skipped=bad.num_skipped,
            splits={name: writer.finish() for name, writer in writers.items()},
        )
        _check_splits(about, progress.num_documents, heldout_fraction)
        about.write(folder)
    progress.end(about, bad)
    return about


def _describe(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "fingerprint": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "start_id": tokenizer.start_id,
        "eos_id": tokenizer.eos_id,
    }


def _check_options(
    num_shards: int,
    workers: int,
    heldout_fraction: float,
    block_length: int,
    max_document_bytes: int,
) -> None:
    for name, value, least in (
        ("num_shards", num_shards, 1),
        ("workers", workers, 0),
        ("block_length", block_length, 1),
        ("max_document_bytes", max_document_bytes, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value}; expected at least {least}.")
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"heldout_fraction={heldout_fraction}; expected 0 or more, below 1.")


def _check_splits(about: About, num_documents: int, heldout_fraction: float) -> None:
    for name, split in about.splits.items():
        if not split.num_documents:
            raise ValueError(
                f"the split {name!r} would have no documents: the input has {num_documents} that "
                f"can be read, and heldout_fraction={heldout_fraction}."
            )


@contextlib.contextmanager
def _appears_whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name once that is done, and goes away if it is not."""
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(_locked(partial))
        try:
            yield partial
            _check_free(folder)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _check_free(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder}: is there already; name another output, or remove it.")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Marks a folder as in use; the mark goes with the process, however that ends.

    Raises:
      OSError: another process has marked it, or nothing can be marked there.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _work(
    files: Sequence[TextFile], field: str, max_document_bytes: int
) -> Iterator[list[RawDocument]]:
    """The documents of all files in order, as lists of about the same work."""
    documents: list[RawDocument] = []
    size = 0
    before = 0
    for file in files:
        for document in read_raw_documents(
            file, field=field, max_document_bytes=max_document_bytes
        ):
            documents.append(document._replace(position=before + document.position))
            size += len(document.data or b"")
            if size >= _WORK_BYTES or len(documents) >= _WORK_DOCUMENTS:
                yield documents
                documents, size = [], 0
        before += file.path.stat().st_size
    if documents:
        yield documents


def _encode(
    documents: list[RawDocument],
    *,
    tokenizer: str,
    special_tokens_in_text: SpecialTokensInText,
    field: str,
) -> list[_Encoded]:
    """Encode documents; this is what a worker does."""
    model = make_tokenizer(tokenizer, special_tokens_in_text)
    return [_encode_one(document, model, field) for document in documents]


def _encode_one(document: RawDocument, model: Tokenizer, field: str) -> _Encoded:
    try:
        text = text_of(document, field)
        tokens = model.encode(text)
    except UnicodeDecodeError as error:
        problem = f"no UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}."
        return _Encoded(document.where, None, problem, 0.0, document.position)
    except ValueError as error:
        return _Encoded(document.where, None, str(error), 0.0, document.position)
    end = [] if model.eos_id is None else [model.eos_id]
    ids = np.concatenate([[model.start_id], tokens, end]).astype(np.int32)
    digest = hashlib.blake2b(text, digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    return _Encoded(document.where, ids, "", share, document.position)


def _in_order(
    encode: Callable[[list[RawDocument]], list[_Encoded]],
    work: Iterator[list[RawDocument]],
    workers: int,
) -> Generator[_Encoded, None, None]:
    """Encodes all work, in its order; a few lists for each worker are in memory at a time."""
    if workers == 0:
        for documents in work:
            yield from encode(documents)
        return
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        waiting: collections.deque[concurrent.futures.Future[list[_Encoded]]] = collections.deque()
        try:
            for documents in work:
                waiting.append(pool.submit(encode, documents))
                if len(waiting) > 2 * workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise OSError("a worker process ended by itself; was it out of memory?") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Progress:
    """Counts what was read and says so every few seconds."""

    def __init__(self, total_bytes: int, say: Callable[[str], None] | None):
        self.num_documents = 0
        self._num_ids = 0
        self._num_empty = 0
        self._done = 0.0
        self._total = max(total_bytes, 1)
        self._say = say
        self._began = self._said = time.monotonic()

    def add(self, document: _Encoded) -> None:
        """Counts a document that was read."""
        assert document.ids is not None
        self.num_documents += 1
        self._num_empty += len(document.ids) < 2
        self._num_ids += len(document.ids)
        self._done = document.position
        if self._say and time.monotonic() - self._said >= _PROGRESS_SECONDS:
            self._said = time.monotonic()
            self._say(self._line())

    def share_of(self, count: int) -> int:
        """Which of `count` parts of the input the last document ends in."""
        return min(int(self._done * count / self._total), count - 1)

    def end(self, about: About, bad: BadRecords) -> None:
        """Says what was written."""
        if not self._say:
            return
        self._say(self._line())
        for name, split in about.splits.items():
            self._say(
                f"{name}: {split.num_documents:,} documents, {split.num_predictions:,} "
                f"predictions, {len(split.shards)} shards"
            )
        if self._num_empty:
            self._say(f"left out: {self._num_empty:,} documents without any token")
        if bad.num_skipped:
            self._say(f"left out: {bad.num_skipped:,} documents that cannot be read, among them")
            for problem in bad.first:
                self._say(f"  {problem}")

    def _line(self) -> str:
        return (
            f"{self.num_documents:,} documents, {self._num_ids:,} ids, "
            f"{self._done / self._total:.0%} of {self._total:,} bytes, "
            f"{time.monotonic() - self._began:.0f} s"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, or 1 where the data or a path is at fault."""
    options = _parse(arguments)
    say = None if options.pop("quiet") else functools.partial(print, file=sys.stderr, flush=True)
    try:
        build_token_records(options.pop("input"), options.pop("output"), say=say, **options)
    except (ValueError, OSError, ImportError) as error:
        print(f"build_token_records: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m layerkit_inputs.tools.build_token_records",
        description="Turns text into a folder of token records.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, folders or patterns")
    add("--output", required=True, help="the folder to make")
    add("--tokenizer", required=True, help="bytes, a .model, or a tokenizer.json or its folder")
    add(
        "--special_tokens_in_text",
        choices=("ids", "text"),
        default="ids",
        help="what special tokens of a tokenizer.json become where a text spells them out: ids, as"
        " in transformers (default), or text",
    )
    add("--field", default="text", help="key or column of the text (default: text)")
    add("--num_shards", type=int, default=1, help="files of each split (default: 1)")
    add("--workers", type=int, default=0, help="processes that tokenise (default: 0, this one)")
    add("--heldout_fraction", type=float, default=0.0, help="share for the split heldout")
    add("--on_bad_record", choices=("refuse", "skip"), default="refuse")
    add(
        "--max_document_bytes",
        type=int,
        default=MAX_DOCUMENT_BYTES,
        help="most bytes that a document of a compressed file may unpack to (default: 2**30)",
    )
    add("--quiet", action="store_true", help="no lines about the progress")
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
