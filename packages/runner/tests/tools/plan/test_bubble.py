from __future__ import annotations

import jax
import pytest

from layerkit.config import Config, assigned_fields
from layerkit.layers.pipeline_schedule import PipelineSchedule
from layerkit.layers.pipelined_transformer import PipelinedTransformer
from layerkit_runner.config.resolve import resolve
from layerkit_runner.data.infeed import make_input
from layerkit_runner.tools.plan.bounds import pipeline_plans
from layerkit_runner.trainer.job import build_parts
from layerkit_runner.training.flops import program_flops
from layerkit_runner.training.step_flops import model_flops_per_step


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
def test_the_pipeline_of_a_task(small_lm, fields, microbatches, repeats):
    resolved = pipelined(resolve(small_lm(NUM_LAYERS=4)), **fields)
    (found,) = pipeline_plans(resolved.task, rows=32)
    assert (found.num_stages, found.num_microbatches) == (fields["num_stages"], microbatches)
    assert (found.circular_repeats, found.rows_per_microbatch) == (repeats, 32 // microbatches)
    # A stage works in as many ticks as it has pieces; in all others it idles.
    schedule = PipelineSchedule(fields["num_stages"], microbatches, repeats)
    ticks = schedule.ticks_of_work()
    assert found.num_ticks == ticks.max() + 1
    working = {len(set(ticks[..., stage].ravel())) for stage in range(fields["num_stages"])}
    assert working == {microbatches * repeats}
    assert found.bubble_fraction == pytest.approx(1 - microbatches * repeats / found.num_ticks)


def test_a_task_without_one(small_lm):
    assert pipeline_plans(resolve(small_lm()).task, rows=32) == []


def test_model_flops_are_those_of_the_layers_alone(small_lm):
    def model_flops(resolved):
        partitioner, _ = build_parts(resolved)
        partitioner.start()
        batch = make_input(resolved.datasets[0], partitioner).peek()
        return model_flops_per_step(resolved.task, batch, rows=8)

    experiment = small_lm(NUM_LAYERS=4, USE_PMAP=True)
    plain = resolve(experiment)
    staged: Config = pipelined(resolve(experiment), num_stages=2, num_microbatches=4)
    assert model_flops(staged) == model_flops(plain) > 0


@pytest.mark.slow
def test_what_is_computed_in_bubbles_is_among_the_flops_of_a_step(small_lm):
    resolved = pipelined(
        resolve(small_lm(NUM_LAYERS=4, MESH=[1, 2, 1], PERCORE_BATCH_SIZE=4)),
        num_stages=2,
        num_microbatches=4,
        stage_remat="none",
    )
    partitioner, task = build_parts(resolved)
    partitioner.start(jax.devices("cpu")[:2])
    partitioner.bind(task)
    batch = partitioner.abstract_batch(make_input(resolved.datasets[0], partitioner).peek())
    step = partitioner.train_step_fn(task).trace(partitioner.abstract_state(task), batch)
    tokens = 8 * 8
    layer = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 8 * 16 / 2
    # Four microbatches take five ticks of both stages; the softmax is in no stage.
    assert program_flops(step.jaxpr) == 3 * tokens * (4 * layer * 5 / 4 + 2 * 16 * 32)
