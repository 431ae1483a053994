r"""Convert text to a folder of token records, which TokenRecords reads.

    python -m layerkit_inputs.tools.build_token_records \
        --input texts/ --output tokens/ --tokenizer c4.model --heldout_fraction 0.001 --workers 8

The input is a folder, file or pattern of text files, JSON lines (`.jsonl`, also `.jsonl.gz`) or
Parquet files; see `text_files`. Files that are named as held out, such as `val.jsonl`, make the
split `heldout`. The result does not depend on the number of workers.

The records are written to a hidden folder beside the output, which is renamed when everything is on
disk. So a build that was stopped or killed leaves no incomplete output. A killed build leaves the
hidden folder (`.OUTPUT.partial-…`), which can be removed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures.process
import contextlib
import functools
import itertools
import multiprocessing
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerkit.config import build
from layerkit.config.checks import check_integers, check_rates, require
from layerkit_inputs.base.base_input import FIRST_TEXT_BYTES, NUM_FIRST_TEXTS
from layerkit_inputs.base.errors import BadRecords, OnBadRecord
from layerkit_inputs.base.find_files import TextFile, find_text_files
from layerkit_inputs.base.tokenizer_interface import SpecialIds, Tokenizer, lost_text, prefix_id
from layerkit_inputs.packing.documents import framed
from layerkit_inputs.text.text_files import (
    MAX_DOCUMENT_BYTES,
    RawDocument,
    read_raw_documents,
    share_of,
    split_by_names,
    text_of,
)
from layerkit_inputs.text.token_store import BLOCK_LENGTH, About
from layerkit_inputs.text.tokenizers import SpecialTokensInText, tokenizer_config
from layerkit_inputs.tools.token_store_writer import SplitWriter

_WORK_BYTES = 1 << 18
_WORK_DOCUMENTS = 1000
"""Bounds on the bytes and the number of documents that are sent to a worker at once."""
_PROGRESS_SECONDS = 5.0

_Work = list[tuple[TextFile, RawDocument]]
# Token ids, or the problem of a document; and the hash of its text in [0, 1), which decides the
# split if the names of files do not.
_Encoded = tuple[np.ndarray | str, float]


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
    """Build a folder of token records.

    Args:
      inputs: Files, folders and patterns.
      output: Folder to create.
      tokenizer: Name of the tokenizer; see `tokenizer_config`.
      special_tokens_in_text: Treatment of special tokens; see `tokenizer_config`.
      field: Key of the text in JSON lines, or column of the text in Parquet.
      num_shards: Number of files of each split, of about equal input bytes. There may be fewer
        files if there are few documents.
      workers: Number of processes that tokenize. 0: this process.
      heldout_fraction: Share of the documents in the split `heldout`, by a hash of their text, so
        that equal documents are in one split. It must be 0 if files are named as held out.
      on_bad_record: Policy for documents that cannot be read: `refuse` or `skip`.
      block_length: Number of ids in a record.
      max_document_bytes: Largest size in bytes of an unpacked document of a compressed file.
      say: Function that receives lines about the progress every few seconds.

    Returns:
      Description of the records.

    Raises:
      FileExistsError: The output exists.
      FileNotFoundError: There is no input, or no tokenizer.
      BadRecordError: A document cannot be read and `on_bad_record` is `refuse`.
      ConfigError: An option is invalid, or a split would have no documents.
    """
    sizes = {"block_length": block_length, "max_document_bytes": max_document_bytes}
    check_integers(None, minimum=1, num_shards=num_shards, **sizes)
    check_integers(None, minimum=0, workers=workers)
    check_rates(None, heldout_fraction=heldout_fraction)
    files = find_text_files(inputs)
    split_of = _splits_of_files(files, heldout_fraction)
    names = {*split_of.values()} or {"train", *(["heldout"] if heldout_fraction else [])}
    model = make_tokenizer(tokenizer, special_tokens_in_text)
    dtype = "uint16" if model.vocab_size <= 1 << 16 else "int32"
    bad = BadRecords(on_bad_record)
    if say:
        special = SpecialIds(prefix_id(model), model.eos_id, model.pad_id)
        lost = lost_text(model, _first_texts(files[0], field, max_document_bytes))
        for line in (
            getattr(model, "note", None),
            f"text ids: {special.text(getattr(model, 'special_tokens', {}))}",
            lost and f"WARNING: the tokenizer loses {lost}",
        ):
            if line:
                say(line)
    total_bytes = max(sum(file.path.stat().st_size for file in files), 1)
    progress = _Progress(total_bytes, say)
    with _atomic_folder(Path(output)) as folder, contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                SplitWriter(folder / name, dtype=dtype, block_length=block_length)
            )
            for name in sorted(names, reverse=True)
        }
        encode = functools.partial(
            _encode, tokenizer=tokenizer, special_tokens_in_text=special_tokens_in_text, field=field
        )
        encoded = _encode_all(encode, _work(files, field, max_document_bytes), workers)
        for file, document, (ids, share) in stack.enter_context(contextlib.closing(encoded)):
            if isinstance(ids, str):
                bad.report(file=document.where, record=None, problem=ids)
                continue
            progress.add(len(ids), document.position)
            if len(ids) >= 2:  # otherwise there is no token to predict
                by_hash = "heldout" if share < heldout_fraction else "train"
                # Shards by position in the input keep the order and have about equal sizes.
                place = min(int(document.position * num_shards / total_bytes), num_shards - 1)
                writers[split_of.get(file, by_hash)].add(ids, place=place)
        stored = {
            "fingerprint": model.fingerprint(),
            "vocab_size": model.vocab_size,
            "pad_id": model.pad_id,
            "start_id": prefix_id(model),
            "eos_id": model.eos_id,
        }
        splits = {name: writer.finish() for name, writer in writers.items()}
        for name, split in splits.items():
            expected = f"documents in the split {name!r}; the input has {progress.num_documents}"
            require(split.num_documents, None, "heldout_fraction", heldout_fraction, expected)
        about = About(dtype, block_length, stored, bad.num_skipped, splits)
        about.write(folder)
    progress.end(about, bad)
    return about


def _splits_of_files(files: Sequence[TextFile], heldout_fraction: float) -> dict[TextFile, str]:
    """Return the split of each file by its name, or {} if no file is named as held out."""
    by_split = split_by_names(files)
    if by_split is None:
        return {}
    expected = f"0, since {by_split['heldout'][0].name} is named as held out"
    require(not heldout_fraction, None, "heldout_fraction", heldout_fraction, expected)
    names = ("train", "heldout", "test")
    return {file: name for name in reversed(names) for file in by_split.get(name, ())}


def _first_texts(file: TextFile, field: str, max_document_bytes: int) -> list[bytes]:
    """Return the first documents of a file that can be read."""
    texts = []
    documents = read_raw_documents(file, field=field, max_document_bytes=max_document_bytes)
    for document in itertools.islice(documents, NUM_FIRST_TEXTS):
        with contextlib.suppress(ValueError):
            texts.append(text_of(document, field)[:FIRST_TEXT_BYTES])
    return texts


@contextlib.contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed at the end, or removed after an error."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder}: the output exists. Remove it, or use another output.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)  # which replaces only an empty folder
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _work(files: Sequence[TextFile], field: str, max_document_bytes: int) -> Iterator[_Work]:
    """Yield the documents of all files in order, in lists of about equal size."""
    documents: _Work = []
    size = before = 0
    for file in files:
        for document in read_raw_documents(
            file, field=field, max_document_bytes=max_document_bytes
        ):
            documents.append((file, document._replace(position=before + document.position)))
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
    """Encode documents in a worker process."""
    model = make_tokenizer(tokenizer, special_tokens_in_text)
    return [_encode_one(document, model, field) for document in documents]


def _encode_one(document: RawDocument, model: Tokenizer, field: str) -> _Encoded:
    try:
        text = text_of(document, field)
        return framed([model.encode(text)], model), share_of(text)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return f"not UTF-8: byte {error.start} is 0x{byte:02x}.", 0.0
    except ValueError as error:
        return str(error), 0.0


def _encode_all(
    encode: Callable[[list[RawDocument]], list[_Encoded]], work: Iterator[_Work], workers: int
) -> Generator[tuple[TextFile, RawDocument, _Encoded], None, None]:
    """Encode all work in order, with a few lists per worker in memory."""
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context) if workers else None
    waiting: collections.deque[tuple[_Work, Callable[[], list[_Encoded]]]] = collections.deque()

    def next_encoded() -> Iterator[tuple[TextFile, RawDocument, _Encoded]]:
        documents, result = waiting.popleft()
        for (file, document), encoded in zip(documents, result(), strict=True):
            yield file, document, encoded

    try:
        for documents in work:
            data = [document for _, document in documents]
            result = pool.submit(encode, data).result if pool else functools.partial(encode, data)
            waiting.append((documents, result))
            if len(waiting) > 2 * workers:
                yield from next_encoded()
        while waiting:
            yield from next_encoded()
    except concurrent.futures.process.BrokenProcessPool:
        problem = "a worker process was terminated, for example for lack of memory"
        raise OSError(problem) from None
    finally:
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)


class _Progress:
    """Counts of the documents, which are reported every few seconds."""

    def __init__(self, total_bytes: int, say: Callable[[str], None] | None):
        self.num_documents = self._num_ids = self._num_empty = 0
        self._done = 0.0
        self._total = total_bytes
        self._say = say or (lambda line: None)
        self._began = self._said = time.monotonic()

    def add(self, num_ids: int, position: float) -> None:
        """Count a document that ends at a position in the input."""
        self.num_documents += 1
        self._num_empty += num_ids < 2
        self._num_ids += num_ids
        self._done = position
        if time.monotonic() - self._said >= _PROGRESS_SECONDS:
            self._said = time.monotonic()
            self._say(self._line())

    def end(self, about: About, bad: BadRecords) -> None:
        """Report the splits and the skipped documents."""
        self._say(self._line())
        for name, split in about.splits.items():
            counts = f"{split.num_documents:,} documents, {split.num_predictions:,} predictions"
            self._say(f"{name}: {counts}, {len(split.shards)} shards")
        if self._num_empty:
            self._say(f"skipped: {self._num_empty:,} documents with nothing to predict")
        if bad.num_skipped:
            self._say(f"skipped: {bad.num_skipped:,} documents that cannot be read, such as")
            for problem in bad.first:
                self._say(f"  {problem}")

    def _line(self) -> str:
        return (
            f"{self.num_documents:,} documents, {self._num_ids:,} ids, "
            f"{self._done / self._total:.0%} of {self._total:,} bytes, "
            f"{time.monotonic() - self._began:.0f} s"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code, 0 or 1 for invalid data or paths."""
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
        description="Convert text to a folder of token records.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, folders or patterns")
    add("--output", required=True, help="folder to create")
    add("--tokenizer", required=True, help="bytes, a .model, or a tokenizer.json or its folder")
    add(
        "--special_tokens_in_text",
        choices=("ids", "text"),
        default="ids",
        help="encoding of special tokens of a tokenizer.json that occur in the text: ids, as in"
        " transformers (default), or text",
    )
    add("--field", default="text", help="key or column of the text (default: text)")
    add("--num_shards", type=int, default=1, help="number of files of each split (default: 1)")
    add("--workers", type=int, default=0, help="number of worker processes (default: 0)")
    add(
        "--heldout_fraction",
        type=float,
        default=0.0,
        help="share of documents in the split heldout",
    )
    add("--on_bad_record", choices=("refuse", "skip"), default="refuse")
    add(
        "--max_document_bytes",
        type=int,
        default=MAX_DOCUMENT_BYTES,
        help="largest size of an unpacked document of a compressed file (default: 2**30)",
    )
    add("--quiet", action="store_true", help="do not report progress")
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
