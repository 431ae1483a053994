"""The adaptors on inputs that read by Lingvo's native ops, where these load."""

from __future__ import annotations

import json
import logging
import re

import numpy as np
import pytest

pytest.importorskip("lingvo")

from layerkit.errors import ConfigError
from layerkit_inputs.lingvo import (
    LingvoEvalAdaptor,
    LingvoInputAdaptor,
    LingvoInputAdaptorNewBatchSize,
    LingvoLazyEvalAdaptor,
)
from layerkit_inputs.testing import laws


@pytest.fixture
def numbers(native, write_records):
    """Params of an input over that many records, in order where it is not told otherwise."""

    def make(count, batch=2, **fields):
        path = write_records([b"%04d" % i for i in range(count)], f"records{count}")
        given = {"file_pattern": f"tfrecord:{path}", "file_random_seed": 0, "repeat_count": 1}
        return native.NativeNumbers.Params().Set(batch_size=batch, **{**given, **fields})

    return make


def values(source, most=100):
    return [batch.num.tolist() for batch in laws.take(source, most)]


def random_records(numbers, **fields):
    params = numbers(20, repeat_count=-1, file_buffer_size=32, file_parallelism=1)
    return LingvoInputAdaptor(input=params, is_training=True, **fields)


def assert_raises(make, **data):
    with pytest.raises(ConfigError) as caught:
        make()
    assert {name: getattr(caught.value, name) for name in data} == data


def test_records_come_in_order_to_their_end(numbers):
    source = LingvoInputAdaptor(input=numbers(20), cluster_do_eval=True)
    assert values(source) == [[2 * i, 2 * i + 1] for i in range(10)]
    with pytest.raises(StopIteration):
        source.get_next()
    source.reset()
    assert values(source) == [[2 * i, 2 * i + 1] for i in range(10)]


def test_num_batches_ends_an_epoch_after_that_many_batches(numbers):
    source = LingvoInputAdaptor(input=numbers(20), cluster_do_eval=True, num_batches=4)
    assert values(source) == [[2 * i, 2 * i + 1] for i in range(4)]
    source.reset()
    assert source.get_next().num.tolist() == [0, 1]


def test_smaller_batches_are_cut_from_larger_ones(numbers):
    source = LingvoInputAdaptorNewBatchSize(input=numbers(12), batch_size=1, cluster_do_eval=True)
    assert values(source) == [[i] for i in range(12)]


def test_a_short_batch_is_filled(numbers):
    *_, last = laws.take(LingvoInputAdaptor(input=numbers(5), cluster_do_eval=True))
    assert (last.num.tolist(), last.eval_sample_weights.tolist()) == ([4, 0], [1, 0])


def test_training_is_shuffled_and_endless(numbers):
    seen = np.concatenate(values(random_records(numbers), 30))
    assert len(seen) == 60 and seen[:20].tolist() != list(range(20))
    assert sorted(seen[:20].tolist()) == list(range(20))


def test_rows_are_dealt_out_over_hosts(numbers):
    sources = [
        LingvoEvalAdaptor(
            input=numbers(11, batch=1),
            batch_size=3,
            cluster_do_eval=True,
            num_infeed_hosts=3,
            infeed_host_index=host,
        )
        for host in range(3)
    ]
    assert [values(source) for source in sources] == [
        [[0, 1, 2], [9, 10, 0]],
        [[3, 4, 5], [0, 0, 0]],
        [[6, 7, 8], [0, 0, 0]],
    ]


def test_a_lazy_epoch_is_a_number_of_samples(numbers):
    params = numbers(13, batch=3, repeat_count=-1, num_samples=13)
    sources = [
        LingvoLazyEvalAdaptor(
            input=params, cluster_do_eval=True, num_infeed_hosts=3, infeed_host_index=host
        )
        for host in range(3)
    ]
    assert [source.num_samples for source in sources] == [6, 4, 3]
    assert [values(source) for source in sources] == [
        [[0, 1, 2], [9, 10, 11]],
        [[3, 4, 5], [12, 0, 0]],
        [[6, 7, 8], [0, 0, 0]],
    ]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(numbers, law):
    law(
        lambda batch_size=4, **fields: LingvoInputAdaptor(
            input=numbers(14, batch=batch_size), cluster_do_eval=True, **fields
        )
    )


