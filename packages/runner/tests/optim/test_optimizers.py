"""`adam_with_update_cap` against the formulas written out in NumPy; penalties of Lp norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.errors import ConfigError
from layerkit_runner.optim.optimizers import adam_with_update_cap, decays, lp_regularized


def numpy_adam(params, grads_by_step, *, rate, b1, b2, eps, weight_decay, cap):
    """Kingma and Ba's algorithm 1 per tensor, each update scaled to a root mean square of `cap`."""
    params = {name: value.astype(np.float64) for name, value in params.items()}
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for step, grads in enumerate(grads_by_step, start=1):
        for name, grad in grads.items():
            first[name] = b1 * first[name] + (1 - b1) * grad
            second[name] = b2 * second[name] + (1 - b2) * grad**2
            mean, square = first[name] / (1 - b1**step), second[name] / (1 - b2**step)
            update = mean / (np.sqrt(square) + eps)
            if cap is not None:
                update = update / max(1.0, np.sqrt(np.mean(update**2)) / cap)
            params[name] = params[name] - rate * (update + weight_decay * params[name])
    return params


@pytest.mark.parametrize("cap", [None, 1.0, 0.3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_update_equals_numpy(cap: float | None, weight_decay: float):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    # After many small gradients a large one makes an update whose RMS passes 1.
    grads = [
        {name: (size * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}
        for size in [*([0.01] * 40), 10.0, 10.0]
    ]
    settings = {"b1": 0.5, "b2": 0.99, "eps": 1e-6, "weight_decay": weight_decay}
    optimizer = adam_with_update_cap(0.05, update_rms_cap=cap, **settings)
    ours, state = params, optimizer.init(params)
    for step_grads in grads:
        updates, state = optimizer.update(step_grads, state, ours)
        ours = optax.apply_updates(ours, updates)
    references = {c: numpy_adam(params, grads, rate=0.05, cap=c, **settings) for c in (cap, None)}
    for name, value in ours.items():
        np.testing.assert_allclose(value, references[cap][name], rtol=2e-5, atol=2e-6)
        is_capped = np.max(np.abs(references[cap][name] - references[None][name])) > 1e-3
        assert is_capped == (cap is not None)


def test_schedule_counts_steps_from_zero():
    optimizer = adam_with_update_cap(lambda step: 0.1 * step, update_rms_cap=None)
    params = {"w": np.ones(2, np.float32)}
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params)
    np.testing.assert_array_equal(updates["w"], 0.0)
    updates, state = optimizer.update(params, state, params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("b1", 1.0), ("b2", np.nan), ("eps", -1e-6), ("weight_decay", np.inf), ("update_rms_cap", 0)],
)
def test_number_out_of_range_is_an_error(raises, field: str, value: float):
    with raises(ConfigError, field=field):
        adam_with_update_cap(0.1, **{field: value})


@pytest.mark.parametrize("mask", [None, decays], ids=["all", "matrices"])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_lp_regularizer_equals_a_penalty_in_the_loss(norm: str, mask: Any):
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 3), "b": (3,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    grads = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    adam = partial(optax.adam, b1=0.5)
    fields: dict[str, Any] = {f"{norm}_regularizer_weight": 0.1, "mask": mask}

    def loss(params: Any) -> jax.Array:
        total = sum(jnp.sum(grads[name] * params[name]) for name in params)
        for name, w in params.items():
            if mask is None or name == "w":
                total += 0.1 * jnp.sum(jnp.abs(w) if norm == "l1" else 0.5 * jnp.square(w))
        return total

    ours, expected = params, params
    optimizer, plain = lp_regularized(0.05, optimizer=adam, **fields), adam(0.05)
    state, plain_state = optimizer.init(params), plain.init(params)
    for _ in range(3):
        updates, state = optimizer.update(grads, state, ours)
        ours = optax.apply_updates(ours, updates)
        updates, plain_state = plain.update(jax.grad(loss)(expected), plain_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, expected)


@pytest.mark.parametrize("weights", [(0.0, 0.0), (0.1, 0.2)])
def test_lp_regularizer_with_none_or_both_norms_raises(raises: Any, weights: tuple[float, float]):
    first, second = weights
    with raises(ConfigError, owner="lp_regularized", field="l1_regularizer_weight", value=first):
        lp_regularized(
            0.1, optimizer=optax.sgd, l1_regularizer_weight=first, l2_regularizer_weight=second
        )
