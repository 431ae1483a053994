"""Contests with plain Grain pipelines on the same rows, with the same transform."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pyarrow
import pyarrow.parquet
from absl import flags
from array_record.python.array_record_module import ArrayRecordWriter

from input_rivals.contest import (
    BATCH_SIZE,
    EVAL_ROWS,
    SHUFFLED,
    Batch,
    Contest,
    evaluations,
    fields_of_row,
    token_rows,
)
from layerkit_inputs import BaseInput, Prefetch
from layerkit_inputs.grain.iter_input import GrainIterInput
from layerkit_inputs.grain.map_input import ArrayRecordRows, GrainMapInput
from layerkit_inputs.parquet.parquet_rows import ParquetRows

# Grain's worker processes read absl flags, which a program without absl.app does not parse.
if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()

THREADS = 4
_ON_THIS_THREAD = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def _write_array_record(folder: Path, *, most: int | None = None) -> list[str]:
    path = str(folder / "rows.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    for row in token_rows()[:most]:
        writer.write(row.tobytes())
    writer.close()
    return [path]


def _parse(record: bytes) -> dict[str, np.ndarray]:
    return fields_of_row(np.frombuffer(record, np.int32))


def _transform(columns: dict[str, Any]) -> dict[str, np.ndarray]:
    return fields_of_row(np.asarray(columns["ids"], np.int32))


def _source(paths: list[str]) -> grain.MapDataset:
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)).map(_parse)


def _shuffled(paths: list[str]) -> grain.MapDataset:
    return _source(paths).shuffle(seed=0).repeat()


def _bare_map(paths: list[str], options: grain.ReadOptions) -> Iterator[Batch]:
    return iter(_shuffled(paths).batch(BATCH_SIZE).to_iter_dataset(options))


def map_input(folder: Path) -> Contest:
    """Compare random access to rows on the calling thread."""
    paths = _write_array_record(folder)
    config = GrainMapInput.HParams.config(dataset=lambda: _source(paths), batch_size=BATCH_SIZE)
    return Contest(
        ours=config.set(is_training=True).Instantiate,
        bare=lambda: _bare_map(paths, _ON_THIS_THREAD),
    )


def map_input_evaluated(folder: Path) -> Contest:
    """Compare evaluation epochs of a few rows in order."""
    paths = _write_array_record(folder, most=EVAL_ROWS)
    config = GrainMapInput.HParams.config(dataset=lambda: _source(paths), batch_size=BATCH_SIZE)

    def epoch() -> Iterator[Batch]:
        return iter(_source(paths).batch(BATCH_SIZE).to_iter_dataset(_ON_THIS_THREAD))

    return Contest(
        config.Instantiate, lambda: evaluations(epoch), is_same_order=True, is_evaluation=True
    )


def map_input_on_threads(folder: Path) -> Contest:
    """Compare random access to rows on threads, with a prefetch of four batches."""
    paths = _write_array_record(folder)
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=THREADS)
    config = GrainMapInput.HParams.config(
        dataset=lambda: _source(paths), batch_size=BATCH_SIZE, num_threads=THREADS, is_training=True
    )

    def ours() -> BaseInput:
        return Prefetch(source=config.Instantiate(), depth=THREADS)

    return Contest(ours, lambda: _bare_map(paths, options), least_batches=64)


def array_record_rows(folder: Path) -> Contest:
    """Compare readers of ArrayRecord files; the rival uses Grain's data source."""
    paths = _write_array_record(folder)
    config = ArrayRecordRows.HParams.config(paths=paths, parse=_parse, batch_size=BATCH_SIZE)
    return Contest(
        ours=config.set(is_training=True).Instantiate,
        bare=lambda: _bare_map(paths, _ON_THIS_THREAD),
    )


def _is_good(row: Batch) -> bool:
    return row["ids"][0] % 7 != 0


def _iter_contest(folder: Path, *, num_workers: int) -> Contest:
    paths = _write_array_record(folder)

    def shuffled(*, host_index: int, num_hosts: int, seed: int) -> grain.MapDataset:
        return _source(paths)[host_index::num_hosts].shuffle(seed=seed)

    def rows(**host: int) -> grain.IterDataset:
        return shuffled(**host).to_iter_dataset(_ON_THIS_THREAD).filter(_is_good)

    def bare() -> Iterator[Batch]:
        dataset = shuffled(host_index=0, num_hosts=1, seed=0).repeat()
        dataset = dataset.to_iter_dataset(_ON_THIS_THREAD).filter(_is_good).batch(BATCH_SIZE)
        if num_workers:
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers))
        return iter(dataset)

    config = GrainIterInput.HParams.config(
        dataset=rows, batch_size=BATCH_SIZE, num_workers=num_workers
    )
    least = 16 if num_workers else 1
    return Contest(config.set(is_training=True).Instantiate, bare, least_batches=least)


def iter_input(folder: Path) -> Contest:
    """Compare sequential rows with a filter."""
    return _iter_contest(folder, num_workers=0)


def iter_input_by_worker(folder: Path) -> Contest:
    """Compare filtered rows of one worker process; the rival's worker builds whole batches."""
    return _iter_contest(folder, num_workers=1)


def iter_input_evaluated(folder: Path) -> Contest:
    """Compare evaluation epochs of a few filtered rows."""
    paths = _write_array_record(folder, most=EVAL_ROWS)

    def rows(*, host_index: int, num_hosts: int, seed: int) -> grain.IterDataset:
        mine = _source(paths)[host_index::num_hosts]
        return mine.to_iter_dataset(_ON_THIS_THREAD).filter(_is_good)

    def epoch() -> Iterator[Batch]:
        return iter(rows(host_index=0, num_hosts=1, seed=0).batch(BATCH_SIZE))

    config = GrainIterInput.HParams.config(dataset=rows, batch_size=BATCH_SIZE)
    return Contest(
        config.Instantiate, lambda: evaluations(epoch), is_same_order=True, is_evaluation=True
    )


def parquet_rows(folder: Path) -> Contest:
    """Compare interleaved Parquet files in a shuffle window; the rival is ParquetIterDataset."""
    paths = [str(folder / f"rows-{number}.parquet") for number in range(8)]
    rows = token_rows()
    for number, path in enumerate(paths):
        table = pyarrow.table({"ids": rows[number::8].tolist()})
        pyarrow.parquet.write_table(table, path, row_group_size=256)
    config = ParquetRows.HParams.config(
        paths=paths,
        transform=_transform,
        cycle_length=4,
        shuffle_window=SHUFFLED,
        batch_size=BATCH_SIZE,
    )

    def bare() -> Iterator[Batch]:
        files = grain.MapDataset.source(paths).shuffle(seed=0).repeat()
        dataset = grain.experimental.InterleaveIterDataset(
            files.map(grain.experimental.ParquetIterDataset), cycle_length=4
        )
        dataset = grain.experimental.WindowShuffleIterDataset(
            dataset.map(_transform), window_size=SHUFFLED, seed=0
        )
        return iter(dataset.batch(BATCH_SIZE))

    windows = 4 * SHUFFLED // BATCH_SIZE
    return Contest(config.set(is_training=True).Instantiate, bare, least_batches=windows)