def test_text_of_ids_comes_from_the_native_tokenizer(native, tmp_path):
    from lingvo.tasks.lm import input_generator

    path = tmp_path / "lines"
    path.write_text("hello world\nanother line\n")
    params = input_generator.LmInput.Params().Set(
        file_pattern=f"text:{path}",
        file_random_seed=0,
        repeat_count=1,
        bucket_upper_bound=[20],
        bucket_batch_limit=[2],
        target_max_length=20,
    )
    source = LingvoInputAdaptor(input=params, cluster_do_eval=True)
    batch = source.get_next()
    lengths = (1 - batch.paddings).sum(axis=1).astype(np.int32)
    assert source.ids_to_strings(batch.labels, lengths - 1) == ["hello world", "another line"]
    with pytest.raises(StopIteration):
        source.get_next()


# States.


def test_random_records_have_no_exact_state(numbers, caplog):
    source = random_records(numbers)
    assert_raises(source.get_state, field="on_inexact_resume", value="refuse")
    assert source.peek().num.shape == (2,)
    lenient = random_records(numbers, on_inexact_resume="new_order")
    laws.take(lenient, 3)
    state = json.loads(json.dumps(lenient.get_state()))
    assert state["position"]["num_batches"] == 3
    fresh = random_records(numbers, on_inexact_resume="new_order")
    with caplog.at_level(logging.WARNING, "layerkit.inputs"):
        fresh.set_state(state)
    assert "resumes in a new random order; records may repeat." in caplog.text
    assert fresh.get_state() == state
    assert len(laws.take(fresh, 3)) == 3
    assert_raises(lambda: source.set_state({**state}), field="on_inexact_resume")


# Arguments and files that would abort or hang.


@pytest.mark.parametrize(
    ("params", "fields", "field"),
    [
        ({}, {}, "repeat_count"),
        ({"repeat_count": -1}, {"cluster_do_eval": True}, "cluster_do_eval"),
        ({"repeat_count": 0}, {"cluster_do_eval": True}, "repeat_count"),
        ({"file_pattern": "tfrecord:/no/such"}, {"cluster_do_eval": True}, "file_pattern"),
        ({"file_pattern": "/no/such"}, {"cluster_do_eval": True}, "file_pattern"),
        ({"file_buffer_size": 0, "repeat_count": -1}, {"is_training": True}, "file_buffer_size"),
    ],
)
def test_arguments_that_would_abort_raise(numbers, params, fields, field):
    source = LingvoInputAdaptor(input=numbers(4, **params), **fields)
    assert_raises(source.get_next, owner="LingvoInputAdaptor", field=field)


def test_unsupported_dtype_raises(numbers, native):
    source = LingvoInputAdaptor(
        input=numbers(4, number_type=native.tf.float64), cluster_do_eval=True
    )
    assert_raises(source.get_next, field="dtypes", value=["float64"])


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_damaged_record_raises_with_file_and_number(numbers, damage):
    params = numbers(5)
    path = params.file_pattern.removeprefix("tfrecord:")
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        if damage == "truncated":
            data = data[:-3]
        else:
            data[-18] ^= 1
        file.seek(0)
        file.truncate()
        file.write(data)
    source = LingvoInputAdaptor(input=params, cluster_do_eval=True)
    with pytest.raises(ValueError, match=rf"^LingvoInputAdaptor: {re.escape(path)}, record 4: "):
        source.get_next()


def test_file_without_records_raises(numbers, write_records):
    path = write_records([], "none")
    params = numbers(1, file_pattern=f"tfrecord:{path}")
    source = LingvoInputAdaptor(input=params, cluster_do_eval=True)
    assert_raises(source.get_next, field="file_pattern")
