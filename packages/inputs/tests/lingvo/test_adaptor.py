"""LingvoInputAdaptor on real Lingvo inputs that read by tf.data."""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("lingvo")

from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.lingvo import LingvoInputAdaptor, LingvoInputAdaptorNewBatchSize, base_input
from layerkit_inputs.testing import laws


def params_of(generator, **arguments):
    params = generator.Params()
    params.args.Set(**arguments)
    return params


def values(source, most=100):
    return [batch.data.tolist() for batch in laws.take(source, most)]


def assert_raises(make, **data):
    with pytest.raises(ConfigError) as caught:
        make()
    assert {name: getattr(caught.value, name) for name in data} == data


# Batches.


def test_training_repeats_the_data(lingvo):
    source = LingvoInputAdaptor(input=params_of(lingvo.Count), is_training=True)
    batches = laws.take(source, 25)
    assert [int(batch.data[0]) for batch in batches] == [i % 10 for i in range(25)]
    assert all(batch.a.b == batch.data for batch in batches)
    assert all(batch.eval_sample_weights.tolist() == [1.0] for batch in batches)
    source.reset()
    assert source.get_next().data.tolist() == [0]


def test_training_ignores_cluster_do_eval(lingvo):
    params = params_of(lingvo.Count, num=2)
    source = LingvoInputAdaptor(input=params, is_training=True, cluster_do_eval=True)
    assert values(source, 5) == [[0], [1], [0], [1], [0]]


def test_an_evaluation_reads_one_epoch_and_starts_over(lingvo):
    source = LingvoInputAdaptor(input=params_of(lingvo.Count), cluster_do_eval=True)
    assert values(source) == [[i] for i in range(10)]
    assert [batch.data.tolist() for batch in source.eval_batches()] == [[i] for i in range(10)]


def test_num_batches_ends_an_epoch_after_that_many_batches(lingvo):
    source = LingvoInputAdaptor(input=params_of(lingvo.Count, batch=2), num_batches=4)
    assert values(source) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    source.reset()
    assert source.get_next().data.tolist() == [0, 1]


def test_endless_input_is_evaluated_by_a_number_of_batches(lingvo):
    source = LingvoInputAdaptor(input=params_of(lingvo.Count, num=5), eval_loop_num_batches=3)
    seen = [[int(batch.data[0]) for batch in source.eval_batches()] for _ in range(3)]
    assert seen == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_sharding_input_gives_each_host_its_share(lingvo):
    for host in range(3):
        source = LingvoInputAdaptor(
            input=params_of(lingvo.Sharded),
            is_training=True,
            num_infeed_hosts=3,
            infeed_host_index=host,
        )
        seen = [int(batch.data[0]) for batch in laws.take(source, 10)]
        assert {value % 3 for value in seen} == {host}


def test_incomplete_batch_is_padded(lingvo):
    source = LingvoInputAdaptor(input=params_of(lingvo.Count, num=5, batch=3), cluster_do_eval=True)
    first, last = laws.take(source)
    assert source.batch_size == 3
    assert first.eval_sample_weights.tolist() == [1, 1, 1]
    assert first.provenance.tolist() == [0, 1, 2]
    assert last.data.tolist() == [3, 4, 0]
    assert last.eval_sample_weights.tolist() == [1, 1, 0]
    assert last.provenance.tolist() == [3, 4, -1]


def test_full_batch_is_a_read_only_view(lingvo):
    source = LingvoInputAdaptor(input=params_of(lingvo.Count, num=5, batch=3), cluster_do_eval=True)
    whole, filled = source.get_next(), source.get_next()
    assert not whole.data.flags.writeable and filled.data.flags.writeable


def test_fields_of_strings_are_removed(lingvo):
    batch = LingvoInputAdaptor(input=params_of(lingvo.Count), is_training=True).get_next()
    assert sorted(batch) == ["a", "data", "eval_sample_weights"]


