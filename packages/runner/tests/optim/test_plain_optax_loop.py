"""Twenty steps of a task are twenty steps of a loop that anyone would write with Optax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.config import Config, Partial
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.linears import FeedForward
from layerkit_runner.step.metrics import GLOBAL_BATCH

STEPS, DIMS = 20, 4
SCHEDULE = Config(optax.warmup_cosine_decay_schedule, 0.0, 0.05, 5, STEPS)


@pytest.fixture(scope="module")
def network(tiny: SimpleNamespace) -> Any:
    """The config of a model with a hidden layer and its bias."""

    class Deep(tiny.Regression):
        def setup(self) -> None:
            super().setup()
            wide = FeedForward.HParams.config(input_dims=DIMS, output_dims=DIMS)
            self.create_child("deep", wide)

        def compute_predictions(self, batch: Any) -> jax.Array:
            return self.linear(self.deep(batch.x))[:, 0].astype(jnp.float32)

    return Deep.HParams.config(dims=DIMS)


def batches() -> list[NestedMap]:
    rng = np.random.default_rng(0)
    return [
        NestedMap(
            x=rng.normal(size=(8, DIMS)), y=rng.normal(size=8), weights=rng.uniform(size=8)
        ).transform(np.float32)
        for _ in range(STEPS)
    ]


def by_the_task(tiny: SimpleNamespace, model: Any, **learner: Any) -> tuple[Any, Any, list[float]]:
    """First weights, last state, losses."""
    task = tiny.task_config(learner=learner).set(model=model).Instantiate()
    first = state = jax.jit(task.init_state)(jax.random.key(0))
    step_fn = jax.jit(lambda s, b: task.train_step(s, b, GLOBAL_BATCH))
    losses = []
    for batch in batches():
        state, (metrics, _) = step_fn(state, batch)
        losses.append(float(metrics["loss"].value))
    return first.params, state, losses


def by_a_loop(model: Any, optimizer: Any, params: Any) -> tuple[Any, list[float]]:
    """Last weights, losses."""
    network = model.Instantiate()

    def loss_of(params: Any, batch: Any) -> jax.Array:
        metrics, _ = network.apply({"params": params}, batch)
        return metrics["loss"].value

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for batch in batches():
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, losses


def check_against_a_loop(
    tiny: SimpleNamespace, model: Any, by_hand: optax.GradientTransformation, **learner: Any
) -> None:
    first, state, losses = by_the_task(tiny, model, **learner)
    params, expected = by_a_loop(model, by_hand, first)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, params)


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (optax.adamw, {"weight_decay": 0.1}),
        (optax.adafactor, {"min_dim_size_to_factor": 2}),
        pytest.param(optax.sgd, {"momentum": 0.9, "nesterov": True}, marks=pytest.mark.slow),
        pytest.param(optax.lion, {}, marks=pytest.mark.slow),
    ],
)
def test_weights_and_losses_are_those_of_a_plain_loop(
    tiny: SimpleNamespace, network: Any, optimizer: Any, fields: dict[str, Any]
):
    learner = {"optimizer": Partial(optimizer, **fields), "clip_global_norm": 0.5}
    chain = optax.chain(optax.clip_by_global_norm(0.5), optimizer(SCHEDULE.Instantiate(), **fields))
    check_against_a_loop(tiny, network, chain, learning_rate=SCHEDULE, **learner)


def test_a_chain_with_its_own_rate(tiny: SimpleNamespace, network: Any):
    parts = [Config(optax.clip, 0.3), Config(optax.add_decayed_weights, 0.01)]
    chain = Config(optax.chain, *parts, Config(optax.rmsprop, 0.01))
    learner = {"optimizer": chain, "learning_rate": None}
    check_against_a_loop(tiny, network, chain.Instantiate(), **learner)


def test_bfloat16_computes_and_remembers_while_weights_stay_float32(
    tiny: SimpleNamespace, network: Any
):
    low = network.clone(fprop_dtype=jnp.bfloat16)
    fields = {"learning_rate": 0.05}
    optimizer = Partial(optax.adamw, mu_dtype=jnp.bfloat16)
    first, state, losses = by_the_task(tiny, low, optimizer=optimizer, **fields)
    moments = state.opt_state[0]
    kinds = {
        name: {leaf.dtype.name for leaf in jax.tree.leaves(tree)}
        for name, tree in (("params", state.params), ("mu", moments.mu), ("nu", moments.nu))
    }
    assert kinds == {"params": {"float32"}, "mu": {"bfloat16"}, "nu": {"float32"}}
    _, full, full_losses = by_the_task(tiny, network, optimizer=Partial(optax.adamw), **fields)
    np.testing.assert_allclose(losses, full_losses, rtol=0.15)
    assert losses != full_losses
    # Rounded to bfloat16, the weights would be other ones.
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), state.params)
    for kept, low_kept in zip(jax.tree.leaves(state.params), jax.tree.leaves(rounded), strict=True):
        assert np.any(kept != low_kept)
    moved = optax.tree.norm(optax.tree.sub(full.params, first))
    apart = optax.tree.norm(optax.tree.sub(full.params, state.params))
    assert float(apart) < 0.2 * float(moved)
