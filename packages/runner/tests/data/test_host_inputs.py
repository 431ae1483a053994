"""make_input: batch sizes per device and per host, and the rows that each process feeds."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_inputs import IndexedInput
from layerkit_inputs.base.prefetch import Prefetch
from layerkit_runner.data.host_inputs import (
    HostTopology,
    dataset_name,
    example_batch,
    feed_plan,
    make_input,
    peek_batch,
)
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import Partitioner, PmapPartitioner, SpmdPartitioner


def started(shape: list[int] | None) -> Partitioner:
    """On eight devices; None for pmap."""
    partitioner = PmapPartitioner() if shape is None else SpmdPartitioner(ici_mesh_shape=shape)
    partitioner.start()
    return partitioner


@pytest.mark.parametrize(
    ("shape", "fields", "rows"),
    [
        ([8, 1, 1], {"percore_batch_size": 2.0}, 16),
        (None, {"percore_batch_size": 2.0}, 16),
        ([2, 2, 2], {"percore_batch_size": 0.5}, 4),
        ([1, 1, 8], {"percore_batch_size": 0.125}, 1),
        ([1, 1, 8], {"percore_batch_size": 0.375}, 3),
        ([8, 1, 1], {"percore_batch_size": 1.0000000000000002}, 8),  # (0.1 + 0.2) / 0.3
        ([4, 2, 1], {"batch_size": 8}, 8),
    ],
)
def test_batch_has_rows_per_device_or_per_host(
    tiny: SimpleNamespace, shape, fields: dict[str, Any], rows: int
):
    config = tiny.Points.HParams.config(**fields)
    dataset = make_input(config, started(shape))
    assert (dataset.global_batch_size, dataset.local_batch_size) == (rows, rows)
    assert dataset.get_next().x.shape == (rows, 2)
    assert config.batch_size == fields.get("batch_size")  # The config is unchanged.


def of_own_size(tiny: SimpleNamespace) -> type:
    """A reader whose batches are made by something with a size of its own, as Lingvo's are."""

    class OwnSize(tiny.Points):
        rows: int = 8

        @classmethod
        def get_batch_size(cls, config):
            return config.rows

        def __post_init__(self):
            assert self.batch_size is None
            self.batch_size = self.rows
            super().__post_init__()

    return OwnSize


def test_input_class_may_define_the_batch_size(tiny: SimpleNamespace):
    dataset = make_input(of_own_size(tiny).HParams.config(rows=16), started([4, 2, 1]))
    assert dataset.global_batch_size == 16


def test_own_batch_size_must_fit_hosts_that_share_rows(raises, tiny: SimpleNamespace):
    host = HostTopology(process_index=0, num_processes=2, process_of=lambda device: device.id // 4)
    config = of_own_size(tiny).HParams.config(name="own")
    with raises(UsageError, owner="own", value=8):
        make_input(config, started([1, 1, 8]), host)


@pytest.mark.parametrize(
    ("fields", "data"),
    [
        ({}, {"field": "batch_size", "value": None}),
        ({"batch_size": 8, "percore_batch_size": 1.0}, {"field": "batch_size", "value": 8}),
        ({"percore_batch_size": 0.3}, {"field": "percore_batch_size", "value": 0.3}),
        # The mesh does not divide the rows.
        ({"percore_batch_size": 0.25}, {"value": 0.25}),
        ({"percore_batch_size": 0.0}, {"value": 0}),
    ],
)
def test_wrong_batch_size_raises(
    tiny: SimpleNamespace, raises, fields: dict[str, Any], data: dict[str, Any]
):
    config = tiny.Points.HParams.config(name="train", **fields)
    with raises(UsageError, owner="train", **data):
        make_input(config, started([2, 2, 2]))


class Failing(IndexedInput):
    error: Any = None

    def _num_rows(self) -> int:
        return 8

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        raise self.error


@pytest.mark.parametrize("name", ["web", None])
def test_value_error_of_a_custom_input_names_it_and_the_line(name: str | None, monkeypatch: Any):
    monkeypatch.chdir(Path(__file__).parent)
    dataset = Failing(batch_size=4, name=name, error=ValueError("no such shape."))
    line = Failing._read_rows.__code__.co_firstlineno + 1
    with pytest.raises(UsageError) as caught:
        peek_batch(dataset)
    label = "Failing 'web'" if name else "Failing"
    assert str(caught.value) == f"{label}: test_host_inputs.py:{line}: no such shape."


def test_other_error_of_a_custom_input_keeps_its_traceback_and_names_the_input():
    dataset = Failing(batch_size=4, name="web", error=IndexError("7"))
    ahead = Prefetch(source=dataset)
    with contextlib.closing(ahead), pytest.raises(IndexError) as caught:
        peek_batch(ahead)
    assert caught.value.__notes__ == ["In input Failing 'web'"]


def test_padded_batch_must_fit_the_mesh_in_evaluation_only(tiny: SimpleNamespace, raises):
    fields = {"name": "dev", "percore_batch_size": 1.0, "batch_padding_size": 1}
    with raises(UsageError, owner="dev", field="batch_padding_size", value=1):
        make_input(tiny.Points.HParams.config(**fields), started([2, 2, 2]))
    fits = tiny.Points.HParams.config(**fields | {"batch_padding_size": 4})
    assert make_input(fits, started([2, 2, 2])).get_next_padded().x.shape == (12, 2)
    # Training reads batches without padding.
    training = tiny.Points.HParams.config(**fields, is_training=True)
    assert make_input(training, started([2, 2, 2])).get_next().x.shape == (8, 2)


def test_example_batch_reads_data_only_without_blank_batch(raises, tiny: SimpleNamespace):
    class NotHere(tiny.Points):
        @classmethod
        def blank_batch(cls, config, rows):
            return NestedMap(x=np.zeros((rows, 2), np.float32))

        def __post_init__(self):
            raise FileNotFoundError("the data are not here")

    fields = {"percore_batch_size": 0.5, "is_training": True}
    for cls in (NotHere, tiny.Points):
        batch = example_batch(cls.HParams.config(**fields), started([2, 2, 2]))
        assert batch.x.shape == (4, 2)
    assert set(batch) == {"x", "y", "weights"}
    with raises(UsageError, problem="the data are not here"):
        make_input(NotHere.HParams.config(**fields), started([2, 2, 2]))


def test_one_process_feeds_all_rows_once():
    plan = feed_plan(4, started([2, 2, 2]))
    assert (plan.num_infeed_hosts, plan.batch_size, plan.infeed_host_index(0)) == (1, 4, 0)


def test_batch_on_the_devices_equals_the_host_batch(tiny: SimpleNamespace):
    partitioner = started([2, 2, 2])
    dataset = make_input(tiny.Points.HParams.config(percore_batch_size=1.0), partitioner)
    batch = dataset.get_next()
    placed = partitioner.put_batch(batch)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), batch, placed))
    abstract = partitioner.abstract_batch(batch)
    assert {n: (a.shape, a.dtype, a.sharding) for n, a in placed.items()} == {
        n: (a.shape, a.dtype, a.sharding) for n, a in abstract.items()
    }
    # Rows over data × fsdp: each device holds 2 of 8.
    assert {shard.data.shape for shard in placed.x.addressable_shards} == {(2, 2)}


def test_name_of_a_data_set_defaults_to_its_class(tiny: SimpleNamespace):
    assert dataset_name(tiny.Points.HParams.config()) == "Points"
    assert dataset_name(tiny.Points.HParams.config(name="dev")) == "dev"
