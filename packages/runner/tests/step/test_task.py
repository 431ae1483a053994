"""SingleTask: its steps against values computed by hand, on the Regression of conftest.py.

With w = (1, 1) and one row x = (2, 1), y = 0 of weight 1: prediction 3, loss ½·9 = 4.5, gradient
3·x = (6, 3).
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base.weights import logical_axes
from layerkit.config import Partial, build
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import Linear
from layerkit_runner.optim.learner import Learner
from layerkit_runner.step.metrics import GLOBAL_BATCH
from layerkit_runner.step.train_hparams import TrainHParams


def rows(x, y=None, weights=None) -> NestedMap:
    x = jnp.asarray(x, jnp.float32)
    zeros, ones = jnp.zeros(len(x)), jnp.ones(len(x))
    return NestedMap(
        x=x,
        y=zeros if y is None else jnp.asarray(y, jnp.float32),
        weights=ones if weights is None else jnp.asarray(weights, jnp.float32),
    )


ONE_ROW = rows([[2, 1]])


def started(config):
    task = config.Instantiate()
    return task, task.init_state(jax.random.key(0))


def weights_of(state) -> np.ndarray:
    return np.asarray(state.params["linear"]["w"])[:, 0]


def test_initial_state_has_weights_optimizer_state_and_step_zero(tiny: SimpleNamespace):
    momentum = {"optimizer": Partial(optax.sgd, momentum=0.9)}
    task = tiny.task_config(counts=True, learner=momentum).Instantiate()
    boxed, state = task.init_boxed_state(jax.random.key(0))
    assert logical_axes(boxed["params"]) == {"linear": {"w": ("embed", "mlp")}}
    assert logical_axes(boxed["non_trainable"]) == {"counter": {"sum": ()}}
    assert jax.tree.map(jnp.shape, state.opt_state)[0].trace == {"linear": {"w": (2, 1)}}
    assert state.step.dtype == jnp.int32
    assert int(state.step) == 0
    np.testing.assert_array_equal(weights_of(state), [1.0, 1.0])
    assert float(state.non_trainable["counter"]["sum"]) == 0.0


def test_step_of_gradient_descent_equals_its_formula(tiny: SimpleNamespace):
    task, state = started(tiny.task_config())
    state, (metrics, scalars) = task.train_step(state, ONE_ROW, GLOBAL_BATCH)
    np.testing.assert_allclose(weights_of(state), [1 - 6, 1 - 3])
    assert int(state.step) == 1
    assert (float(metrics["loss"].value), float(metrics["loss"].weight)) == (4.5, 1.0)
    assert float(scalars["learning/raw_grad_norm"]) == pytest.approx(np.hypot(6, 3))
    assert float(scalars["learning/lr"]) == 1.0
    assert float(scalars["summaries/mean_prediction"]) == 3.0
    assert "aux_loss" not in scalars


class Loaded(Linear):
    def fprop(self, x):
        for part in range(2):
            self.add_summary(f"load/{part}", jnp.float32(part))
        return super().fprop(x)


def test_parts_of_a_layer_summary_are_separate_scalars(tiny: SimpleNamespace):
    task, state = started(tiny.task_config(linear_tpl=Loaded.HParams.config()))
    _, (_, scalars) = task.train_step(state, ONE_ROW, GLOBAL_BATCH)
    assert [float(scalars[f"summaries/linear/load/{part}"]) for part in range(2)] == [0.0, 1.0]


def test_rows_count_by_their_weight(tiny: SimpleNamespace):
    task, state = started(tiny.task_config())
    # Losses 4.5 and 0.5 with weights 1 and 3; the third row has none.
    batch = rows([[2, 1], [1, 0], [9, 9]], weights=[1, 3, 0])
    state, (metrics, _) = task.train_step(state, batch, GLOBAL_BATCH)
    assert float(metrics["loss"].value) == (4.5 + 3 * 0.5) / 4
    np.testing.assert_allclose(weights_of(state), [1 - (6 + 3) / 4, 1 - 3 / 4])


def test_auxiliary_losses_are_trained_on_and_reported(tiny: SimpleNamespace):
    task, state = started(tiny.task_config(aux=0.5))
    after, (metrics, scalars) = task.train_step(state, ONE_ROW, GLOBAL_BATCH)
    # 0.5·3² = 4.5 more, and its gradient 3·x once more.
    assert (float(metrics["loss"].value), float(scalars["aux_loss"])) == (9.0, 4.5)
    np.testing.assert_allclose(weights_of(after), [1 - 12, 1 - 6])
    assert float(task.eval_step(state, ONE_ROW, GLOBAL_BATCH)[0]["loss"].value) == 9.0


def test_non_trainables_change_in_training_only(tiny: SimpleNamespace):
    task, state = started(tiny.task_config(counts=True))
    for _ in range(3):
        task.eval_step(state, ONE_ROW, GLOBAL_BATCH)
        state, _ = task.train_step(state, ONE_ROW, GLOBAL_BATCH)
    assert float(state.non_trainable["counter"]["sum"]) == 6.0


def test_training_is_random_by_step_and_evaluation_is_not(tiny: SimpleNamespace):
    batch = rows(np.ones((64, 2)))
    task, state = started(tiny.task_config(dropout_rate=0.5))

    def loss_at(step: int) -> float:
        at_step = state.replace(step=jnp.int32(step))
        return float(task.train_step(at_step, batch, GLOBAL_BATCH)[1][0]["loss"].value)

    assert loss_at(3) == loss_at(3)
    assert len({loss_at(step) for step in range(4)}) > 1
    # Without dropout every prediction is 2.
    assert float(task.eval_step(state, batch, GLOBAL_BATCH)[0]["loss"].value) == 2.0
    other, _ = started(tiny.task_config(dropout_rate=0.5, train={"random_seed": 7}))
    assert float(other.train_step(state, batch, GLOBAL_BATCH)[1][0]["loss"].value) != loss_at(0)


def test_decoding_is_random_by_step_and_batch(tiny: SimpleNamespace):
    class Noise(tiny.Regression):
        def decode(self, batch: NestedMap) -> NestedMap:
            return NestedMap(noise=jax.random.normal(self.next_prng_key(), batch.x.shape))

    task, state = started(tiny.task_config().set(model=Noise.HParams.config()))

    def noise(step: int, batch_index: int) -> float:
        at_step = state.replace(step=jnp.int32(step))
        index = jnp.int32(batch_index)
        outputs = task.decode_step(at_step, ONE_ROW, GLOBAL_BATCH, batch_index=index)
        return float(outputs.noise[0, 0])

    assert noise(3, 1) == noise(3, 1)
    assert len({noise(step, index) for step in range(3) for index in range(3)}) == 9


def test_decode_outputs_hold_prompt_lengths(tiny: SimpleNamespace):
    task, state = started(tiny.task_config())
    prompts = NestedMap(ids=jnp.array([[4, 4], [5, 0]]), prompt_lengths=jnp.array([2, 1]))
    outputs = task.decode_step(state, prompts, GLOBAL_BATCH, batch_index=jnp.int32(0))
    np.testing.assert_array_equal(outputs.prompt_lengths, [2, 1])
    np.testing.assert_array_equal(outputs.lengths, [5, 4])


def test_clipping_includes_the_auxiliary_gradient(tiny: SimpleNamespace):
    task, state = started(tiny.task_config(aux=0.5, learner={"clip_global_norm": 1.0}))
    after, _ = task.train_step(state, ONE_ROW, GLOBAL_BATCH)
    np.testing.assert_allclose(
        weights_of(after), 1 - np.array([12, 6]) / np.hypot(12, 6), rtol=1e-6
    )


def test_loss_that_the_model_does_not_report_is_an_error(tiny: SimpleNamespace, raises):
    task, state = started(tiny.task_config().set(loss_name="los"))
    with raises(ConfigError, field="task.loss_name", value="los", choices=("loss",)):
        task.train_step(state, ONE_ROW, GLOBAL_BATCH)


SGD = Learner(optimizer=optax.sgd, learning_rate=0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_train_steps", 0),
        ("random_seed", 2**63),
        ("prng_impl", "threefry"),
        ("save_best_to_keep", 3),  # without save_best_metric
        ("save_keep_interval_hours", 0.0),
        ("max_skipped_steps_fraction", 1.5),
    ],
)
def test_invalid_training_setting_is_an_error(
    tiny: SimpleNamespace, raises, field: str, value: Any
):
    with raises(ConfigError, owner="task.train", field=field, value=value):
        TrainHParams(learner=SGD, **{field: value})


def test_spikes_may_fill_half_of_their_window(raises):
    learner = dataclasses.replace(SGD, on_spike="skip", spike_window=8)
    TrainHParams(learner=learner, max_consecutive_skipped_steps=5)
    with raises(ConfigError, owner="task.train", field="max_consecutive_skipped_steps", value=4):
        TrainHParams(learner=learner, max_consecutive_skipped_steps=4)


def test_defaults_equal_those_of_pax():
    # From the HParams of Paxml's SingleTask.Train.
    of_pax = {
        "num_train_steps": 10_000_000,
        "save_interval_steps": 5000,
        "save_max_to_keep": 10,
        "eval_interval_steps": 100,
        "decode_interval_steps": None,
        "decode_start_after_n_steps": 0,
        "random_seed": 1234,
        "max_inflight_steps": 2,
        "variable_norm_summary": True,
    }
    ours = {field.name: field.default for field in dataclasses.fields(TrainHParams)}
    assert {name: ours[name] for name in of_pax} == of_pax
    assert Learner.HParams.config().on_nonfinite == "skip"


@pytest.mark.parametrize(
    ("steps", "field", "interval"),
    [(1, None, 1), (200, None, 2), (10_000, None, 100), (10**7, None, 100), (200, 100, 100)],
)
def test_short_run_reports_a_hundredth_of_its_steps(tiny, steps, field, interval):
    train = tiny.task_config().train.set(num_train_steps=steps, summary_interval_steps=field)
    assert build(train).steps_per_summary == interval
