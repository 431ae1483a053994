"""Feeds: which process reads which rows, derived from meshes laid out by hand; specs of batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs import ArraySpec, SyntheticInput
from layerkit_inputs.base.host_batches import Feed, plan_feeds, spec_of


def rows_of_mesh(data: int, model: int, global_batch: int, devices_per_process: int):
    """Devices numbered row by row on a (data, model) mesh, the batch split over `data`."""
    rows_by_process: dict[int, list[slice]] = {}
    per_shard = global_batch // data
    for device in range(data * model):
        shard = device // model
        rows = slice(shard * per_shard, (shard + 1) * per_shard)
        rows_by_process.setdefault(device // devices_per_process, []).append(rows)
    return rows_by_process


# Eight devices, two in each of four processes. A process spans 2 / model data shards, at least one;
# with one row a shard those are its rows, and the distinct ones are the feeds.
@pytest.mark.parametrize(
    ("data", "model", "num_feeds", "rows_each"),
    [(8, 1, 4, 2), (4, 2, 4, 1), (2, 4, 2, 1), (1, 8, 1, 1)],
)
@pytest.mark.parametrize("rows_per_shard", [1, 3])
def test_fractional_batch_per_core_over_four_processes(
    data, model, num_feeds, rows_each, rows_per_shard
):
    plan = plan_feeds(rows_of_mesh(data, model, data * rows_per_shard, devices_per_process=2))
    assert plan.num_infeed_hosts == num_feeds
    assert plan.batch_size == rows_each * rows_per_shard
    for process in range(4):
        assert plan.infeed_host_index(process) == process * num_feeds // 4


def test_processes_that_hold_the_same_rows_share_a_feed():
    plan = plan_feeds({0: [(0, 2)], 1: [(0, 2), (0, 2)], 2: [(2, 4)], 3: [(3, 4), (2, 3)]})
    assert plan.feeds == (
        Feed(rows=((0, 2),), processes=(0, 1)),
        Feed(rows=((2, 4),), processes=(2, 3)),
    )


@given(
    data=st.sampled_from([1, 2, 4, 8]),
    model=st.sampled_from([1, 2, 4]),
    rows_per_shard=st.integers(1, 3),
    processes=st.sampled_from([1, 2, 4, 8]),
)
def test_feeds_cover_the_batch_once_and_each_process_gets_its_rows(
    data, model, rows_per_shard, processes
):
    if processes > data * model:
        return
    rows_by_process = rows_of_mesh(
        data, model, data * rows_per_shard, devices_per_process=data * model // processes
    )
    plan = plan_feeds(rows_by_process)
    covered = [row for feed in plan.feeds for bounds in feed.rows for row in range(*bounds)]
    assert covered == list(range(data * rows_per_shard))
    for process, slices in rows_by_process.items():
        held = set(np.concatenate([np.arange(s.start, s.stop) for s in slices]).tolist())
        feed = plan.feeds[plan.infeed_host_index(process)]
        assert {row for bounds in feed.rows for row in range(*bounds)} == held


@pytest.mark.parametrize(
    "rows_by_process",
    [{0: [(0, 2)], 1: [(3, 4)]}, {0: [(0, 2)], 1: [(0, 2), (2, 4)], 2: [(2, 4)]}],
    ids=["gap", "overlap"],
)
def test_rows_that_do_not_form_feeds_raise(raises, rows_by_process):
    with raises(ConfigError, field="rows of each feed"):
        plan_feeds(rows_by_process)


def test_specs_show_dtypes_and_shapes():
    specs = spec_of(SyntheticInput(batch_size=2, seq_length=8, is_training=True).get_next())
    assert specs.ids == ArraySpec((2, 8), np.dtype("int32"))
    assert str(specs.weights) == "float32[2, 8]"
