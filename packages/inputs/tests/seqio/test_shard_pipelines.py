from __future__ import annotations

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecords
from layerkit_inputs.seqio.shard_pipelines import ReadOptions, ShardPipelines

EXAMPLES = [{"inputs": [n + 3], "targets": [n % 7 + 3] * (n % 5)} for n in range(150)]


def options(**changes):
    given = ReadOptions(
        split="train",
        feature_lengths={"inputs": 1, "targets": 3},
        trim_output_features=True,
        shuffle=True,
        shuffle_buffer_size=None,
        seed=0,
        num_shards=None,
        share=(0, 1),
        endless=False,
        whole_examples=False,
        bad_records=BadRecords(),
    )
    return given._replace(**changes)


def read(pipelines, *, epoch=0, start=0, in_chunks=True):
    examples = pipelines.open(0, epoch=epoch, start=start, in_chunks=in_chunks)
    return [{name: value.tolist() for name, value in example.items()} for example in examples]


def make(task, **changes):
    return ShardPipelines(task, options(**changes), num_shards=1, buffer_size=20)


@pytest.mark.parametrize("changes", [{}, {"shuffle": False}], ids=["shuffled", "in order"])
def test_chunks_hold_the_same_examples_as_single_reads(changes, make_task):
    pipelines = make(make_task(EXAMPLES), **changes)
    expected = read(pipelines, in_chunks=False)
    assert len(expected) == 150 and read(pipelines) == expected
    assert read(pipelines, start=70) == expected[70:]


def test_features_that_are_not_vectors_are_read_one_by_one(make_task):
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert
    def add_text(example):
        return {**example, "text": tf.constant("a")}

    task = make_task(EXAMPLES[:3], preprocessors=[lambda dataset: dataset.map(add_text)])
    assert set(next(make(task).open(0, epoch=0, start=0, in_chunks=True))) == {"inputs", "targets"}
    whole = make(task, whole_examples=True).open(0, epoch=0, start=0, in_chunks=True)
    assert set(next(whole)) == {"inputs", "targets", "text"}


def test_deterministic_pipeline_is_made_once(make_task):
    made = []

    def count(dataset):
        made.append(1)
        return dataset

    pipelines = make(make_task(EXAMPLES, preprocessors=[count]))
    epochs = [read(pipelines, epoch=epoch) for epoch in (0, 1, 0)]
    assert len(made) == 1 and epochs[0] == epochs[2] != epochs[1]


def test_skipping_past_bad_records_raises_errors_of_the_file(make_task, tmp_path):
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert
    def as_example(line):
        return {name: tf.fill([1], tf.strings.length(line)) for name in ("inputs", "targets")}

    def read_missing_file(dataset):
        return tf.data.TextLineDataset(str(tmp_path / "missing")).map(as_example)

    skip = BadRecords("skip")
    missing = make(make_task(EXAMPLES, preprocessors=[read_missing_file]), bad_records=skip)
    with pytest.raises(tf.errors.NotFoundError, match="missing"):
        read(missing, start=5, in_chunks=False)
    shorter = make(make_task(EXAMPLES), bad_records=skip)
    assert read(shorter, start=150, in_chunks=False) == []
    with pytest.raises(ConfigError, match="2 examples fewer"):
        read(shorter, start=152, in_chunks=False)


def _draw_ids(dataset):
    import seqio
    import tensorflow as tf

    @seqio.map_over_dataset(num_seeds=1)
    @tf.autograph.experimental.do_not_convert
    def draw(example, seed):
        drawn = tf.random.stateless_uniform([1], seed, 3, 90, tf.int32)
        return {**example, "targets": drawn}

    return draw(dataset)


def _shuffle(dataset):
    return dataset.shuffle(30, seed=1)


@pytest.mark.parametrize("preprocess", [_draw_ids, _shuffle])
def test_random_pipeline_is_made_again_and_is_reproducible(preprocess, make_task):
    task = make_task(EXAMPLES, preprocessors=[preprocess])
    pipelines = make(task, shuffle=False)
    first, second = (read(pipelines, epoch=epoch) for epoch in (0, 1))
    assert read(pipelines) == first and read(make(task, shuffle=False), epoch=1) == second
    drawn = [np.array([one["targets"] for one in epoch], object) for epoch in (first, second)]
    assert (preprocess is _shuffle) == (drawn[0].tolist() == drawn[1].tolist())
