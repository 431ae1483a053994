from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.grain.array_records import WRITER_OPTIONS
from layerkit_inputs.grain.map_input import ArrayRecordRows, GrainMapInput
from layerkit_inputs.testing import laws

grain = pytest.importorskip("grain")

NUM_ROWS = 41


def augment(row, generator):
    return {**row, "noise": np.float32(generator.random())}


def make_rows(num_rows=NUM_ROWS):
    numbers = grain.MapDataset.range(num_rows)
    rows = numbers.map(lambda n: {"x": np.array([n, -n], np.int32), "deep": {"y": np.float32(n)}})
    return rows.random_map(augment, seed=5)


def reader(**fields):
    return GrainMapInput(**{"batch_size": 4, "dataset": make_rows, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_training": True, "num_threads": 2},
        {"is_training": True, "shuffle_window": 5},
        {"eval_loop_num_batches": 3, "shuffle": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, fields):
    law(lambda **more: reader(**{**fields, **more}))


def test_random_transformations_differ_by_epoch_and_are_reproducible():
    source = reader(batch_size=NUM_ROWS, is_training=True)
    first, second = source.get_next(), source.get_next()
    assert sorted(first.x[:, 0]) == sorted(second.x[:, 0]) == list(range(NUM_ROWS))
    assert not set(first.noise) & set(second.noise)
    repeated = list(make_rows().repeat(2))
    expected = {row["noise"] for row in repeated}
    assert set(first.noise) | set(second.noise) == expected
    assert len(json.dumps(source.get_state())) < 200


def test_dataset_field_accepts_a_data_set_or_a_function_that_makes_one():
    built = Config(make_rows, num_rows=8)
    for dataset in (built, lambda: make_rows(8)):
        source = GrainMapInput.HParams.config(dataset=dataset, batch_size=8).Instantiate()
        assert source.get_next().x[:, 0].tolist() == list(range(8))


def fails_on_some(number):
    if number % 7 == 3:
        raise ValueError(f"number {number} is cursed.")
    return {"x": np.int32(number)}


def failing(**fields):
    rows = grain.MapDataset.range(10).map(fails_on_some)
    return GrainMapInput(**{"batch_size": 4, "dataset": rows, **fields})


@pytest.mark.parametrize("num_threads", [0, 2])
def test_unreadable_rows_raise_or_are_counted(num_threads):
    with pytest.raises(ValueError, match=r"^number 3 is cursed\.") as caught:
        failing(num_threads=num_threads).get_next()
    assert "In GrainMapInput, row 3." in caught.value.__notes__
    source = failing(on_bad_record="skip", num_threads=num_threads)
    batches = list(source.eval_batches())
    assert [batch.provenance.tolist() for batch in batches] == [
        [0, 1, 2, -1], [4, 5, 6, 7], [8, 9, -1, -1],
    ]  # fmt: skip
    assert batches[0].x.tolist() == [0, 1, 2, 0]
    assert batches[0].eval_sample_weights.tolist() == [1, 1, 1, 0]
    assert source.num_skipped == 1
    assert source._bad.first == ["GrainMapInput, record 3: number 3 is cursed."]
    # Training reads the next row instead, so that every row has weight.
    training = failing(on_bad_record="skip", is_training=True, shuffle=False, batch_size=10)
    assert training.get_next().x.tolist() == [0, 1, 2, 4, 4, 5, 6, 7, 8, 9]
    source.close()


def test_data_set_without_readable_rows_raises(raises):
    rows = grain.MapDataset.range(3).map(lambda number: {"x": "text"})
    source = GrainMapInput(batch_size=2, dataset=rows, on_bad_record="skip")
    with raises(ConfigError, owner="GrainMapInput"):
        source.get_next()


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda n: n, "row", 0),
        (lambda n: {}, "row", {}),
        (lambda n: {"a": {"b": "text"}}, "dtype of b", "<U4"),
        (lambda n: {"a": [[1], [1, 2]]}, "dtype of a", "object"),
    ],
    ids=["number", "empty", "text", "ragged"],
)
def test_map_input_raises_for_invalid_rows(raises, make, field, value):
    source = GrainMapInput(batch_size=2, dataset=grain.MapDataset.range(4).map(make))
    with raises(BadRecordError, field=field, value=value):
        source.get_next()


