"""Tests of the bounds on decoded row groups of Parquet files."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit_inputs import HuggingFaceInput, HuggingFaceStream, LocalText, ParquetRows
from layerkit_inputs.base.bad_records import BadRecordError
from layerkit_inputs.parquet.row_group_sizes import open_parquet, read_row_group, row_group_batches

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


SHARED_BEGINNINGS = {"use_dictionary": False, "column_encoding": {"column": "DELTA_BYTE_ARRAY"}}


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (repeated(7, arrow.int64(), 1 << 20), {}),
        (repeated([7] * 64, arrow.list_(arrow.int64()), 1 << 14), {}),
        (repeated("x" * (1 << 12), arrow.string(), 1 << 10), {}),
        (repeated("x" * (1 << 21), arrow.binary(), 1), {}),
        (arrow.table({"column": np.zeros(1 << 20)}), {}),
        (arrow.table({"column": [f"{'x' * 4000}{n}" for n in range(2000)]}), SHARED_BEGINNINGS),
    ],
    ids=["dictionary of numbers", "lists", "dictionary of text", "one value", "zeros", "shared"],
)
def test_too_large_row_group_raises_before_it_is_in_memory(raises, tmp_path, table, options):
    file = written(tmp_path / "a.parquet", table, **options)
    before = arrow.total_allocated_bytes()
    peak = arrow.default_memory_pool().max_memory()
    with raises(BadRecordError, field="max_row_group_bytes", value=BOUND):
        read_row_group(tmp_path / "a.parquet", file, 0, columns=None, max_bytes=BOUND)
    assert arrow.total_allocated_bytes() - before < 3 * BOUND
    assert arrow.default_memory_pool().max_memory() - max(peak, before) < 6 * BOUND


def test_row_group_within_the_bound_is_read_whole(tmp_path):
    table = arrow.table({"text": ["one", "two"] * 9000, "number": np.arange(18000)})
    parquet.write_table(table, tmp_path / "a.parquet")
    file = open_parquet(tmp_path / "a.parquet")
    assert read_row_group(tmp_path / "a.parquet", file, 0, columns=None, max_bytes=BOUND).equals(
        table
    )
    with pytest.raises(BadRecordError):
        read_row_group(tmp_path / "a.parquet", file, 0, columns=None, max_bytes=200_000)
    only = read_row_group(tmp_path / "a.parquet", file, 0, columns=["number"], max_bytes=200_000)
    assert only.equals(table.select(["number"]))


def _batches(path, *, max_bytes):
    return row_group_batches(
        path, open_parquet(path), 0, columns=None, max_bytes=max_bytes, most_rows=1000
    )


@pytest.mark.parametrize(
    "options",
    [
        {"dictionary_pagesize_limit": 1 << 10},
        {"use_dictionary": False},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
    ],
    ids=["dictionary and plain", "plain", "lengths and plain"],
)
def test_batches_of_different_texts_hold_many_rows_whatever_the_size_of_the_row_group(
    tmp_path, options
):
    table = arrow.table({"text": [f"{number:01000}" for number in range(2000)]})
    parquet.write_table(table, tmp_path / "a.parquet", write_batch_size=10, **options)
    batches = list(_batches(tmp_path / "a.parquet", max_bytes=BOUND))
    assert arrow.Table.from_batches(batches).equals(table)
    assert len(batches) <= 20


@pytest.mark.parametrize(
    ("table", "options", "most"),
    [
        (
            arrow.table({"column": [f"{'x' * (1 << 12)}{number}" for number in range(1000)]}),
            SHARED_BEGINNINGS,
            1 << 13,
        ),
        (repeated("x" * (1 << 16), arrow.string(), 100), {}, 1 << 12),
    ],
    ids=["values share bytes", "values may be large"],
)
def test_batches_of_large_values_hold_fewer_rows(tmp_path, table, options, most):
    written(tmp_path / "a.parquet", table, **options)
    batches = list(_batches(tmp_path / "a.parquet", max_bytes=BOUND))
    assert sum(map(len, batches)) == len(table)
    assert max(batch.nbytes for batch in batches) <= BOUND + most


def test_lists_of_text_raise_before_they_are_in_memory(raises, tmp_path):
    path = tmp_path / "a.parquet"
    texts = repeated("x" * (1 << 16), arrow.string(), 1000)["column"].combine_chunks()
    lists = arrow.ListArray.from_arrays(arrow.array([0, len(texts)], arrow.int32()), texts)
    written(path, arrow.table({"column": lists}), store_schema=False)
    del texts, lists
    reader = ParquetRows(batch_size=1, paths=[str(path)], transform=lambda row: {"n": 1})
    before, pool = arrow.total_allocated_bytes(), arrow.default_memory_pool()
    peak = pool.max_memory()
    with raises(BadRecordError, field="type of column 'column'", value="list<element: string>"):
        reader.get_next()
    assert pool.max_memory() - max(peak, before) < 6 * BOUND
    assert arrow.total_allocated_bytes() - before < 3 * BOUND


CHECKED = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}


def test_page_checksums_are_verified(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"number": np.arange(1000)}), path, **CHECKED)
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(500, 502).tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        read_row_group(path, open_parquet(path), 0, columns=None, max_bytes=BOUND)


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
