from __future__ import annotations

import json

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.parquet.parquet_rows import ParquetRows
from layerkit_inputs.testing import laws

pytest.importorskip("grain")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NUM_ROWS = (10, 0, 17)


def columns_of(numbers):
    return {
        "number": arrow.array(numbers, arrow.int32()),
        "vector": arrow.array([[n, n + 0.5] for n in numbers], arrow.list_(arrow.float32())),
        "fixed": arrow.array([[n] * 3 for n in numbers], arrow.list_(arrow.int16(), 3)),
        "flag": arrow.array([n % 2 == 0 for n in numbers]),
        "text": arrow.array([f"text {n}" for n in numbers], arrow.string()),
    }


@pytest.fixture
def folder(tmp_path):
    """Three files of 10, 0 and 17 rows, in row groups of 4."""
    before = 0
    for name, size in zip("abc", NUM_ROWS, strict=True):
        numbers = list(range(before, before + size))
        table = arrow.table(columns_of(numbers))
        parquet.write_table(
            table, tmp_path / f"{name}.parquet", row_group_size=4, write_page_checksum=True
        )
        before += size
    return tmp_path


def reader(folder, **fields):
    numbers = ["number", "vector", "fixed", "flag"]
    return ParquetRows(**{"batch_size": 4, "paths": [str(folder)], "columns": numbers, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_training": True, "shuffle_window": 12, "cycle_length": 2},
        {"eval_loop_num_batches": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, fields, folder):
    law(lambda **more: reader(folder, **{**fields, **more}))


def test_columns_become_arrays_of_their_types(folder):
    batch = reader(folder, cycle_length=1).get_next()
    assert batch.number.tolist() == [0, 1, 2, 3] and batch.number.dtype == np.int32
    assert batch.vector.tolist() == [[n, n + 0.5] for n in range(4)]
    assert batch.vector.dtype == np.float32
    assert batch.fixed.tolist() == [[n] * 3 for n in range(4)] and batch.fixed.dtype == np.int16
    assert batch.flag.tolist() == [True, False, True, False] and batch.flag.dtype == bool


def test_transform_converts_text_to_arrays(raises, folder):
    def transform(row):
        return {"ids": np.frombuffer(row["text"].encode().ljust(8), np.uint8)}

    batch = reader(folder, columns=["text"], transform=transform, cycle_length=1).get_next()
    assert bytes(batch.ids[2]) == b"text 2  "
    with raises(BadRecordError, field="dtype of text", value="<U6"):
        reader(folder, columns=["number", "text"], cycle_length=1).get_next()


def test_named_files_need_no_suffix_and_others_of_folders_are_left_out(tmp_path):
    for name, numbers in (("a.parquet", [1, 2]), ("b.pq", [3, 4])):
        parquet.write_table(arrow.table({"x": numbers}), tmp_path / name)
    fields = {"batch_size": 4, "shuffle_window": 1}
    for entry in (f"{tmp_path}/./b.pq", str(tmp_path / "*.pq")):
        batch = ParquetRows(paths=[str(tmp_path / "a.parquet"), entry], **fields).get_next()
        assert sorted(batch.x.tolist()) == [1, 2, 3, 4]
    batch = ParquetRows(paths=[str(tmp_path)], **fields).get_next()
    assert batch.provenance.tolist() == [0, 1, -1, -1]


def test_training_assigns_row_groups_by_epoch(raises, folder):
    source = reader(folder, is_training=True, batch_size=27)
    first, second = (source.get_next().number.tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(27)) and first != second
    source = reader(folder, is_training=True, batch_size=3)
    for _ in range(15):
        source.get_next()
        assert len(json.dumps(source.get_state())) < 1024
    read = set()
    for host in range(8):
        fields = {"is_training": True, "infeed_host_index": host, "num_infeed_hosts": 8}
        read |= set(reader(folder, **fields).get_next().number.tolist())
    assert read == set(range(27))
    with raises(ConfigError, field="number of row groups", value=8):
        reader(folder, is_training=True, num_infeed_hosts=9).get_next()


def test_rows_with_nulls_raise_or_are_counted(raises, tmp_path):
    columns = columns_of(list(range(6)))
    columns["number"] = arrow.array([0, None, 2, 3, 4, 5], arrow.int32())
    columns["vector"] = arrow.array(
        [[0, 0], [1, 1], None, [3, None], [4, 4], [5, 5]], arrow.list_(arrow.float32())
    )
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    fields = {"columns": ["number", "vector"], "batch_size": 3}
    with raises(BadRecordError, problem="null in column 'number'"):
        reader(tmp_path, **fields).get_next()
    source = reader(tmp_path, on_bad_record="skip", **fields)
    batches = laws.take(source, 9)
    # As many batches as the rows of all hosts were planned to make; the last is padding.
    assert [batch.provenance.tolist() for batch in batches] == [[0, 4, 5], [-1, -1, -1]]
    assert batches[0].number.tolist() == [0, 4, 5]
    assert batches[0].number.dtype == np.int32
    assert batches[0].vector.tolist() == [[0, 0], [4, 4], [5, 5]]
    assert source.num_skipped == 3 and "row 3: null in column 'vector'" in source._bad.first[2]


def damage(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def test_damaged_row_group_raises_or_is_skipped(folder):
    path = folder / "a.parquet"
    column = parquet.read_metadata(path).row_group(1).column(0)
    damage(path, column.dictionary_page_offset + column.total_compressed_size - 1)
    with pytest.raises(BadRecordError, match=r"a.parquet, row group 1: cannot be decoded \("):
        laws.take(reader(folder), 99)
    source = reader(folder, on_bad_record="skip")
    numbers = [n for b in laws.take(source, 99) for n in b.number[b.provenance >= 0].tolist()]
    assert sorted(numbers) == [*range(4), *range(8, 27)]
    assert source.num_skipped == 1


def test_storage_that_fails_is_no_bad_record(folder):
    source = reader(folder, on_bad_record="skip")
    source.peek()
    for path in folder.glob("*.parquet"):
        path.unlink()
    with pytest.raises(FileNotFoundError):
        laws.take(source, 99)


@pytest.mark.parametrize("keep", [0, 3, -5])
def test_truncated_file_raises_or_is_skipped(folder, keep):
    path = folder / "a.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadRecordError, match="a.parquet: cannot be read as Parquet"):
        reader(folder).get_next()
    source = reader(folder, on_bad_record="skip")
    numbers = [n for b in laws.take(source, 99) for n in b.number[b.provenance >= 0].tolist()]
    assert sorted(numbers) == list(range(10, 27)) and source.num_skipped == 1


def test_parquet_rows_raise_for_invalid_files_and_columns(raises, folder, tmp_path):
    with raises(ConfigError, field="columns", value="nunber"):
        reader(folder, columns=["nunber"]).get_next()
    empty = [str(folder / "b.parquet")]
    with pytest.raises(ConfigError) as caught:
        reader(folder, paths=empty).get_next()
    assert (caught.value.field, caught.value.value) == ("paths", empty)
    dates = arrow.table({"when": arrow.array([0], arrow.timestamp("s"))})
    parquet.write_table(dates, tmp_path / "dates.parquet")
    with pytest.raises(ConfigError) as caught:
        reader(folder, paths=[str(tmp_path / "dates.parquet")], columns=None).get_next()
    assert caught.value.field == "type of column 'when'"


def test_state_fits_only_the_same_row_groups(folder):
    state = reader(folder).get_state()
    (folder / "a.parquet").rename(folder / "z.parquet")
    with pytest.raises(ConfigError) as caught:
        reader(folder).set_state(state)
    assert [*caught.value.value] == ["row_groups_crc32"]


@pytest.mark.slow
def test_workers_read_every_row_once(folder):
    source = reader(folder, num_workers=2, batch_size=27)
    assert sorted(source.get_next().number.tolist()) == list(range(27))
    source.close()


@pytest.mark.parametrize("num_rows", [1, 1 << 16])
def test_row_group_above_the_bound_raises_or_is_counted(raises, folder, num_rows):
    path = folder / "d.parquet"
    numbers = arrow.array([5] * num_rows, arrow.int32())
    parquet.write_table(arrow.table({"number": numbers}), path)
    fields = {"columns": ["number"], "max_row_group_bytes": 1 << 12}
    if num_rows == 1:
        assert reader(path, **fields).get_next().number[0] == 5
        return
    with raises(BadRecordError, field="max_row_group_bytes", value=1 << 12):
        reader(path, **fields).get_next()
    source = reader(folder, on_bad_record="skip", **fields)
    result = [n for batch in source.eval_batches() for n in batch.number[batch.provenance >= 0]]
    assert sorted(result) == list(range(27)) and source.num_skipped == 1
