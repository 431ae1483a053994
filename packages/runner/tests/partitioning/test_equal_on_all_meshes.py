"""One training step gives the same numbers on one device, on every mesh, and under pmap.

Gradients are compared themselves: an adaptive optimizer would hide one that is too large by the
number of devices. Rows have unequal weights and one shard none at all, which a mean of means over
devices gets wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap


@pytest.fixture(scope="session")
def reference(arrangements: Any) -> Any:
    task = arrangements.sgd_task(arrangements.language_model())
    alone = arrangements.start(arrangements.one_device)
    return arrangements.run_step(task, alone, arrangements.unequal_batch())


def test_loss_and_gradients_equal_those_of_one_device(
    arrangements: Any, shape: Any, reference: Any
):
    task = arrangements.sgd_task(arrangements.language_model())
    step = arrangements.run_step(task, arrangements.start(shape), arrangements.unequal_batch())
    arrangements.assert_same_step(step, reference)


def test_reference_loss_and_gradient_norm(arrangements: Any, reference: Any):
    """The reported norm is that of the gradients, and weights are what the batch says."""
    squares = sum(np.sum(np.square(g.astype(np.float64))) for g in reference.gradients.values())
    assert reference.scalars["learning/raw_grad_norm"] == pytest.approx(np.sqrt(squares), rel=1e-4)
    assert reference.scalars["learning/raw_grad_norm"] > 0.5
    total = float(arrangements.unequal_batch().weights.sum())
    assert reference.metrics["loss"][1] == pytest.approx(total, rel=1e-6)
    assert all(np.abs(gradient).max() > 1e-4 for gradient in reference.gradients.values())


def auxiliary_step(arrangements: Any, shape: Any, **learner: Any) -> Any:
    rng = np.random.default_rng(1)
    weights = np.array([1, 2, 0, 1, 0.5, 3, 1, 1], np.float32)
    batch = NestedMap(x=rng.normal(size=(8, 8)).astype(np.float32), weights=weights)
    task = arrangements.sgd_task(arrangements.Hidden.HParams.config(), **learner)
    return arrangements.run_step(task, arrangements.start(shape), batch)


@pytest.fixture(scope="module")
def alone(arrangements: Any) -> Any:
    return auxiliary_step(arrangements, arrangements.one_device)


def test_auxiliary_losses_equal_those_of_one_device(arrangements: Any, shape: Any, alone: Any):
    assert alone.scalars["aux_loss"] == pytest.approx(3 * alone.scalars["summaries/size"])
    assert alone.scalars["aux_loss"] > 0.1
    spread = auxiliary_step(arrangements, shape)
    arrangements.assert_same_step(spread, alone)


def test_clipping_uses_the_global_norm(arrangements: Any, shape: Any, alone: Any):
    norm = alone.scalars["learning/raw_grad_norm"]
    step = auxiliary_step(arrangements, shape, clip_global_norm=norm / 4)
    arrangements.assert_close(step.scalars["learning/raw_grad_norm"], norm)
    assert step.scalars["learning/grad_scale"] == pytest.approx(0.25, rel=1e-5)
    for name, gradient in alone.gradients.items():
        arrangements.assert_close(step.gradients[name], gradient / 4, name=name)


def test_dropout_masks_are_the_same_on_every_spmd_mesh(arrangements: Any, tiny: Any, shape: Any):
    rng = np.random.default_rng(2)
    batch = NestedMap(x=rng.normal(size=(8, 8)), y=np.zeros(8), weights=np.ones(8))
    batch = batch.transform(np.float32)

    def step(shape: Any) -> Any:
        config = tiny.Regression.HParams.config(dims=8, dropout_rate=0.3)
        config.linear_tpl.weight_axes = ("embed", None)
        task = arrangements.sgd_task(config)
        return arrangements.run_step(task, arrangements.start(shape), batch)

    alone = step(arrangements.one_device)
    assert alone.metrics["loss"] != alone.eval_metrics["loss"]
    spread = step(shape)
    if shape is None:  # not promised under pmap, where each shard draws numbers of its own
        arrangements.assert_close(spread.eval_metrics["loss"], alone.eval_metrics["loss"])
        assert abs(spread.metrics["loss"][0] - alone.metrics["loss"][0]) > 1e-3
    else:
        arrangements.assert_same_step(spread, alone)