def test_map_input_raises_if_rows_differ(raises):
    def make(n):
        return {"x": np.zeros(n), "y": n} if n else {"x": np.zeros(0, np.float32)}

    source = GrainMapInput(batch_size=2, dataset=grain.MapDataset.range(4).map(make))
    with raises(BadRecordError, owner="GrainMapInput, row 1"):
        source.get_next()


def test_map_input_raises_for_data_sets_without_random_access_or_length(raises):
    numbers = grain.MapDataset.range(4).map(lambda n: {"x": n})
    for dataset in (lambda: numbers.to_iter_dataset(), [1, 2]):
        with raises(ConfigError, owner="GrainMapInput", field="dataset"):
            GrainMapInput(batch_size=2, dataset=dataset).get_next()
    with raises(ConfigError, owner="GrainMapInput"):
        GrainMapInput(batch_size=2, dataset=numbers.repeat()).get_next()
    filtered = GrainMapInput(batch_size=2, dataset=numbers.filter(lambda row: row["x"] > 0))
    with raises(BadRecordError, owner="GrainMapInput, row 0"):
        filtered.get_next()
    with pytest.raises(ConfigError):
        GrainMapInput(batch_size=2, dataset=numbers[:0]).get_next()


def parse(record):
    if len(record) != 8:
        raise ValueError(f"{len(record)} bytes, expected 8.")
    return {"x": np.frombuffer(record, np.int32)}


@pytest.fixture
def files(tmp_path):
    """Three files of 8, 0 and 5 rows."""
    array_record = pytest.importorskip("array_record.python.array_record_module")
    paths = [str(tmp_path / f"{name}.array_record") for name in "abc"]
    for path, numbers in zip(paths, (range(8), (), range(8, 13)), strict=True):
        writer = array_record.ArrayRecordWriter(path, WRITER_OPTIONS + ",uncompressed")
        for number in numbers:
            writer.write(np.array([number, 1234567], np.int32).tobytes())
        writer.close()
    return paths


@pytest.mark.parametrize("fields", [{}, {"is_training": True}], ids=str)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_laws_of_array_record_rows(law, fields, files):
    fields = {"batch_size": 4, "paths": files, "parse": parse, **fields}
    law(lambda **more: ArrayRecordRows(**{**fields, **more}))


def test_damaged_record_raises_with_file_and_number(files):
    source = ArrayRecordRows(batch_size=13, paths=files, parse=parse)
    assert source.get_next().x[:, 0].tolist() == list(range(13))
    path = Path(files[2])
    content = bytearray(path.read_bytes())
    content[content.index(np.array([10, 1234567], np.int32).tobytes())] ^= 0xFF
    path.write_bytes(content)
    source = ArrayRecordRows(batch_size=13, paths=files, parse=parse)
    with pytest.raises(BadRecordError, match=re.escape(f"{path}, record 2: ")):
        source.get_next()
    source = ArrayRecordRows(batch_size=13, paths=files, parse=parse, on_bad_record="skip")
    assert source.get_next().provenance.tolist() == [*range(10), -1, 11, 12]
    assert source.num_skipped == 1 and f"{path}, record 2" in source._bad.first[0]


def test_array_record_rows_reject_a_state_of_other_files(files):
    source = ArrayRecordRows(batch_size=1, paths=files, parse=parse)
    source.get_next()
    other = ArrayRecordRows(batch_size=1, paths=[files[2], files[0]], parse=parse)
    with pytest.raises(ConfigError) as caught:
        other.set_state(source.get_state())
    assert [*caught.value.value] == ["files_crc32", "num_files"]
