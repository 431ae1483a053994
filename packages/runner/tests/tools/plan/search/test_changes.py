from __future__ import annotations

import dataclasses

import pytest

from layerkit.config import copy_config
from layerkit.layers.pipelined_transformer import PipelinedTransformer
from layerkit_runner.config.resolve import resolve
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.search import changes


def test_usual_fields_are_taken_where_an_experiment_has_them(tunable_lm):
    before = resolve(tunable_lm(NUM_LAYERS=2))
    after = changes.changed(
        before,
        {changes.REMAT: "full", changes.ICI_MESH: [1, 4, 2], changes.ROWS: 0.5},
    )
    assert changes.new_flags(before, after) == [
        "--fdl.CHECKPOINT_POLICY=full",
        "--fdl.ICI_MESH_SHAPE=[1,4,2]",
        "--fdl.PERCORE_BATCH_SIZE=0.5",
    ]
    assert after.task.model.lm_tpl.stack_tpl.remat == "full"
    assert after.partitioner.ici_mesh_shape == [1, 4, 2]
    assert after.datasets[0].percore_batch_size == 0.5
    assert changes.overriding_flags(after)[0] == "--fdl.NUM_LAYERS=2"


def test_paths_are_taken_elsewhere(small_lm):
    before = resolve(small_lm())
    after = changes.changed(
        before,
        {
            changes.ICI_MESH: [1, 4, 2],
            changes.REMAT: "dots",
            changes.ACCUMULATION: 4,
            changes.SOFTMAX_CHUNK: 2,
            changes.FIRST_MOMENT: "bfloat16",
        },
    )
    assert changes.new_flags(before, after) == [
        "--fdl.partitioner.ici_mesh_shape=[1,4,2]",
        "--fdl.task.model.lm_tpl.stack_tpl.remat=dots",
        "--fdl.task.train.gradient_accumulation_steps=4",
        "--fdl.task.model.lm_tpl.softmax_tpl.chunk_size=2",
        "--fdl.task.train.learner.optimizer.mu_dtype=bfloat16",
    ]
    assert list(after.partitioner.ici_mesh_shape) == [1, 4, 2]


def test_flags_make_the_same_experiment(tunable_lm, resolve_flags):
    wanted = {changes.ICI_MESH: [1, 8, 1], changes.ACCUMULATION: 2, changes.REMAT: "full"}
    after = changes.changed(resolve(tunable_lm()), wanted)
    again = resolve_flags(changes.overriding_flags(after))
    assert changes.overriding_flags(again) == changes.overriding_flags(after)
    assert again.task == after.task
    assert again.partitioner == after.partitioner


def test_a_path_that_was_set_by_hand_is_set_again(resolve_flags):
    before = resolve_flags(["--fdl.partitioner.ici_mesh_shape=[2,2,2]"])
    after = changes.changed(before, {changes.ICI_MESH: [1, 8, 1]})
    assert changes.overriding_flags(after) == ["--fdl.partitioner.ici_mesh_shape=[1,8,1]"]
    assert list(after.partitioner.ici_mesh_shape) == [1, 8, 1]


def test_a_field_that_does_something_else_is_not_taken(small_lm):
    class Otherwise(small_lm):
        SOFTMAX_CHUNK_SIZE: int = 3

    after = changes.changed(resolve(Otherwise()), {changes.SOFTMAX_CHUNK: 4})
    assert after.task.model.lm_tpl.softmax_tpl.chunk_size == 4
    assert changes.overriding_flags(after) == ["--fdl.task.model.lm_tpl.softmax_tpl.chunk_size=4"]


def test_what_an_experiment_does_not_have(small_lm):
    resolved = resolve(small_lm(USE_PMAP=True))
    assert not changes.can_change(resolved, changes.ICI_MESH)
    assert changes.can_change(resolved, changes.ROWS)
    assert changes.current(resolved, changes.ICI_MESH) is None
    with pytest.raises(UsageError, match="SmallLm has no ICI_MESH_SHAPE that could be changed"):
        changes.changed(resolved, {changes.ICI_MESH: [1, 8, 1]})


def test_the_policy_of_a_pipeline_is_that_of_its_stages(small):
    resolved = dataclasses.replace(small, task=copy_config(small.task))
    lm = resolved.task.model.lm_tpl
    lm.stack_tpl = PipelinedTransformer.HParams.config(layer_tpl=lm.stack_tpl.layer_tpl)
    assert changes.current(resolved, changes.REMAT) == "full"
    lm.stack_tpl.stage_remat = "projections"
    assert changes.current(resolved, changes.REMAT) == "projections"