def test_a_subclass_may_change_batches(lingvo):
    class MyInput(base_input.LingvoInputAdaptor):
        def get_next(self):
            batch = super().get_next()
            batch.new_field = batch.data * 2
            return batch

    source = MyInput(input=params_of(lingvo.Count), is_training=True)
    assert source.peek().new_field.tolist() == [0]
    assert [batch.new_field.tolist() for batch in laws.take(source, 3)] == [[0], [2], [4]]


def test_smaller_batches_are_cut_from_larger_ones(lingvo):
    source = LingvoInputAdaptorNewBatchSize(
        input=params_of(lingvo.Count, num=6, batch=2), batch_size=1, cluster_do_eval=True
    )
    assert values(source) == [[i] for i in range(6)]
    source.reset()
    source.get_next()
    assert source.peek().data.tolist() == [1]


def test_a_short_batch_is_cut_and_filled(lingvo):
    source = LingvoInputAdaptorNewBatchSize(
        input=params_of(lingvo.Count, num=7, batch=4), batch_size=2, cluster_do_eval=True
    )
    assert values(source) == [[0, 1], [2, 3], [4, 5], [6, 0]]


def test_the_lingvo_params_are_copied(lingvo):
    params = lingvo.Sequences.Params().Set(file_pattern="nothing", file_random_seed=7)
    before = params.ToText()
    source = LingvoInputAdaptor(
        input=params,
        is_training=True,
        num_infeed_hosts=3,
        infeed_host_index=2,
        allow_fixed_file_random_seed=True,
    )
    assert params.ToText() == before
    assert source.input_inst.params.file_random_seed == 9
    source.reset()
    assert source.input_inst.params.file_random_seed == 9


# The laws of inputs.


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"shuffle": 8}, {"is_training": True}),
        ({"num": 14}, {"cluster_do_eval": True}),
        pytest.param({"num": 14}, {"eval_loop_num_batches": 2}, marks=pytest.mark.slow),
    ],
    ids=["training", "epoch", "rolling"],
)
def test_reader_obeys_the_laws_of_inputs(lingvo, law, arguments, fields):
    def make(batch_size=4, **more):
        params = params_of(lingvo.Count, batch=batch_size, **arguments)
        return LingvoInputAdaptor(input=params, **fields, **more)

    law(make)


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_laws_of_new_batch_size(lingvo, law):
    def make(**more):
        params = params_of(lingvo.Count, num=27, batch=12)
        fields = {"batch_size": 4, "cluster_do_eval": True, **more}
        return LingvoInputAdaptorNewBatchSize(input=params, **fields)

    law(make)


# States.


def shuffled(lingvo, **fields):
    params = params_of(lingvo.Count, num=50, shuffle=50)
    return LingvoInputAdaptor(input=params, is_training=True, **fields)


