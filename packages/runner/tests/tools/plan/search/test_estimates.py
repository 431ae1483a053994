from __future__ import annotations

import jax
import pytest

from layerkit_runner.tools.plan.plan import BatchPlan
from layerkit_runner.tools.plan.search import changes
from layerkit_runner.tools.plan.search.forecast import Forecast, abstract_batch


@pytest.fixture(scope="module")
def forecast(small, plan_for, devices):
    return Forecast(small, plan_for(small), devices)


def state_bytes(plan):
    return plan.memory.weights + plan.memory.optimizer


def test_the_state_is_exact(forecast):
    assert forecast.estimate({}).state_bytes == state_bytes(forecast.plan)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [[8, 1, 1], [1, 8, 1], [2, 4, 1]])
def test_the_state_is_exact_on_other_meshes(forecast, plan_for, mesh):
    wanted = {changes.ICI_MESH: mesh}
    plan = plan_for(changes.changed(forecast.resolved, wanted))
    assert forecast.estimate(wanted).state_bytes == state_bytes(plan)


def test_a_peak_that_was_compiled_is_met(forecast):
    assert forecast.peak({}) == forecast.plan.memory.peak


@pytest.mark.slow
def test_policies_keep_less_and_less(forecast):
    kept = [
        forecast.estimate({changes.REMAT: name}).kept_bytes
        for name in ("none", "dots", "projections", "attention_out", "full")
    ]
    assert kept == sorted(kept, reverse=True)
    # The inputs of three layers, 8 rows of 8 positions of 16 floats, over 4 devices, and the
    # logits and hidden states of the loss besides.
    inputs = 3 * 8 * 8 * 16 * 4 // 4
    assert inputs <= kept[-1] < 4 * inputs < kept[0]


def test_each_change_takes_less(forecast):
    now = forecast.peak({})
    for wanted in (
        {changes.ICI_MESH: [1, 8, 1]},
        {changes.ROWS: 0.5},
        {changes.FIRST_MOMENT: "bfloat16"},
        {changes.ROWS: 0.5, changes.ICI_MESH: [1, 4, 2]},
    ):
        assert forecast.peak(wanted) < now, wanted


def test_what_a_mesh_does_not_divide_has_no_estimate(forecast):
    # Two heads over four devices; two rows over four.
    assert forecast.peak({changes.ICI_MESH: [1, 2, 4]}) is None
    assert forecast.peak({changes.ROWS: 1 / 4}) is None


def test_traffic_of_meshes(forecast):
    def sent(mesh):
        return forecast.estimate({changes.ICI_MESH: mesh}).sent_bytes

    assert set(sent([8, 1, 1])) == {"data"}
    assert set(sent([1, 8, 1])) == {"fsdp"}
    assert set(sent([1, 4, 2])) == {"fsdp", "tensor"}
    # Each gradient once, as an all-reduce sends it.
    size = 4 * forecast.plan.num_params
    assert sent([8, 1, 1])["data"] == pytest.approx(2 * size * 7 / 8)


def test_meshes_that_take_less(forecast):
    meshes = [sizes for _, sizes in forecast.smaller_meshes(3)]
    assert {"data": 1, "fsdp": 8, "tensor": 1} in meshes
    assert {"data": 2, "fsdp": 2, "tensor": 2} not in meshes


def test_the_batch_of_a_plan_as_shapes():
    batch = BatchPlan(4, 1, 4, ["data"], 8, 32, {"ids": "int32[4, 8]", "inner.x": "bfloat16[4]"})
    found = abstract_batch(batch)
    assert found.ids == jax.ShapeDtypeStruct((4, 8), "int32")
    assert found.inner.x == jax.ShapeDtypeStruct((4,), "bfloat16")
