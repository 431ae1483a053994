from __future__ import annotations

import os
import re
import shutil

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.seqio.seqio_input import SeqIOInput

FILE = "c4-validation.tfrecord-00001-of-00004"


def reader(task, lengths, *, batch_size=1, **fields):
    return SeqIOInput(
        batch_size=batch_size, mixture_or_task=task, task_feature_lengths=lengths, **fields
    )


@pytest.fixture
def damage(c4_folder, c4_task, tmp_path):
    """Return an input of a copy of the folder with one changed file."""

    def make(change, **fields):
        shutil.copytree(c4_folder, tmp_path, dirs_exist_ok=True)
        change(tmp_path / "c4" / "en" / "3.0.1" / FILE)
        given = {"batch_size": 4, "task_feature_lengths": {"targets": 64}}
        return SeqIOInput(
            **given, mixture_or_task=c4_task(tmp_path), split_name="validation", **fields
        )

    return make


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def cut_within_a_record(path):
    os.truncate(path, path.stat().st_size - 7)


def cut_between_records(path):
    length = int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, 8 + 4 + length + 4)


def empty(path):
    os.truncate(path, 0)


DAMAGES = [flip_a_byte, cut_within_a_record, cut_between_records, empty, os.remove]


@pytest.mark.parametrize("change", DAMAGES, ids=lambda change: change.__name__)
def test_damaged_file_raises_with_its_name(change, damage, tmp_path):
    source = damage(change)
    with pytest.raises(BadRecordError, match=re.escape(FILE)):
        list(source.eval_batches())


@pytest.mark.parametrize("change", [cut_within_a_record, os.remove], ids=lambda c: c.__name__)
def test_rest_of_a_damaged_file_is_skipped_and_counted(change, damage):
    source = damage(change, on_bad_record="skip")
    batches = list(source.eval_batches())
    count = sum(batch.eval_sample_weights.sum() for batch in batches)
    assert 9 <= count < 13 and source.num_skipped == 1


def test_resume_within_a_file_that_is_gone_skips_and_counts_it(damage):
    whole = damage(lambda path: None, on_bad_record="skip")
    whole.get_next()
    state = whole.get_state()
    epoch_shard_example = state["position"]["at"]["examples"]["at"]
    assert epoch_shard_example == [0, 1, 1]  # files have 3, 3, 3 and 4 examples
    source = damage(os.remove, on_bad_record="skip")
    source.set_state(state)
    rows = [source.get_next().provenance.tolist() for _ in range(2)]
    assert rows == [[4, 5, 6, 7], [8, 9, 10, -1]] and source.num_skipped == 1


def test_record_that_a_preprocessor_rejects_raises_or_is_skipped(make_task):
    import tensorflow as tf

    def refuse_six(dataset):
        def check(example):
            with tf.control_dependencies(
                [tf.debugging.assert_none_equal(example["targets"], 6, message="a six")]
            ):
                return {"targets": tf.identity(example["targets"])}

        return dataset.map(check)

    task = make_task([{"targets": [n]} for n in range(4, 9)], preprocessors=[refuse_six])
    given = {"batch_size": 1, "mixture_or_task": task, "task_feature_lengths": {"targets": 1}}
    with pytest.raises(ValueError, match=r"record 2: .*a six"):
        list(SeqIOInput(**given).eval_batches())
    source = SeqIOInput(**given, on_bad_record="skip")
    labels = [int(batch.labels[0, 0]) for batch in source.eval_batches()]
    assert labels == [4, 5, 7, 8] and source.num_skipped == 1
    fresh = SeqIOInput(**given, on_bad_record="skip")
    source.reset()
    for _ in range(3):
        source.get_next()
    fresh.set_state(source.get_state())
    assert fresh.get_next().labels.tolist() == [[8]]


def test_preprocessors_that_reject_every_record_raise(make_task):
    import tensorflow as tf

    def refuse_all(dataset):
        def check(example):
            with tf.control_dependencies([tf.debugging.assert_equal(example["targets"], -1)]):
                return {"targets": tf.identity(example["targets"])}

        return dataset.map(check)

    task = make_task([{"targets": [5]}] * 150, preprocessors=[refuse_all])
    source = reader(task, {"targets": 1}, on_bad_record="skip")
    with pytest.raises(ValueError, match="100 consecutive records"):
        source.get_next()


def test_examples_longer_than_a_row_are_cut_or_bad_records(raises, make_task):
    task = make_task([{"targets": [5, 6, 7]}, {"targets": [8]}])
    given = {"batch_size": 2, "mixture_or_task": task, "task_feature_lengths": {"targets": 2}}
    assert SeqIOInput(**given).get_next().labels.tolist() == [[5, 6], [8, 0]]
    with raises(BadRecordError, owner="task task, record 0"):
        SeqIOInput(**given, trim_output_features=False).get_next()
    source = SeqIOInput(**given, trim_output_features=False, on_bad_record="skip")
    assert source.get_next().provenance.tolist() == [1, -1] and source.num_skipped == 1


@pytest.mark.parametrize("num_shards", [1, 2])
def test_fewer_shards_read_several_files_each(num_shards, c4_folder, c4_task):
    source = reader(
        c4_task(c4_folder),
        {"targets": 512},
        batch_size=13,
        split_name="validation",
        num_shards=num_shards,
    )
    batch = source.get_next()
    assert len(set(source.ids_to_strings(batch.labels, [512] * 13))) == 13


def test_shuffle_raises_for_a_task_without_shuffling(raises, make_task):
    task = make_task([{"targets": [5]}], shuffle_buffer_size=None)
    given = {"batch_size": 1, "mixture_or_task": task, "task_feature_lengths": {"targets": 1}}
    with raises(ConfigError, field="shuffle", value=True):
        SeqIOInput(**given, is_training=True).get_next()
    assert SeqIOInput(**given, is_training=True, shuffle=False).get_next()


@pytest.mark.parametrize("training", [False, True])
def test_data_without_examples_raise_in_training_and_end_in_evaluation(raises, training, make_task):
    task = make_task([])
    source = reader(task, {"targets": 1}, is_training=training)
    if training:
        with raises(ConfigError, owner="SeqIOInput"):
            source.get_next()
    else:
        assert list(source.eval_batches()) == []


@pytest.fixture
def four_files(c4_folder, c4_task):
    """Return a training input of four files, and the list of pipelines that were made."""
    made = []

    def count(dataset):
        made.append(1)
        return dataset

    def make(after=count, **fields):
        task = c4_task(c4_folder)
        task.preprocessors = (*task.preprocessors, after)
        given = {"batch_size": 1, "task_feature_lengths": {"targets": 64}, "is_training": True}
        return SeqIOInput(**given, mixture_or_task=task, use_packing=False, **fields)

    return make, made


def test_next_shard_is_opened_while_one_is_read(four_files):
    make, made = four_files
    source = make()
    source.get_next()
    assert len(made) == 2
    source.get_next()
    assert len(made) == 2


def test_error_of_opening_ahead_is_raised_when_the_shard_is_read(four_files):
    make, made = four_files

    def fail(dataset):
        made.append(1)
        if len(made) > 1:
            raise ValueError(f"pipeline {len(made)}")
        return dataset

    source = make(fail)
    for _ in range(10):
        source.get_next()
    with pytest.raises(ValueError, match="pipeline 3"):
        source.get_next()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_reset_closes_shards_that_were_opened_ahead(four_files):
    make, _ = four_files
    source = make()
    first = source.get_next().labels
    before = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        source.reset()
        np.testing.assert_array_equal(source.get_next().labels, first)
    assert len(os.listdir("/proc/self/task")) < before + 20
