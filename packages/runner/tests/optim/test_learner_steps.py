"""Steps that are skipped, averaged weights, and several optimizers."""

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
from layerkit.errors import ConfigError
from layerkit.layers.basic.batch_norm import BatchNorm
from layerkit_runner.optim.learner import AuxiliaryOptimizer, Learner
from layerkit_runner.step.metrics import GLOBAL_BATCH

PARAMS = {"lm": {"embedding": {"w": jnp.ones(3)}, "head": {"w": jnp.full(2, 2.0)}}}
GRADS = {"lm": {"embedding": {"w": jnp.full(3, 2.0)}, "head": {"w": jnp.array([2.0, 0.0])}}}
NORM = 4.0


def learner(**fields: Any) -> Learner:
    fields = {"optimizer": Partial(optax.adam), "learning_rate": 0.1, **fields}
    return Learner.HParams.config(**fields).Instantiate()


def scaled(factor: float) -> Any:
    return jax.tree.map(lambda leaf: leaf * factor, GRADS)


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("fields", "factor", "is_valid"),
    [
        ({}, 1e6, True),
        ({}, np.nan, False),
        ({}, np.inf, False),
        ({"skip_step_gradient_norm_value": 4.0}, 0.99, True),
        # As in Pax, a norm that equals the limit is too large.
        ({"skip_step_gradient_norm_value": 4.0}, 1.0, False),
        ({"skip_step_gradient_norm_value": 4.0}, np.nan, False),
        # The limit is for the norm before clipping.
        ({"skip_step_gradient_norm_value": 5.0, "clip_global_norm": 1.0}, 2.0, False),
    ],
)
def test_a_bad_step_changes_nothing(fields: dict[str, Any], factor: float, is_valid: bool):
    """The second of three steps may be bad; weights, moments and averages must not show it."""
    ours = learner(ema_decay=0.9, **fields)
    reference = learner(ema_decay=0.9, **{**fields, "clip_global_norm": None})
    params, state, ema = PARAMS, ours.init(PARAMS), ours.init_ema(PARAMS)
    first = ours.update(GRADS, state, params, step=jnp.int32(0), ema=ema)
    second = ours.update(
        scaled(factor), first.opt_state, first.params, step=jnp.int32(1), ema=first.ema
    )
    assert float(second.scalars["learning/is_valid_step"]) == is_valid
    kept = (first.params, first.opt_state, first.ema)
    if is_valid:
        plain = reference.update(
            scaled(factor), first.opt_state, first.params, step=jnp.int32(1), ema=first.ema
        )
        assert_equal(second.params, plain.params)
        assert np.all(second.ema["lm"]["embedding"]["w"] != first.ema["lm"]["embedding"]["w"])
        assert float(second.scalars["learning/applied_grad_norm"]) > 0.1
    else:
        assert_equal((second.params, second.opt_state, second.ema), kept)
        assert float(second.scalars["learning/applied_grad_norm"]) == 0.0


@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
def test_step_with_nonfinite_loss_and_finite_gradient_is_skipped_by_default(loss: float):
    ours = learner(ema_decay=0.9)
    state, ema = ours.init(PARAMS), ours.init_ema(PARAMS)
    update = ours.update(GRADS, state, PARAMS, step=jnp.int32(0), loss=jnp.float32(loss), ema=ema)
    assert not update.is_valid
    assert_equal((update.params, update.opt_state, update.ema), (PARAMS, state, ema))


def test_nonfinite_step_is_applied_and_marked_when_skipping_is_off():
    ours = learner(on_nonfinite=None)
    update = ours.update(scaled(np.nan), ours.init(PARAMS), PARAMS, step=jnp.int32(0))
    assert float(update.scalars["learning/is_valid_step"]) == 0.0
    assert np.isnan(update.params["lm"]["embedding"]["w"]).all()


