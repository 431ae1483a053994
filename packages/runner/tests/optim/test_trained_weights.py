"""Frozen weights: selection by patterns, no gradient, no optimizer state, unchanged bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from layerkit.config import Partial
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import FeedForward
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.weight_selection import TrainedWeights
from layerkit_runner.step.metrics import GLOBAL_BATCH
from layerkit_runner.step.step_cost import forward_flops

PARAMS = {"lm": {"embedding": {"w": jnp.ones(3)}, "norm": {"scale": jnp.full(2, 2.0)}}}
NORM = {"lm": {"norm": PARAMS["lm"]["norm"]}}


def adamw(**fields: Any) -> Learner:
    optimizer = Partial(optax.adamw, weight_decay=0.5)
    config = Learner.HParams.config(optimizer=optimizer, learning_rate=0.1, **fields)
    return config.Instantiate()


@pytest.mark.parametrize(
    "choice",
    [
        TrainedWeights(frozen=("lm/embedding/.*",)),
        TrainedWeights(trainable=(".*/scale",)),
        TrainedWeights(trainable=["lm/norm/scale", ".*/scale"]),
    ],
)
def test_merge_replaces_the_selected_weights(choice: TrainedWeights):
    trained = choice.select(PARAMS)
    assert jax.tree.map(np.shape, trained) == jax.tree.map(np.shape, NORM)
    whole = choice.merge(PARAMS, jax.tree.map(lambda leaf: leaf + 1, trained))
    assert jax.tree.structure(whole) == jax.tree.structure(PARAMS)
    np.testing.assert_array_equal(whole["lm"]["norm"]["scale"], [3.0, 3.0])
    assert whole["lm"]["embedding"]["w"] is PARAMS["lm"]["embedding"]["w"]


def test_all_weights_are_trained_by_default():
    assert TrainedWeights().select(PARAMS) is PARAMS


@pytest.mark.parametrize(
    ("field", "value", "fields"),
    [
        ("frozen", "lm/embeding/w", {"frozen": ("lm/embeding/w",)}),
        ("frozen", "lm", {"frozen": ("lm",)}),
        ("trainable", ".*/lora_a", {"trainable": (".*/lora_a",)}),
        ("frozen[0]", "(", {"frozen": ("(",)}),
        ("frozen", (".*",), {"frozen": (".*",)}),
        ("trainable", (), {"trainable": ()}),
        ("frozen", ("b",), {"trainable": ("a",), "frozen": ("b",)}),
    ],
)
def test_patterns_that_match_nothing_or_leave_nothing_are_an_error(
    raises, field: str, value: Any, fields: dict
):
    with raises(ConfigError, owner="Learner", field=field, value=value):
        adamw(**fields).init(PARAMS)


def test_frozen_weights_have_no_optimizer_state_and_no_decay():
    learner = adamw(frozen=("lm/embedding/.*",))
    state = learner.init(PARAMS)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert sorted(shapes) == [(), (2,), (2,)]  # a counter and two moments
    update = learner.update(NORM, state, PARAMS, step=jnp.int32(0))
    params, scalars = update.params, update.scalars
    np.testing.assert_array_equal(params["lm"]["embedding"]["w"], PARAMS["lm"]["embedding"]["w"])
    assert float(params["lm"]["norm"]["scale"][0]) < 2.0
    # The norm covers the gradients of the trained weights.
    assert float(scalars["learning/raw_grad_norm"]) == pytest.approx(np.sqrt(8.0))


def test_no_gradient_is_computed_for_frozen_weights(tiny: SimpleNamespace):
    """The backward pass has fewer products."""

    class Deep(tiny.Regression):
        def setup(self) -> None:
            super().setup()
            wide = FeedForward.HParams.config(input_dims=self.dims, output_dims=self.dims)
            self.create_child("deep", wide)

        def compute_predictions(self, batch: Any) -> jax.Array:
            return self.linear(self.deep(batch.x))[:, 0]

    def products(**fields: Any) -> float:
        config = tiny.task_config(learner=fields).set(model=Deep.HParams.config(dims=4))
        task = config.Instantiate()
        state = jax.eval_shape(task.init_state, jax.random.key(0))
        row = jax.ShapeDtypeStruct((5,), jnp.float32)
        x = jax.ShapeDtypeStruct((5, 4), jnp.float32)
        batch = NestedMap(x=x, y=row, weights=row)
        return forward_flops(lambda s, b: task.train_step(s, b, GLOBAL_BATCH), state, batch)

    deep, last = 2 * 5 * 4 * 4, 2 * 5 * 4
    assert products() == 2 * deep + 3 * last
    # No gradient is computed of the weights and outputs of the first layer.
    assert products(frozen=("deep/.*",)) == deep + 2 * last
    assert products(trainable=("deep/linear/w",)) == 2 * deep + 2 * last


@pytest.mark.parametrize("fields", [{}, {"trainable": [".*"]}, {"frozen": ["reference/.*"]}])
def test_weights_that_the_model_fixes_are_not_trained(tiny: Any, fields: dict[str, Any]):
    class WithReference(tiny.Regression):
        def setup(self) -> None:
            super().setup()
            self.create_child("reference", FeedForward.HParams.config(input_dims=2, output_dims=2))

        @property
        def frozen_weights(self) -> tuple[str, ...]:
            return ("reference/.*",)

    task = tiny.task_config(learner=fields).set(model=WithReference.HParams.config()).Instantiate()
    choice = task.train.learner.trained_weights
    params = jax.eval_shape(task.init_state, jax.random.key(0)).params
    assert set(params) == {"linear", "reference"}
    assert set(choice.select(params)) == {"linear"}
    old, new = ({name: {"mean": value} for name in params} for value in (0, 1))
    assert choice.keep_frozen(old, new) == {"linear": {"mean": 1}, "reference": {"mean": 0}}


INTEGERS = {
    "up": {"w": jnp.ones((2, 2), jnp.int4), "w_scale": jnp.ones((1, 2)), "b": jnp.ones(2)},
    "lora": {"lora_a": jnp.ones((2, 1))},
}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (TrainedWeights(), {"up/b", "lora/lora_a"}),
        (TrainedWeights(frozen=("up/b",)), {"lora/lora_a"}),
        (TrainedWeights(trainable=("lora/.*",)), {"lora/lora_a"}),
        (TrainedWeights(trainable=(".*/w_scale",)), {"up/w_scale"}),
    ],
)
def test_weights_in_integers_are_frozen(choice, names):
    trained = choice.select(INTEGERS)
    assert set(flatten_dict(trained, sep="/")) == names
    moved = choice.merge(INTEGERS, jax.tree.map(lambda leaf: leaf + 1, trained))
    before, after = (flatten_dict(tree, sep="/") for tree in (INTEGERS, moved))
    changed = {name for name in before if np.any(np.asarray(before[name] != after[name]))}
    assert (changed, after.keys()) == (names, before.keys())


def test_weights_in_integers_cannot_be_trained(raises):
    with raises(ConfigError, field="trainable", value=("up/.*",)):
        TrainedWeights(trainable=("up/.*",)).select(INTEGERS)
    with raises(ConfigError, field="trainable", value=None):
        TrainedWeights().require_floats(INTEGERS)
    TrainedWeights(trainable=("lora/.*",)).require_floats(INTEGERS)
