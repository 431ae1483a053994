"""Weights that are frozen: chosen by pattern, without gradient or optimizer state, bits kept."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit.layers.linears import FeedForward
from layerkit.nested_map import NestedMap
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.weight_patterns import TrainedWeights
from layerkit_runner.training.flops import forward_flops
from layerkit_runner.training.metrics import GLOBAL_BATCH

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
def test_the_trained_part_is_taken_and_put_back(choice: TrainedWeights):
    trained = choice.select(PARAMS)
    assert jax.tree.map(np.shape, trained) == jax.tree.map(np.shape, NORM)
    whole = choice.merge(PARAMS, jax.tree.map(lambda leaf: leaf + 1, trained))
    assert jax.tree.structure(whole) == jax.tree.structure(PARAMS)
    np.testing.assert_array_equal(whole["lm"]["norm"]["scale"], [3.0, 3.0])
    assert whole["lm"]["embedding"]["w"] is PARAMS["lm"]["embedding"]["w"]


def test_by_default_all_are_trained():
    assert TrainedWeights().select(PARAMS) is PARAMS


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"frozen": ("lm/embeding/w",)},
            "Learner.frozen: 'lm/embeding/w' matches no weight; did you mean 'lm/embedding/w'? A"
            " pattern has to match the whole path. Weights: lm/embedding/w, lm/norm/scale.",
        ),
        ({"frozen": ("lm",)}, "Learner.frozen: 'lm' matches no weight"),
        ({"trainable": (".*/w", ".*/lora_a")}, "Learner.trainable: '.*/lora_a' matches no weight"),
        ({"frozen": (".*",)}, "Learner.frozen: no weight is left to train"),
        ({"trainable": ()}, "Learner.trainable: no weight is left to train"),
        (
            {"frozen": ("(",)},
            "Learner.frozen[0]: '(' is not a regular expression: missing ), unterminated subpattern"
            " at position 0",
        ),
        (
            {"trainable": ("a",), "frozen": ("b",)},
            "Learner: set trainable or frozen, not both (('a',) and ('b',))",
        ),
    ],
)
def test_wrong_patterns_are_refused(fields: dict, text: str):
    with pytest.raises(UsageError) as caught:
        adamw(**fields).init(PARAMS)
    assert text in str(caught.value)


def test_frozen_weights_have_no_optimizer_state_and_no_decay():
    learner = adamw(frozen=("lm/embedding/.*",))
    state = learner.init(PARAMS)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert sorted(shapes) == [(), (2,), (2,)]  # a counter and two moments
    update = learner.update(NORM, state, PARAMS, step=jnp.int32(0))
    params, scalars = update.params, update.scalars
    np.testing.assert_array_equal(params["lm"]["embedding"]["w"], PARAMS["lm"]["embedding"]["w"])
    assert float(params["lm"]["norm"]["scale"][0]) < 2.0
    # The norm is that of the gradients that there are.
    assert float(scalars["learning/raw_grad_norm"]) == pytest.approx(np.sqrt(8.0))


def test_no_gradient_is_computed_for_frozen_weights(tiny: SimpleNamespace):
    """What is left of the backward pass has fewer products."""

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
    # Towards the weights of the first layer nothing is computed, nor towards its outputs.
    assert products(frozen=("deep/.*",)) == deep + 2 * last
    assert products(trainable=("deep/linear/w",)) == 2 * deep + 2 * last


def test_what_a_model_keeps_as_it_is_cannot_be_trained(tiny: SimpleNamespace):
    class WithReference(tiny.Regression):
        @property
        def frozen_weights(self) -> tuple[str, ...]:
            return ("linear/.*",)

    config = tiny.task_config()
    config.model = WithReference.HParams.config()
    message = "Learner: linear/w is trained, but the model keeps linear/.* as it is; set frozen="
    with pytest.raises(UsageError, match=re.escape(message)):
        config.Instantiate().init_state(jax.random.key(0))
    choice = TrainedWeights(frozen=("linear/.*",))
    choice.validate_frozen(("linear/.*",), {"linear": {"w": 1}, "other": {"w": 2}})
