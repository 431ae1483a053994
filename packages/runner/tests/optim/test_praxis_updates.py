"""Optimizers, regularizers, averages and loss aggregators against the numbers of Pax."""

from __future__ import annotations

import pathlib
import runpy
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from layerkit.base.base_model import WeightedScalar
from layerkit.config import Config, Partial
from layerkit.config.nested_map import NestedMap
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import (
    adam_with_update_cap,
    elastic_weight_consolidation,
    lp_regularized,
)
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor
from layerkit_runner.step.gradients import LossAggregator, MultiLossAggregator
from layerkit_runner.step.metrics import GLOBAL_BATCH

PRAXIS = runpy.run_path(str(pathlib.Path(__file__).with_name("praxis_updates.py")))


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(PRAXIS["RECORDED"]) as arrays:
        return dict(arrays)


def updates_of(optimizer: Any) -> tuple[dict[str, np.ndarray], Any]:
    """Return the updates `[step, ...]` of all steps by name of the weight, and the last state."""
    params = PRAXIS["first_weights"]()
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    updates = []
    for step in range(PRAXIS["STEPS"]):
        result, state = update(PRAXIS["gradients"](step), state, params)
        params = optax.apply_updates(params, result)
        updates.append(result)
    return {name: np.stack([one[name] for one in updates]) for name in params}, state


@pytest.mark.parametrize("case", PRAXIS["ADAFACTOR"])
def test_adafactor_updates_equal_those_of_praxis(recorded: dict[str, np.ndarray], case: str):
    fields = PRAXIS["ADAFACTOR"][case]
    # Rounding may change the last unit of an int16, which is below 1e-6, but not of an int8.
    is_int16 = fields.get("quantized_dtype") == "int16"
    updates, state = updates_of(sharded_adafactor(PRAXIS["rate_at"], **fields))
    for name, result in updates.items():
        close = {"rtol": 2e-5, "atol": 1e-6 if is_int16 else 1e-7, "err_msg": name}
        np.testing.assert_allclose(result, recorded[f"{case}/{name}"], **close)
        stored = recorded.get(f"{case}/m/{name}")
        if stored is not None:
            assert state.m[name].dtype == stored.dtype
            m = np.float32(state.m[name])
            np.testing.assert_allclose(m, stored, rtol=1e-6, atol=is_int16, err_msg=name)


def test_adafactor_state_of_int8_takes_little_more_than_a_byte_per_weight():
    params = {"w": np.zeros((256, 512), np.float32), "b": np.zeros(512, np.float32)}
    state = sharded_adafactor(0.1).init(params)
    sizes = {
        name: {path: getattr(tree[path], "nbytes", 0) for path in params}
        for name, tree in state._asdict().items()
        if name not in ("count", "schedule")
    }
    assert sizes == {
        "m": {"w": 256 * 512, "b": 512},
        "m_scale": {"w": 512 * 4, "b": 4},
        "vr": {"w": 256 * 4, "b": 0},
        "vc": {"w": 512 * 4, "b": 0},
        "v": {"w": 0, "b": 512 * 4},
    }