def test_the_reported_rate_is_that_of_the_steps_taken():
    schedule = Config(optax.linear_schedule, 1.0, 0.0, 10)
    ours = learner(optimizer=Partial(optax.sgd), learning_rate=schedule)
    applying = learner(optimizer=Partial(optax.sgd), learning_rate=schedule, on_nonfinite=None)
    params, state, rates = PARAMS, ours.init(PARAMS), []
    for count, factor in enumerate([1.0, 1.0, np.nan, np.nan, 1.0, 1.0]):
        before = params
        # The last step is that of a run that resumes without skipping.
        update = (applying if count == 5 else ours).update(
            scaled(factor), state, params, step=jnp.int32(count)
        )
        params, state = update.params, update.opt_state
        applied = (before["lm"]["embedding"]["w"] - params["lm"]["embedding"]["w"])[0] / 2.0
        if factor == 1.0:
            rates.append(float(applied))
            assert float(update.scalars["learning/lr"]) == pytest.approx(float(applied))
    assert rates == pytest.approx([1.0, 0.9, 0.8, 0.7])


def test_reported_rate_is_that_of_a_schedule_that_is_ahead_of_the_moments():
    schedule = Config(optax.linear_schedule, 1.0, 0.0, 10)
    ours = learner(optimizer=Partial(optax.adam), learning_rate=schedule)
    state = jax.tree.map(
        lambda node: node._replace(count=jnp.int32(5)) if is_schedule(node) else node,
        ours.init(PARAMS),
        is_leaf=is_schedule,
    )
    update = ours.update(GRADS, state, PARAMS, step=jnp.int32(5))
    applied = (PARAMS["lm"]["embedding"]["w"] - update.params["lm"]["embedding"]["w"])[0]
    assert float(update.scalars["learning/lr"]) == pytest.approx(float(applied), rel=1e-5) == 0.5


def is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def test_skipped_step_changes_the_step_number_alone(tiny: SimpleNamespace):
    config = tiny.task_config(counts=True, learner={"ema_decay": 0.9})
    task = config.Instantiate()
    state = task.init_state(jax.random.key(0))

    def batch(value: float) -> NestedMap:
        return NestedMap(x=np.full((2, 2), value), y=np.zeros(2), weights=np.ones(2)).transform(
            np.float32
        )

    state, _ = task.train_step(state, batch(0.1), GLOBAL_BATCH)
    skipped, (_, scalars) = task.train_step(state, batch(np.inf), GLOBAL_BATCH)
    assert float(scalars["learning/is_valid_step"]) == 0.0
    assert float(state.non_trainable["counter"]["sum"]) == pytest.approx(0.1)
    assert_equal(skipped, state.replace(step=2))
    config.train.learner.skip_step_gradient_norm_value = 0.5
    skipped, _ = config.Instantiate().train_step(state, batch(3.0), GLOBAL_BATCH)
    assert_equal(skipped, state.replace(step=2))


