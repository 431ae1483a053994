from __future__ import annotations

import dataclasses

import jax
import pytest

from layerkit.config import Config, assigned_fields
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.ops.pipeline_schedule import PipelineSchedule
from layerkit_runner.config.requests import Override
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve
from layerkit_runner.step.step_cost import model_flops_per_step, program_flops
from layerkit_runner.tools.plan.bounds import (
    DeviceWork,
    device_work,
    layer_flops,
    narrow_products,
    pipeline_plans,
    step_bounds,
)
from layerkit_runner.tools.plan.collectives import Traffic
from layerkit_runner.tools.plan.hardware import device_kind
from layerkit_runner.tools.plan.memory import Memory

H100 = device_kind("h100")
PEAK = 989.4e12
# 40 % of the peak would do the work in a second.
MODEL_FLOPS = 0.4 * PEAK

LAYERS = {"lm/stack": {"forward": 0.25, "backward": 0.75}}
MEMORY = Memory(
    weights=100,
    non_trainable=0,
    averages=0,
    optimizer=200,
    batch=10,
    temporaries=1000,
    outputs=305,
    donated=300,
    arguments=310,
    peak=1315,
)


def bounds(*, compute=0.0, memory=0.0, fast=0.0, slow=0.0, device=H100):
    """Return the bounds of work that takes these seconds on an H100."""
    work = DeviceWork(
        flops=compute * PEAK,
        memory_bytes=memory * 3350e9,
        fast_bytes=fast * 450e9,
        slow_bytes=slow * 50e9,
    )
    return step_bounds(work, device, model_flops_per_device=MODEL_FLOPS, tokens=1200)


@pytest.mark.parametrize(
    ("seconds", "limited_by", "step", "no_overlap"),
    [
        ({"compute": 0.5, "memory": 0.25, "fast": 0.125, "slow": 0.0}, "compute", 0.5, 0.625),
        ({"compute": 0.5, "memory": 1.0, "fast": 0.125, "slow": 0.25}, "memory", 1.0, 1.375),
        ({"compute": 0.5, "memory": 0.25, "fast": 2.0, "slow": 0.25}, "fast network", 2.0, 2.75),
        ({"compute": 0.5, "memory": 0.25, "fast": 1.0, "slow": 4.0}, "slow network", 4.0, 5.5),
    ],
)
def test_step_time_is_bounded_by_the_slowest_resource(seconds, limited_by, step, no_overlap):
    result = bounds(**seconds)
    assert result.limited_by == limited_by
    assert result.step_seconds == pytest.approx(step)
    assert result.step_seconds_no_overlap == pytest.approx(no_overlap)
    assert result.tokens_per_sec == pytest.approx(1200 / step)
    assert result.tokens_per_sec_no_overlap == pytest.approx(1200 / no_overlap)
    assert result.mfu == pytest.approx(0.4 / step)
    assert result.mfu_no_overlap == pytest.approx(0.4 / no_overlap)


def test_unknown_device_figures_leave_times_none():
    result = bounds(compute=0.5, slow=1, device=device_kind("cpu"))
    figures = dataclasses.asdict(result)
    del figures["work"]
    # Nothing is sent within the slice, nor moved in memory, which takes no time anywhere.
    assert {name for name, value in figures.items() if value is not None} == {
        "memory_seconds",
        "fast_network_seconds",
    }


def test_memory_bytes_of_a_step():
    # Arguments read, outputs written, weights read twice more; temporaries written and read.
    assert device_work(MEMORY, [], LAYERS).memory_bytes == 310 + 305 + 200 + 2000
    received = [Traffic("all-gather", "fsdp", 1, 3000, is_exact=True)]
    assert device_work(MEMORY, received, LAYERS).memory_bytes == 310 + 305 + 200 + 6000
    # Frozen weights are read twice, and are a result that is not written.
    frozen = dataclasses.replace(MEMORY, frozen_weights=40)
    assert device_work(frozen, [], LAYERS).memory_bytes == 310 + 305 - 40 + 2 * 60 + 40 + 2000


def test_products_of_narrow_dtypes_count_by_their_time():
    products = {
        ("jvp(LM)/lm/up", "float8"): 8.0,
        ("jvp(LM)/lm/up", "bfloat16"): 2.0,
        ("down", ""): 6.0,
    }
    layers = layer_flops(products, device_kind("h100"), num_devices=2)
    assert layers["lm/up"]["forward"] == 8 / 2 / 2 + 2 / 2
    assert layers["down"]["forward"] == 6 / 2
    # Trillium has no faster products of float8.
    assert layer_flops(products, device_kind("v6e"), num_devices=2)["lm/up"]["forward"] == 10 / 2
    assert not [*narrow_products(products, device_kind("v6e"))]
    (note,) = narrow_products(products, device_kind("h100"))
    assert "50%" in note and "float8" in note


def test_sent_bytes_are_split_by_network():
    sent = [
        Traffic("all-gather", "fsdp", 3, 700, is_exact=True, bytes_slow=200),
        Traffic("all-reduce", "data", 1, 50, is_exact=True, bytes_slow=50),
        Traffic("all-reduce", "tensor", 1, 30, is_exact=True),
    ]
    work = device_work(MEMORY, sent, LAYERS)
    assert (work.fast_bytes, work.slow_bytes) == (530, 250)
    assert step_bounds(work, H100, model_flops_per_device=1.0, tokens=None).tokens_per_sec is None


