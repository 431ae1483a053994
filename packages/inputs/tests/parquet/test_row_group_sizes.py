"""Tests of the bounds on decoded row groups of Parquet files."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import HuggingFaceInput, HuggingFaceStream, LocalText, ParquetRows
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.parquet.row_group_sizes import open_parquet, read_row_group, texts_of

pytest.importorskip("grain")
pytest.importorskip("datasets")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

BOUND = 1 << 20


def written(path, table, **options):
    """Write and open a file of at most a fiftieth of its decoded size."""
    parquet.write_table(
        table, path, compression="zstd", row_group_size=1 << 24, write_statistics=False, **options
    )
    assert path.stat().st_size < BOUND / 50
    return open_parquet(path)


def repeated(value, kind, count):
    """Return a column of one repeated value, which is stored once."""
    return arrow.table({"column": arrow.array([value], kind).take(arrow.array([0] * count))})


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (repeated(7, arrow.int64(), 1 << 20), {}),
        (repeated([7] * 64, arrow.list_(arrow.int64()), 1 << 14), {}),
        (repeated("x" * (1 << 21), arrow.binary(), 1), {}),
        (arrow.table({"column": np.zeros(1 << 20)}), {}),
    ],
    ids=["dictionary of numbers", "lists", "one value", "zeros"],
)
def test_too_large_row_group_raises_before_it_is_in_memory(raises, tmp_path, table, options):
    file = written(tmp_path / "a.parquet", table, **options)
    before = arrow.total_allocated_bytes()
    peak = arrow.default_memory_pool().max_memory()
    with raises(BadRecordError, field="max_row_group_bytes", value=BOUND):
        read_row_group(file, 0, columns=None, max_bytes=BOUND)
    assert arrow.total_allocated_bytes() - before < 3 * BOUND
    assert arrow.default_memory_pool().max_memory() - max(peak, before) < 6 * BOUND


def test_row_group_within_the_bound_is_read_whole(tmp_path):
    table = arrow.table({"text": ["one", "two"] * 9000, "number": np.arange(18000)})
    parquet.write_table(table, tmp_path / "a.parquet")
    file = open_parquet(tmp_path / "a.parquet")
    read = read_row_group(file, 0, columns=None, max_bytes=BOUND)
    assert read.to_pydict() == table.to_pydict()
    with pytest.raises(BadRecordError):
        read_row_group(file, 0, columns=None, max_bytes=200_000)
    only = read_row_group(file, 0, columns=["number"], max_bytes=200_000)
    assert only.equals(table.select(["number"]))


def test_text_that_is_stored_once_is_decoded_once(tmp_path):
    file = written(tmp_path / "a.parquet", repeated("x" * (1 << 12), arrow.string(), 1 << 12))
    table = read_row_group(file, 0, columns=None, max_bytes=BOUND)
    assert table.nbytes < BOUND / 8
    assert set(texts_of(table["column"].combine_chunks())) == {b"x" * (1 << 12)}


def test_values_that_share_bytes_raise(raises, tmp_path):
    shared = {"use_dictionary": False, "column_encoding": {"column": "DELTA_BYTE_ARRAY"}}
    texts = arrow.table({"column": [f"{'x' * 4000}{n}" for n in range(2000)]})
    with raises(BadRecordError, field="encodings of column 'column'"):
        written(tmp_path / "a.parquet", texts, **shared)


@pytest.mark.parametrize(
    "options",
    [
        {"dictionary_pagesize_limit": 1 << 10},
        {"use_dictionary": False},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
    ],
    ids=["dictionary and plain", "plain", "lengths and plain"],
)
def test_texts_of_every_encoding_are_those_of_the_table(tmp_path, options):
    texts = [None, *(f"{number:01000}" for number in range(20_000))]
    table = arrow.table({"text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", write_batch_size=10, **options)
    file = open_parquet(tmp_path / "a.parquet")
    read = read_row_group(file, 0, columns=None, max_bytes=64 * BOUND)
    column = read["text"].combine_chunks()
    assert [text and text.decode() for text in texts_of(column)] == texts


def test_lists_of_text_raise_before_they_are_in_memory(raises, tmp_path):
    path = tmp_path / "a.parquet"
    texts = repeated("x" * (1 << 16), arrow.string(), 1000)["column"].combine_chunks()
    lists = arrow.ListArray.from_arrays(arrow.array([0, len(texts)], arrow.int32()), texts)
    written(path, arrow.table({"column": lists}), store_schema=False)
    del texts, lists
    reader = ParquetRows(batch_size=1, paths=[str(path)], transform=lambda row: {"n": 1})
    before, pool = arrow.total_allocated_bytes(), arrow.default_memory_pool()
    peak = pool.max_memory()
    with raises(ConfigError, field="type of column 'column'", value="list<element: string>"):
        reader.get_next()
    assert pool.max_memory() - max(peak, before) < 6 * BOUND
    assert arrow.total_allocated_bytes() - before < 3 * BOUND


CHECKED = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}


READERS = {
    "local text": lambda path: LocalText(
        batch_size=1, paths=[path], text_field="text", split="all", seq_length=64
    ),
    "rows": lambda path: ParquetRows(
        batch_size=1, paths=[path], transform=lambda row: {"n": len(row["text"])}
    ),
    "hugging face": lambda path: HuggingFaceInput(
        batch_size=1, path="parquet", data_files=path, cache_dir=f"{path}.cache"
    ),
    "hugging face, streamed": lambda path: HuggingFaceStream(
        batch_size=1, path="parquet", data_files=path, cache_dir=f"{path}.cache"
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_verifies_page_checksums(tmp_path, reader):
    path = tmp_path / "a.parquet"
    texts = [f"document {number}" for number in range(100)]
    parquet.write_table(arrow.table({"text": texts}), path, **CHECKED)
    READERS[reader](str(path)).get_next()
    damaged = tmp_path / "b.parquet"
    damaged.write_bytes(path.read_bytes().replace(b"document 50", b"dokument 50", 1))
    with pytest.raises((ValueError, OSError), match=r"b\.parquet.*"):
        READERS[reader](str(damaged)).get_next()