@pytest.mark.parametrize("before", [False, True])
def test_moving_averages_equal_numpy(*, before: bool):
    ours = learner(ema_decay=0.4, ema_before_step=before, frozen=("lm/head/w",))
    params, state = PARAMS, ours.init(PARAMS)
    ema = ours.init_ema(ours.trained_weights.select(PARAMS))
    assert list(ema["lm"]) == ["embedding"]
    expected = np.ones(3)
    for count in range(6):
        grads = {"lm": {"embedding": GRADS["lm"]["embedding"]}}
        update = ours.update(grads, state, params, step=jnp.int32(count), ema=ema)
        averaged = params if before else update.params
        params, state, ema = update.params, update.opt_state, update.ema
        decay = min(0.4, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * np.asarray(averaged["lm"]["embedding"]["w"])
    np.testing.assert_allclose(ema["lm"]["embedding"]["w"], expected, rtol=1e-6)
    averaged = ours.averaged(params, ema)
    assert averaged["lm"]["embedding"]["w"] is not params["lm"]["embedding"]["w"]
    assert_equal(averaged["lm"]["head"], PARAMS["lm"]["head"])


def rows_of(value: float) -> NestedMap:
    rows = {"x": [[value, 1.0], [-value, 3.0]], "y": [1.0, 2.0], "weights": [1.0, 1.0]}
    return NestedMap({name: np.float32(values) for name, values in rows.items()})


@pytest.fixture
def normalized(tiny: SimpleNamespace) -> Any:
    """Return a function from the fields of a learner to a task whose model has BatchNorm."""

    class Normalized(tiny.Regression):
        def setup(self) -> None:
            super().setup()
            self.create_child("norm", BatchNorm.HParams.config(dims=2, decay=0.5))

        def compute_predictions(self, batch: Any) -> jax.Array:
            return self.linear(self.norm(batch.x))[:, 0]

    def normalized(**fields: Any) -> Any:
        config = tiny.task_config(learner={"learning_rate": 0.1, **fields})
        return config.set(model=Normalized.HParams.config()).Instantiate()

    return normalized


def test_moving_statistics_are_averaged_over_the_updates_that_were_not_skipped(normalized: Any):
    task = normalized(ema_decay=0.15)
    state = task.init_state(jax.random.key(0))
    expected = jax.tree.map(np.float64, (state.params, state.non_trainable))
    # As apply_ema_weights of Praxis counts: a skipped step keeps its state.
    for value, count in [(1.0, 0), (np.nan, None), (2.0, 1), (np.inf, None), (4.0, 2)]:
        state, _ = task.train_step(state, rows_of(value), GLOBAL_BATCH)
        if count is not None:
            decay = min(0.15, (1 + count) / (10 + count))
            expected = jax.tree.map(
                lambda mean, new, d=decay: d * mean + (1 - d) * np.float64(new),
                expected,
                (state.params, state.non_trainable),
            )
    assert int(state.ema_count) == 3 and int(state.step) == 5
    result = task.weights_of(state, averaged=True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        (result.params, result.non_trainable),
        expected,
    )
    assert np.any(result.non_trainable["norm"]["moving_mean"])


@pytest.mark.parametrize(
    ("fields", "keeps"),
    [
        ({}, False),
        ({"frozen": ("norm/.*",)}, True),
        ({"frozen": ("linear/.*",)}, False),
        ({"trainable": ("linear/.*",)}, True),
        ({"trainable": (".*",)}, False),
    ],
)
def test_frozen_normalization_keeps_its_moving_statistics(
    normalized: Any, fields: dict[str, Any], *, keeps: bool
):
    task = normalized(**fields)
    state = task.init_state(jax.random.key(0))
    new, _ = task.train_step(state, rows_of(2.0), GLOBAL_BATCH)
    same = jax.tree.map(lambda a, b: bool(np.all(a == b)), state, new).non_trainable["norm"]
    assert set(same.values()) == {keeps}


def test_norms_of_each_gradient_are_reported_before_clipping():
    ours = learner(clip_global_norm=1e-3, grad_norm_individual_vars=True)
    scalars = ours.update(GRADS, ours.init(PARAMS), PARAMS, step=jnp.int32(0)).scalars
    norms = {name: float(value) for name, value in scalars.items() if "per_var" in name}
    assert norms == pytest.approx(
        {
            f"per_var_grad_norm/lm/{layer}/w": np.linalg.norm(GRADS["lm"][layer]["w"])
            for layer in ("embedding", "head")
        }
    )
    total = np.sqrt(sum(norm**2 for norm in norms.values()))
    assert float(scalars["learning/raw_grad_norm"]) == pytest.approx(total)


def test_averages_of_bfloat16_weights_are_kept_in_float32():
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    ours = learner(ema_decay=0.9999)
    ema = ours.init_ema(low)
    update = ours.update(GRADS, ours.init(low), low, step=jnp.int32(100_000), ema=ema)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(update.ema)} == {"float32"}
    # A change of a ten-thousandth, which bfloat16 does not have.
    assert np.all(update.ema["lm"]["embedding"]["w"] != ema["lm"]["embedding"]["w"])
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, ours.averaged(low, update.ema))
    assert set(jax.tree.leaves(dtypes)) == {"bfloat16"}