def traced_flops(resolved, *, rows):
    """Return the FLOPs of the whole step as it is traced for two devices, and of the model."""
    partitioner, task = build_parts(resolved)
    partitioner.start(jax.devices("cpu")[:2])
    partitioner.bind(task)
    batch = partitioner.abstract_batch(make_input(resolved.datasets[0], partitioner).peek())
    step = partitioner.train_step_fn(task).trace(partitioner.abstract_state(task), batch)
    state = partitioner.abstract_stored_state(task)
    return program_flops(step.jaxpr), model_flops_per_step(resolved.task, state, batch, rows=rows)


def flops(experiment, *, remat, parts=1):
    overrides = [
        Override("task.model.lm_tpl.stack_tpl.remat", remat),
        Override("task.train.gradient_accumulation_steps", str(parts)),
    ]
    resolved = resolve(experiment(NUM_LAYERS=2, MESH=[1, 2, 1], PERCORE_BATCH_SIZE=2), overrides)
    return traced_flops(resolved, rows=4)


def test_flops_of_a_traced_step_include_rematerialization(small_lm):
    tokens, layers = 4 * 8, 2
    # Per token and layer: attention projections, causal products, and the feed-forward.
    projections, products, feed_forward = 2 * 4 * 16 * 16, 2 * 2 * 8 * 16 / 2, 2 * 2 * 16 * 32
    layer = projections + products + feed_forward
    model = 3 * tokens * (layers * layer + 2 * 16 * 32)
    assert flops(small_lm, remat="none") == (model, model)
    # The result of a layer is not needed to compute_gradients it, so its last product is left out.
    again = tokens * layers * (layer - 2 * 32 * 16)
    assert flops(small_lm, remat="full") == (model + again, model)


@pytest.mark.slow
def test_accumulated_gradients_take_as_many_flops(small_lm):
    assert flops(small_lm, remat="full", parts=2) == flops(small_lm, remat="full")


def pipelined(resolved, **fields):
    """The experiment with its stack as a pipeline."""
    lm = resolved.task.model.lm_tpl
    layer = assigned_fields(lm.stack_tpl)["layer_tpl"]
    lm.stack_tpl = PipelinedTransformer.HParams.config(layer_tpl=layer, **fields)
    return resolved


@pytest.mark.parametrize(
    ("fields", "microbatches", "repeats"),
    [
        ({"num_stages": 2, "num_microbatches": 4}, 4, 1),
        ({"num_stages": 4, "microbatch_size": 4}, 8, 1),
        ({"num_stages": 2, "microbatch_size": 8, "circular_repeats": 2}, 4, 2),
    ],
)
def test_pipeline_plan_of_a_task(small_lm, fields, microbatches, repeats):
    resolved = pipelined(resolve(small_lm(NUM_LAYERS=4)), **fields)
    (result,) = pipeline_plans(resolved.task, rows=32)
    assert (result.num_stages, result.num_microbatches) == (fields["num_stages"], microbatches)
    assert (result.circular_repeats, result.rows_per_microbatch) == (repeats, 32 // microbatches)
    # A stage works in as many ticks as it has pieces; in all others it idles.
    schedule = PipelineSchedule(fields["num_stages"], microbatches, repeats)
    ticks = schedule.ticks_of_work()
    assert result.num_ticks == ticks.max() + 1
    working = {len(set(ticks[..., stage].ravel())) for stage in range(fields["num_stages"])}
    assert working == {microbatches * repeats}
    assert result.bubble_fraction == pytest.approx(1 - microbatches * repeats / result.num_ticks)


def test_model_flops_are_those_of_the_layers_alone(small_lm):
    def model_flops(resolved):
        partitioner, task = build_parts(resolved)
        partitioner.start()
        batch = make_input(resolved.datasets[0], partitioner).peek()
        state = partitioner.abstract_stored_state(task)
        return model_flops_per_step(resolved.task, state, batch, rows=8)

    experiment = small_lm(NUM_LAYERS=4, USE_PMAP=True)
    plain = resolve(experiment)
    assert pipeline_plans(plain.task, rows=32) == []
    staged: Config = pipelined(resolve(experiment), num_stages=2, num_microbatches=4)
    assert model_flops(staged) == model_flops(plain) > 0


@pytest.mark.slow
def test_flops_of_a_traced_step_include_bubbles(small_lm):
    resolved = pipelined(
        resolve(small_lm(NUM_LAYERS=4, MESH=[1, 2, 1], PERCORE_BATCH_SIZE=4)),
        num_stages=2,
        num_microbatches=4,
        stage_remat="none",
    )
    tokens = 8 * 8
    layer = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 8 * 16 / 2
    # Four microbatches take five ticks of both stages; the softmax is in no stage.
    step, _ = traced_flops(resolved, rows=8)
    assert step == 3 * tokens * (4 * layer * 5 / 4 + 2 * 16 * 32)