def test_shuffles_are_the_same_in_another_process(lingvo):
    program = (
        "import sys; from layerkit_inputs.lingvo import LingvoInputAdaptor, prepare\n"
        "tf = prepare(); from lingvo.core import base_input_generator\n"
        "Count = base_input_generator.DefineTFDataInput('Count', lambda: "
        "tf.data.Dataset.range(50).shuffle(50).batch(1).map(lambda i: {'data': i}))\n"
        "source = LingvoInputAdaptor(input=Count.Params(), is_training=True)\n"
        "print([int(source.get_next().data[0]) for _ in range(60)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    here = [int(batch.data[0]) for batch in laws.take(shuffled(lingvo), 60)]
    assert json.loads(done.stdout) == here
    assert here[:50] != sorted(here[:50])
    assert sorted(here[:50]) == list(range(50))


def test_seed_and_host_change_the_order_and_the_programs_own_seed_does_not(lingvo):
    tf = lingvo.tf
    fields = [{}, {"input_random_seed": 1}, {"num_infeed_hosts": 2, "infeed_host_index": 1}]
    orders = [values(shuffled(lingvo, **more), 50) for more in fields]
    assert len({str(order) for order in orders}) == 3
    tf.random.set_seed(5)
    drawn = [float(tf.random.uniform([])) for _ in range(2)]
    tf.random.set_seed(5)
    first = float(tf.random.uniform([]))
    assert values(shuffled(lingvo), 50) == orders[0]
    assert [first, float(tf.random.uniform([]))] == drawn


def test_state_of_other_data_raises(lingvo):
    def make(num):
        return LingvoInputAdaptor(input=params_of(lingvo.Count, num=num), cluster_do_eval=True)

    source = make(10)
    laws.take(source, 6)
    state = source.get_state()
    assert len(json.dumps(state)) < 200
    other = make(4)
    assert_raises(lambda: other.set_state(state), field="on_inexact_resume", value="refuse")
    assert values(other) == [[0], [1], [2], [3]]


def test_irreproducible_stream_raises_or_resumes_in_a_new_order(lingvo, caplog):
    def make(**fields):
        return LingvoInputAdaptor(input=params_of(lingvo.Unrepeatable), is_training=True, **fields)

    source = make()
    laws.take(source, 3)
    state = source.get_state()
    assert_raises(lambda: make().set_state(state), field="on_inexact_resume", value="refuse")
    lenient = make(on_inexact_resume="new_order")
    with caplog.at_level(logging.WARNING, "layerkit.inputs"):
        lenient.set_state(state)
    assert "reads other batches than before; records may repeat." in caplog.text
    assert len(laws.take(lenient, 3)) == 3


# Sequences in buckets, the other way to read by tf.data.


def test_sequences_are_read_in_order(lingvo, tmp_path):
    path = tmp_path / "lines"
    path.write_text("".join(f"{i} {i}\n" for i in range(40)))
    params = lingvo.Sequences.Params().Set(
        file_pattern=str(path), file_random_seed=0, bucket_upper_bound=[4], bucket_batch_limit=[8]
    )
    source = LingvoInputAdaptor(input=params, num_batches=5, cluster_do_eval=True)
    assert source.batch_size == 8
    ids = np.concatenate([batch.ids for batch in laws.take(source)])
    np.testing.assert_array_equal(ids[:, 0], np.arange(40))
    assert ids.shape == (40, 4) and not ids[:, 2:].any()


# Errors.


def test_batch_size_is_that_of_the_params_or_required(lingvo):
    params = params_of(lingvo.Count)
    make = functools.partial(LingvoInputAdaptor, input=params, batch_size=2)
    assert_raises(make, field="batch_size", value=2)
    assert_raises(lambda: LingvoInputAdaptorNewBatchSize(input=params, is_training=True))


def test_batches_that_cannot_be_split_raise(lingvo):
    params = params_of(lingvo.Count, batch=9)
    source = LingvoInputAdaptorNewBatchSize(input=params, batch_size=2, is_training=True)
    assert_raises(source.get_next, field="batch_size", value=2)


def test_fixed_file_random_seed_raises_unless_allowed(lingvo):
    params = lingvo.Sequences.Params()
    make = functools.partial(LingvoInputAdaptor, input=params, is_training=True)
    assert_raises(make, field="input.file_random_seed", value=301)


def test_endless_input_raises_for_an_epoch(lingvo):
    source = LingvoInputAdaptor(input=params_of(lingvo.Count))
    assert_raises(source.get_next, field="cluster_do_eval", value=False)


def test_damaged_file_raises_an_error_of_one_line(lingvo, write_records):
    path = write_records([b"1", b"2", b"3"])
    path.write_bytes(path.read_bytes()[:-2])
    params = params_of(lingvo.TfRecords, path=str(path))
    source = LingvoInputAdaptor(input=params, cluster_do_eval=True)
    with pytest.raises(BadRecordError, match="TfRecords failed at its batch 2: ") as caught:
        laws.take(source)
    assert "\n" not in str(caught.value)
