from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import signal
import sys
import threading

import numpy as np
import pytest

from layerkit.config import Partial
from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.grain.iter_input import GrainIterInput
from layerkit_inputs.testing import laws

grain = pytest.importorskip("grain")
cloudpickle = pytest.importorskip("cloudpickle")
# Worker processes cannot import a test module by its name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_ROWS = 41


def plain(number):
    return {"x": np.array([number, -number], np.int32), "deep": {"y": np.float32(number)}}


def no_threads(rows):
    return rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def numbers_of_host(*, host_index, num_hosts, seed, num_rows=NUM_ROWS):
    order = np.random.default_rng(seed).permutation(num_rows)
    return grain.MapDataset.source(order[host_index::num_hosts].tolist())


def short(*, num_rows, **of_host):
    return no_threads(numbers_of_host(num_rows=num_rows, **of_host).map(plain))


def forty(**of_host):
    return short(num_rows=40, **of_host)


def many(**of_host):
    return short(num_rows=10_000, **of_host)


def filtered(**of_host):
    rows = no_threads(numbers_of_host(**of_host).map(plain))
    rows = rows.filter(lambda row: row["x"][0] % 5 != 0)
    return grain.experimental.WindowShuffleIterDataset(rows, window_size=16, seed=of_host["seed"])


def packed(**of_host):
    """Documents of unlike lengths, packed first fit into rows of 16."""
    documents = numbers_of_host(**of_host).map(
        lambda n: {"ids": np.full(1 + n % 13, n + 1, np.int32)}
    )
    return grain.experimental.FirstFitPackIterDataset(
        no_threads(documents), length_struct={"ids": 16}, num_packing_bins=4
    ).map(lambda row: {"ids": row["ids"], "segments": row["ids_segment_ids"]})


def reader(**fields):
    return GrainIterInput(**{"batch_size": 4, "dataset": filtered, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset": forty},
        {"is_training": True, "input_random_seed": 2},
        {"dataset": packed, "is_training": True},
        {"dataset": packed, "eval_loop_num_batches": 2},
    ],
    ids=["one epoch", "filtered training", "packed training", "packed rolling"],
)
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, fields):
    law(lambda **more: reader(**{**fields, **more}))


def evaluate_together(hosts):
    """Return the batches of each host, which run in threads that exchange values."""
    values = [None] * len(hosts)
    barrier = threading.Barrier(len(hosts))

    def run(index):
        def all_gather(value):
            values[index] = json.dumps(value)
            barrier.wait(30)
            gathered = [json.loads(text) for text in values]
            barrier.wait(30)
            return gathered

        return list(hosts[index].eval_batches(all_gather))

    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(run, range(len(hosts))))


def on_hosts(count, **fields):
    return [
        reader(infeed_host_index=host, num_infeed_hosts=count, **fields) for host in range(count)
    ]


def one_host_has_all(*, host_index, num_hosts, seed):
    rows = grain.MapDataset.range(9 if host_index == 0 else 0).map(plain)
    return no_threads(rows)


def test_host_without_rows_makes_batches_of_padding(raises):
    shares = evaluate_together(on_hosts(3, dataset=one_host_has_all))
    assert [len(share) for share in shares] == [3, 3, 3]
    for empty in shares[1:]:
        assert all((batch.provenance == -1).all() and not batch.x.any() for batch in empty)
    with raises(ConfigError, owner="GrainIterInput"):
        on_hosts(2, dataset=one_host_has_all, is_training=True)[1].get_next()


def test_training_epochs_have_different_orders_and_batches_span_epochs():
    source = reader(is_training=True, batch_size=16)
    numbers = np.concatenate([source.get_next().x[:, 0] for _ in range(4)])
    first, second = numbers[:32], numbers[32:]
    assert sorted(first) == sorted(second) == [n for n in range(NUM_ROWS) if n % 5]
    assert first.tolist() != second.tolist()
    other = reader(is_training=True, batch_size=32, input_random_seed=1).get_next().x[:, 0]
    assert other.tolist() != first.tolist()