@pytest.mark.parametrize("kind", ["eval", "decode"])
def test_evaluation_and_decoding_use_the_averages_when_asked(tiny: SimpleNamespace, kind: str):
    batch = NestedMap(x=np.ones((2, 2)), y=np.zeros(2), weights=np.ones(2)).transform(np.float32)
    seen = {}
    for averaged in (False, True):
        train = {f"{kind}_use_ema_states": averaged}
        task = tiny.task_config(learner={"ema_decay": 0.5}, train=train).Instantiate()
        state = task.init_state(jax.random.key(0))
        state = state.replace(ema={"linear": {"w": jnp.full((2, 1), 3.0)}})
        if kind == "eval":
            seen[averaged] = float(task.eval_step(state, batch, GLOBAL_BATCH)[0]["loss"].value)
        else:
            seen[averaged] = float(task.decoded_variables(state)["params"]["linear"]["w"][0, 0])
    assert seen == ({False: 2.0, True: 18.0} if kind == "eval" else {False: 1.0, True: 3.0})


@pytest.mark.parametrize("kind", ["eval", "decode"])
def test_averages_without_ema_decay_are_an_error(tiny: SimpleNamespace, raises, kind: str):
    with raises(ConfigError, field=f"{kind}_use_ema_states", value=True):
        tiny.task_config(train={f"{kind}_use_ema_states": True}).Instantiate()


def auxiliary(name: str = "embedding", *weights: str, **fields: Any) -> Config:
    fields = {"optimizer": Partial(optax.sgd), "learning_rate": 0.25, **fields}
    return AuxiliaryOptimizer.HParams.config(
        **{"name": name, "weights": weights or ("lm/embedding/.*",), **fields}
    )


def test_each_optimizer_updates_its_own_weights():
    schedule = Config(optax.linear_schedule, 0.5, 0.0, 2)
    ours = learner(auxiliary_optimizers=[auxiliary(learning_rate=schedule)])
    params, state = PARAMS, ours.init(PARAMS)
    adam = optax.adam(0.1)
    head, head_state = PARAMS["lm"]["head"], adam.init(PARAMS["lm"]["head"])
    for count, rate in enumerate([0.5, 0.25]):
        update = ours.update(GRADS, state, params, step=jnp.int32(count))
        np.testing.assert_allclose(
            update.params["lm"]["embedding"]["w"],
            params["lm"]["embedding"]["w"] - rate * GRADS["lm"]["embedding"]["w"],
        )
        head_updates, head_state = adam.update(GRADS["lm"]["head"], head_state)
        head = optax.apply_updates(head, head_updates)
        assert_equal(update.params["lm"]["head"], head)
        assert float(update.scalars["learning/lr_embedding"]) == rate
        assert float(update.scalars["learning/lr"]) == np.float32(0.1)
        assert float(update.scalars["learning/raw_grad_norm"]) == NORM
        params, state = update.params, update.opt_state
    assert set(state) == {"main", "embedding"}
    assert not jax.tree.leaves(jax.tree.map(jnp.ndim, state["embedding"]))[1:]  # one counter


@pytest.mark.parametrize(
    ("optimizers", "owner", "field"),
    [
        (
            [auxiliary("a", ".*/embedding/w"), auxiliary("b", "lm/.*/w")],
            "AuxiliaryOptimizer b",
            "weights",
        ),
        ([auxiliary("a", "lm/embeding/w")], "AuxiliaryOptimizer a", "weights"),
        ([auxiliary("a", ".*")], "Learner.optimizer", None),
        ([auxiliary("a", ".*/w"), auxiliary("a", ".*/b")], "Learner", "auxiliary_optimizers"),
        ([auxiliary("main")], "AuxiliaryOptimizer", "name"),
        ([auxiliary("a", weights=())], "AuxiliaryOptimizer a", "weights"),
        ([auxiliary("a", "(")], "AuxiliaryOptimizer a", "weights[0]"),
        ([auxiliary("a", learning_rate=None)], "AuxiliaryOptimizer a", "learning_rate"),
    ],
)
def test_invalid_auxiliary_optimizers_are_an_error(
    raises, optimizers: list[Config], owner: str, field: str | None
):
    with raises(ConfigError, owner=owner, field=field):
        learner(auxiliary_optimizers=optimizers).init(PARAMS)


def test_model_without_weights_is_an_error(raises):
    with raises(ConfigError, problem="no weight is left to train"):
        learner().init({})
