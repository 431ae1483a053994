"""Checkpoints of Paxml, restored and trained on, equal what Paxml trained itself."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from layerkit_runner.init_from import plan_first_state

# (recorded checkpoint, stack of the run, number of layers)
CASES = [
    ("stacked_zarr", "stacked", 2),
    ("stacked_ocdbt", "stacked", 2),
    ("unstacked_flax", "unstacked", 2),
    ("pipelined_zarr", "pipelined", 4),
]


@pytest.mark.parametrize(("case", "stack", "num_layers"), CASES)
def test_training_continues_with_the_losses_of_paxml(
    pax: Any, case: str, stack: str, num_layers: int
):
    folder = str(pax.folder / case)
    losses = pax.train(stack, num_layers=num_layers, folder=folder, **pax.whole_state)
    np.testing.assert_allclose(losses[0], pax.losses[case][0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(losses, pax.losses[case], rtol=0, atol=1e-4)


def test_weights_alone_give_the_first_loss_and_then_others(pax: Any):
    losses = pax.train("stacked", folder=str(pax.folder / "stacked_zarr"))
    expected = pax.losses["stacked_zarr"]
    np.testing.assert_allclose(losses[0], expected[0], rtol=0, atol=2e-6)
    assert max(np.abs(np.subtract(losses, expected))) > 1e-2


@pytest.mark.parametrize(
    ("case", "stack"), [("unstacked_flax", "stacked"), ("stacked_zarr", "unstacked")]
)
def test_optimizer_state_moves_between_stacked_and_separate_layers(pax: Any, case: str, stack: str):
    losses = pax.train(stack, folder=str(pax.folder / case), **pax.whole_state)
    np.testing.assert_allclose(losses, pax.losses[case], rtol=0, atol=1e-4)


def test_each_format_restores_onto_a_sharded_mesh(pax: Any):
    for case in ("stacked_zarr", "stacked_ocdbt"):
        partitioner, task = pax.run_of(
            "stacked", mesh=(1, 2, 2), folder=str(pax.folder / case), **pax.whole_state
        )
        first = plan_first_state(partitioner, task)()
        assert first.step == pax.step
        alone, same = pax.run_of("stacked", folder=str(pax.folder / case), **pax.whole_state)
        expected = plan_first_state(alone, same)().state
        weight = first.state.params["lm"]["stack"]["repeat"]["sub"]["feed_forward"]["up"]["w"]
        assert weight.addressable_shards[0].data.size == weight.size // 4
        for found, right in zip(
            jax.tree.leaves(first.state), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(found, right)