def test_states_fit_only_the_same_host_and_fields(raises):
    state = reader().get_state()
    with pytest.raises(ValueError):
        on_hosts(2)[0].set_state(state)
    with raises(ConfigError, value={"num_workers": 0, "seed": 0, "worker_buffer_size": None}):
        reader(num_workers=3, input_random_seed=4).set_state(state)


def some_bad(*, host_index, num_hosts, seed):
    def read(number):
        if number % 4 == 1:
            return BadRecordError(f"file.bin, record {number}: broken.")
        return {"x": "text"} if number == 6 else {"x": np.int32(number)}

    return no_threads(grain.MapDataset.range(10).map(read))


def test_bad_records_raise_or_are_counted(raises):
    with raises(BadRecordError, problem="file.bin, record 1: broken."):
        reader(dataset=some_bad).get_next()
    source = reader(dataset=some_bad, on_bad_record="skip", batch_size=3)
    batches = list(source.eval_batches())
    assert [batch.x.tolist() for batch in batches] == [[0, 2, 3], [4, 7, 8]]
    assert [batch.provenance.tolist() for batch in batches] == [[0, 2, 3], [4, 7, 8]]
    assert source.num_skipped == 4
    assert source._bad.first[0] == "host 0, epoch 0, record 1: file.bin, record 1: broken."
    assert "row 6: dtype of x='<U4'" in source._bad.first[2]


def all_bad(*, host_index, num_hosts, seed):
    return grain.MapDataset.range(3).map(lambda number: {"x": "text"}).to_iter_dataset()


def test_training_raises_if_no_row_can_be_read(raises):
    source = reader(dataset=all_bad, on_bad_record="skip", is_training=True)
    with raises(ConfigError, owner=source._label):
        source.get_next()


def raising(*, host_index, num_hosts, seed):
    def read(number):
        if number == 6:
            raise KeyError("gone")
        return {"x": number}

    return no_threads(grain.MapDataset.range(10).map(read))


def test_pipeline_error_has_a_note_with_the_row():
    source = reader(dataset=raising)
    source.get_next()
    with pytest.raises(KeyError, match="gone") as caught:
        source.get_next()
    assert "In GrainIterInput, row 6 of epoch 0." in caught.value.__notes__


@pytest.mark.parametrize(
    ("dataset", "value"),
    [(lambda **host: grain.MapDataset.range(3), "RangeMapDataset"), (lambda **host: [1], "list")],
    ids=["map", "list"],
)
def test_iter_input_raises_for_other_data_sets(raises, dataset, value):
    with raises(ConfigError, owner="GrainIterInput", field="dataset", value=value):
        reader(dataset=dataset).get_next()


def test_config_holds_the_function_with_its_arguments():
    config = GrainIterInput.HParams.config(dataset=Partial(short, num_rows=3), batch_size=4)
    assert config.Instantiate().get_next().provenance.tolist() == [0, 1, 2, -1]


@pytest.mark.slow
@pytest.mark.parametrize("buffer_size", [2, 4])
def test_workers_read_every_row_once_and_resume(buffer_size):
    fields = {"num_workers": 2, "batch_size": 5, "worker_buffer_size": buffer_size}
    source = reader(**fields)
    batches = laws.take(source, 3)
    state = json.loads(json.dumps(source.get_state()))
    rest = list(laws.take(source, 99))
    numbers = np.concatenate([batch.x[batch.provenance >= 0, 0] for batch in [*batches, *rest]])
    assert sorted(numbers) == [n for n in range(NUM_ROWS) if n % 5]
    fresh = reader(**fields)
    fresh.set_state(state)
    laws.assert_same_batches(laws.take(fresh, 99), rest)
    source.close()
    fresh.close()


@pytest.mark.slow
def test_killed_worker_raises_instead_of_hanging():
    source = reader(dataset=many, num_workers=2, worker_buffer_size=1)
    source.get_next()
    (child, *_) = multiprocessing.active_children()
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"epoch 0: a worker process was terminated"):
        laws.take(source, 1000)
    source.close()
