"""Statistics of spikes, compared with NumPy, and the steps that a learner takes by them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.config import Partial
from layerkit_runner.optim.learner import Learner

PARAMS = {"w": jnp.ones(2)}
WINDOW = 16


def learner(**fields: Any) -> Learner:
    fields = {"on_spike": "skip", "spike_window": WINDOW, **fields}
    return Learner.HParams.config(
        optimizer=Partial(optax.sgd), learning_rate=0.1, **fields
    ).Instantiate()


def run(ours: Learner, losses: Any, norms: Any) -> tuple[list[float], list[Any]]:
    """Return (`learning/is_valid_step` of each step, weights after each)."""

    @jax.jit
    def step(state: Any, loss: jax.Array, norm: jax.Array) -> Any:
        (params, opt_state, spikes), grads = state, {"w": jnp.array([1.0, 0.0]) * norm}
        new = ours.update(grads, opt_state, params, step=jnp.int32(0), loss=loss, spikes=spikes)
        return (new.params, new.opt_state, new.spikes), new.scalars["learning/is_valid_step"]

    state, valid, weights = (PARAMS, ours.init(PARAMS), ours.init_spikes()), [], []
    for loss, norm in zip(np.float32(losses), np.float32(norms), strict=True):
        state, is_valid = step(state, loss, norm)
        valid.append(float(is_valid))
        weights.append(np.asarray(state[0]["w"]))
    return valid, weights


def reference(losses: Any, norms: Any, deviations: float) -> list[float]:
    """Apply the rule of OLMo-core, one-sided and without skipped values, in float64."""
    past: list[tuple[float, float]] = []
    valid, in_a_row = [], 0
    for values in zip(losses, norms, strict=True):
        window, is_spike, is_finite = np.array(past[-WINDOW:]), False, np.isfinite(values).all()
        if len(past) >= WINDOW // 2:
            mean, deviation = window.mean(axis=0), window.std(axis=0, ddof=1)
            limit = mean + deviations * np.maximum(deviation, 1e-3 * abs(mean))
            is_spike = is_finite and np.any(values > limit)
        valid.append(float(is_finite and not is_spike))
        in_a_row = 0 if valid[-1] else in_a_row + is_spike
        past += [values] * bool(valid[-1])
        if in_a_row == WINDOW // 2:
            past, in_a_row = [], 0
    return valid


@pytest.mark.parametrize("deviations", [2.0, 6.0])
def test_spikes_equal_numpy(deviations: float):
    draw = np.random.default_rng(0)
    losses = 3 * np.exp(-np.arange(200) / 80) + draw.normal(0, 0.05, 200)
    norms = draw.lognormal(0, 0.3, 200)
    losses[[3, 40, 90, 91]] += 5  # The window of step 3 is not half full.
    norms[[60, 120]] *= 40
    losses[[55, 130]] = np.nan
    losses[150:] += 100  # A level that lasts is accepted after half a window of skipped steps.
    valid, weights = run(learner(spike_deviations=deviations), losses, norms)
    assert valid == reference(losses, norms, deviations)
    assert not any(valid[n] for n in (40, 55, 60, 90, 91, 120, 130, *range(150, 158)))
    assert valid[3] and all(valid[158:166])
    if deviations == 6.0:
        assert sum(valid) == 200 - 7 - 8
    for before, after, is_valid in zip(weights, weights[1:], valid[1:], strict=False):
        assert np.array_equal(before, after) == (not is_valid)


def test_constant_loss_and_falling_loss_have_no_spikes():
    for losses in (np.full(60, 0.1), np.where(np.arange(60) < 40, 2.0, 0.01)):
        assert all(run(learner(), losses, np.full(60, 0.3))[0])