def test_adafactor_mask_selects_the_weights_that_decay():
    params = {"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    mask = {"w": True, "b": False}
    for given in (mask, lambda params: mask):
        optimizer = sharded_adafactor(0.5, weight_decay=0.1, mask=given)
        updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
        np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
        np.testing.assert_array_equal(updates["b"], 0.0)


def test_elastic_weight_consolidation_equals_that_of_praxis(recorded: dict[str, np.ndarray]):
    optimizer = elastic_weight_consolidation(
        PRAXIS["rate_at"], optimizer=optax.sgd, ewc_regularizer_weight=PRAXIS["EWC_WEIGHT"]
    )
    updates, _ = updates_of(optimizer)
    plain, _ = updates_of(optax.sgd(PRAXIS["rate_at"]))
    for name, result in updates.items():
        np.testing.assert_allclose(result, recorded[f"ewc/{name}"], rtol=1e-5, atol=1e-6)
        assert np.max(np.abs(result - plain[name])) > 1e-3


@pytest.mark.parametrize("case", PRAXIS["REGULARIZERS"])
def test_regularizers_equal_those_of_praxis(recorded: dict[str, np.ndarray], case: str):
    norm, weight, skips_vectors = PRAXIS["REGULARIZERS"][case]
    fields: dict[str, Any] = {f"l{norm:.0f}_regularizer_weight": weight}
    if skips_vectors:
        fields["mask"] = {name: len(shape) > 1 for name, shape in PRAXIS["SHAPES"].items()}
    updates, _ = updates_of(lp_regularized(PRAXIS["rate_at"], optimizer=optax.sgd, **fields))
    plain, _ = updates_of(optax.sgd(PRAXIS["rate_at"]))
    for name, result in updates.items():
        np.testing.assert_allclose(result[-1], recorded[f"{case}/{name}"], rtol=1e-5, atol=1e-7)
        is_regularized = not skips_vectors or fields["mask"][name]
        assert (np.max(np.abs(result[-1] - plain[name][-1])) > 1e-4) == is_regularized


def test_decoupled_weight_decay_equals_that_of_praxis(recorded: dict[str, np.ndarray]):
    adam, decay = PRAXIS["ADAM"], PRAXIS["DECOUPLED_DECAY"]
    fields = {"b1": adam["beta1"], "b2": adam["beta2"], "eps": adam["epsilon"]}
    fields |= {"update_rms_cap": adam["clip_threshold"], "weight_decay": decay}
    mask = {name: name != PRAXIS["SPARED"] for name in PRAXIS["SHAPES"]}
    updates, _ = updates_of(adam_with_update_cap(PRAXIS["RATE"], **fields, mask=mask))
    for name, result in updates.items():
        expected = recorded[f"decoupled/{name}"]
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6, err_msg=name)


def test_averages_before_the_step_equal_those_of_praxis(recorded: dict[str, np.ndarray]):
    config = Learner.HParams.config(
        optimizer=Partial(optax.sgd),
        learning_rate=Partial(PRAXIS["rate_at"]),
        clip_global_norm=None,
        ema_decay=PRAXIS["EMA_DECAY"],
        ema_before_step=True,
    )
    learner, params = config.Instantiate(), PRAXIS["first_weights"]()
    state, ema = learner.init(params), learner.init_ema(params)
    for step in range(PRAXIS["STEPS"]):
        update = learner.update(
            PRAXIS["gradients"](step), state, params, step=np.int32(step), ema=ema
        )
        params, state, ema = update.params, update.opt_state, update.ema
    for name, result in ema.items():
        np.testing.assert_allclose(result, recorded[f"ema/{name}"], rtol=1e-5, atol=1e-6)
        assert np.max(np.abs(result - params[name])) > 1e-4


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    ("case", "aggregator"),
    [
        ("first", LossAggregator.HParams.config(loss_key="first")),
        ("both", MultiLossAggregator.HParams.config(loss_keys=["first", "second"])),
    ],
)
def test_loss_of_shards_equals_that_of_paxml(
    tiny: SimpleNamespace,
    recorded: dict[str, np.ndarray],
    case: str,
    aggregator: Config,
    num_microbatches: int,
):
    class TwoLosses(tiny.Regression):
        def compute_loss(self, predictions: Any, batch: Any) -> Any:
            _, outputs = super().compute_loss(predictions, batch)
            losses = {}
            for name in ("first", "second"):
                values, weights = batch[name].T
                total = weights.sum()
                losses[name] = WeightedScalar.of((values * weights).sum() / total, total)
            return losses, outputs

    config = tiny.task_config(train={"gradient_accumulation_steps": num_microbatches})
    config.set(model=TwoLosses.HParams.config(), loss_aggregator=aggregator)
    task = config.Instantiate()
    losses = {name: np.float32(pair).T for name, pair in PRAXIS["LOSSES"].items()}
    batch = NestedMap(x=np.ones((2, 2), np.float32), y=np.zeros(2, np.float32), **losses)
    batch.weights = np.ones(2, np.float32)
    _, (metrics, _) = task.train_step(task.init_state(jax.random.key(0)), batch, GLOBAL_BATCH)
    expected = recorded[f"aggregated/{case}"]
    np.testing.assert_allclose(metrics[task.loss_name].value, expected[0], rtol=1e-6)
