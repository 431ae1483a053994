"""OPTIMIZER: updates by NumPy from the papers, and every experiment with every optimizer."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import layerkit_experiments
from layerkit.base.base_layer import PARAMS
from layerkit.base.weights import WeightBox, unbox
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_experiments.lm.hybrid import HybridText
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_experiments.recipes.experts import MixtureOfExperts
from layerkit_experiments.recipes.optimizer_choices import OPTIMIZERS
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.registry import experiment_classes
from layerkit_runner.config.requests import parse_override
from layerkit_runner.errors import FieldError, UsageError
from layerkit_runner.optim.optimizer_groups import stacks_of
from layerkit_runner.optim.weight_selection import declarations_of, declared
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve
from layerkit_runner.step.metrics import GLOBAL_BATCH
from layerkit_runner.tools.catalogue import fields_without_value

STEPS, RATE, DECAY = 4, 1e-2, 0.3
SLOW = pytest.mark.slow
EXPERIMENTS = {
    name: cls
    for name, cls in experiment_classes(layerkit_experiments.__name__).items()
    if "OPTIMIZER" in experiment_fields(cls) and not fields_without_value(cls)
}


class Dense(LocalText):
    """Repeated layers with heads, and a tied embedding."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, DIMS_PER_HEAD, VOCAB_SIZE = 2, 32, 6, 4, 264
    LEARNING_RATE, WEIGHT_DECAY, WARMUP_STEPS, MAX_STEPS = RATE, DECAY, 0, 10


class Small(MixtureOfExperts, Dense):
    """Experts in every layer."""

    NUM_EXPERTS = 4
    LOAD_BALANCE_WEIGHT = 0.0


def adam(g: Any, m: Any, v: Any, t: int, b1: float, b2: float) -> tuple[Any, Any, Any]:
    """(direction, first moment, second moment) of Kingma and Ba, algorithm 1."""
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8), m, v


def factored_rms(g: Any, v: Any, decay: float) -> tuple[Any, Any]:
    """(direction, moments) of Shazeer and Stern, algorithms 4 and 5, for the last two axes."""
    squares = g * g + 1e-30
    if g.ndim < 2:
        v = decay * v + (1 - decay) * squares
        u = g / np.sqrt(v)
    else:
        rows, columns = (0.0, 0.0) if np.isscalar(v) else v
        rows = decay * rows + (1 - decay) * squares.sum(-1, keepdims=True)
        columns = decay * columns + (1 - decay) * squares.sum(-2, keepdims=True)
        v = rows, columns
        u = g / np.sqrt(rows * columns / rows.sum(-2, keepdims=True))
    return u / max(1.0, math.sqrt(np.mean(u * u))), v


def trained(
    name: str, grads: Any, w: Any, rates: Any, decay: float, curvature: Any
) -> Iterator[Any]:
    """The float64 weights of one tensor after each step, by the papers of the optimizers."""
    m = v = slow = last = 0.0
    x = z = w
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), 1):
        pull = rate * decay * w
        if name == "adamw":
            u, m, v = adam(g, m, v, t, 0.9, 0.98)
        elif name == "lion":  # Chen et al., algorithm 2
            u, m = np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g
        elif name == "ademamix":  # Pagliardini et al., algorithm 1
            part = (t - 1) / Small.MAX_STEPS
            lasting = math.log(0.9), math.log(0.9999)
            b3 = math.exp(math.prod(lasting) / ((1 - part) * lasting[1] + part * lasting[0]))
            slow = b3 * slow + (1 - b3) * g
            u, m, v = adam(g, m, v, t, 0.9, 0.98)
            u = u + part * 5.0 * slow / (np.sqrt(v / (1 - 0.98**t)) + 1e-8)
        elif name == "adafactor":
            u, v = factored_rms(g, v, 1 - t**-0.8)
            m = 0.9 * m + 0.1 * rate * u
            u = m / rate
        elif name == "mars":  # Yuan et al., algorithm 2, with c of at most norm 1
            c = g + 0.025 * 0.95 / 0.05 * (g - last)
            last = g
            u, m, v = adam(c / max(1.0, np.linalg.norm(c)), m, v, t, 0.95, 0.99)
        elif name == "sophia":  # Liu et al., algorithm 3, with Adam's correction of the average
            m = 0.965 * m + 0.035 * g
            u = np.clip(m / (1 - 0.965**t) / np.maximum(0.01 * v, 1e-8), -1.0, 1.0)
            v = 0.01 * curvature if t == 1 else v  # the next estimate is 10 steps later
        elif name == "cautious_adamw":  # Liang et al., algorithm 2
            u, m, v = adam(g, m, v, t, 0.9, 0.98)
            mask = u * g > 0
            u = u * mask / max(mask.mean(), 1e-3)
        else:  # Defazio et al., algorithm 1
            assert name == "schedule_free"
            u, _, v = adam(g, 0.0, v, t, 0.0, 0.98)
            z = z - rate * u - pull
            x = (1 - 1 / t) * x + z / t
            w = 0.1 * z + 0.9 * x
            yield w
            continue
        w = w - rate * u - pull
        yield w


def draw(shapes: Any, seed: int, scale: float) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (scale * rng.normal(size=x.shape)).astype(np.float32), shapes)


def clip(grad: Any, limit: float | None) -> Any:
    """The float64 gradient of one layer, of at most a norm."""
    grad = grad.astype(np.float64)
    return grad if limit is None else grad * min(1.0, limit / np.linalg.norm(grad))


@pytest.fixture(scope="module")
def boxes() -> Any:
    model = resolve(Small()).task.model.Instantiate()
    return jax.eval_shape(model.init_boxed, jax.random.key(0))[PARAMS]


OF_ENTRIES = [name for name, row in OPTIMIZERS.items() if not row.only_matrices]


# Gradients are clipped per layer for one optimizer in the ordinary tests.
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *((name, None) for name in OF_ENTRIES),
        *(pytest.param(n, 0.5, marks=[] if n == "adamw" else SLOW) for n in OF_ENTRIES),
    ],
)
def test_updates_equal_numpy(boxes: Any, name: str, limit: float | None):
    config = resolve(Small(OPTIMIZER=name, CLIP_GRADIENT_NORM=None)).task.train.learner
    learner = config.set(clip_per_tensor_norm=limit).Instantiate()
    declarations, stacks, params = declarations_of(boxes), stacks_of(boxes), unbox(boxes)
    params = draw(params, 0, 0.1)
    grads = [draw(params, 10 + step, 0.03) for step in range(STEPS)]
    # A diagonal Hessian, of which Hutchinson's estimate is exact.
    hessian = jax.tree.map(lambda x: x + 300 * np.sign(x), draw(params, 1, 300.0))
    factors = {"lion": (0.1, 10 * DECAY), "sophia": (1.0, 2 * DECAY), "mars": (10.0, DECAY / 10)}
    factor, decay = factors.get(name, (1.0, DECAY))
    rates = factor * RATE * (0.55 + 0.45 * np.cos(np.pi * np.arange(STEPS) / Small.MAX_STEPS))
    rates = np.full(STEPS, RATE) if name == "schedule_free" else rates
    weights = [params]
    with declared(declarations):
        state = learner.init(params, stacks=stacks)
        hvp = functools.partial(jax.tree.map, jnp.multiply, hessian)
        update = jax.jit(functools.partial(learner.update, stacks=stacks, hvp=hvp))
        for step, grad in enumerate(grads):
            result = update(grad, state, weights[-1], step=step, loss=1.0)
            weights, state = [*weights, result.params], result.opt_state
    for path, first in flatten_dict(params).items():
        decayed = decay * declarations[path].decays
        for layer in np.ndindex(stacks.get(path, ())):
            gs = [clip(flatten_dict(grad)[path][layer], limit) for grad in grads]
            w, curvature = first[layer].astype(np.float64), flatten_dict(hessian)[path][layer]
            expected = trained(name, gs, w, rates, decayed, curvature)
            for new, reference in zip(weights[1:], expected, strict=True):
                actual = np.asarray(flatten_dict(new)[path][layer])
                tolerance = 1e-5 * RATE * max(factor, 1.0)
                np.testing.assert_allclose(actual, reference, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_sophia_estimates_the_hessian_of_the_task_in_microbatches():
    fields = {"OPTIMIZER": "sophia", "GRADIENT_ACCUMULATION_STEPS": 2, "SOFTMAX_CHUNK_SIZE": 5}
    task = resolve(Dense(**fields)).task.Instantiate()
    ids = jax.random.randint(jax.random.key(1), (4, 9), 3, 259)
    batch = NestedMap(ids=ids[:, :-1], labels=ids[:, 1:], weights=jnp.ones((4, 8)))
    state = task.init_state(jax.random.key(0))
    step = jax.jit(functools.partial(task.train_step, context=GLOBAL_BATCH))
    actual = step(state, batch)[0].opt_state[0]

    def loss(params: Any) -> Any:
        return task.model.apply({PARAMS: params}, batch)[0]["loss"].value

    key = jax.random.fold_in(jax.random.key(0), 0)
    signs = optax.tree.random_like(key, state.params, jax.random.rademacher)
    hvp = jax.jit(lambda w: jax.vjp(jax.grad(loss), w)[1](signs)[0])(state.params)
    for nu, h, sign in zip(*map(jax.tree.leaves, (actual.nu, hvp, signs)), strict=True):
        np.testing.assert_allclose(nu, 0.01 * h * sign, atol=1e-7 * float(jnp.abs(h).max()))
    assert actual.hessian_fn_state == 1
    task = resolve(Small(**fields)).task.Instantiate()
    state = jax.eval_shape(task.init_state, jax.random.key(0))
    with pytest.raises(UsageError, match="second derivative"):
        jax.eval_shape(functools.partial(task.train_step, context=GLOBAL_BATCH), state, batch)


def stepped(mesh: list[int], folder: Path | None, **fields: Any) -> Any:
    """The state after two steps on a mesh, with a checkpoint between them."""
    cls = Dense if fields["OPTIMIZER"] == "sophia" else Small
    partitioner, task = build_parts(resolve(cls(ICI_MESH_SHAPE=mesh, **fields)))
    partitioner.start(jax.devices()[: math.prod(mesh)])
    partitioner.bind(task)
    state = jax.jit(functools.partial(task.init_state, task.first_key()))()
    state = jax.device_put(jax.device_get(state), partitioner.state_shardings(task))
    step = partitioner.train_step_fn(task)
    for key in jax.random.split(jax.random.key(1)):
        ids = np.asarray(jax.random.randint(key, (8, 9), 3, 259))
        weights = np.ones((8, 8), np.float32)
        batch = NestedMap(ids=ids[:, :-1], labels=ids[:, 1:], weights=weights)
        state, _ = step(state, partitioner.put_batch(batch))
        if folder is None:
            continue
        saved, target = jax.device_get(state), partitioner.abstract_state(task)
        with CheckpointManager(folder, policy=CheckpointPolicy(save_interval_steps=1)) as manager:
            manager.save(int(state.step), state, input_states={}, metadata={})
            state = manager.restore(int(state.step), target).state
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), saved)
    return jax.device_get(state.params)


@pytest.mark.parametrize(
    "name", [n if n == "cautious_adamw" else pytest.param(n, marks=SLOW) for n in OPTIMIZERS]
)
def test_eight_devices_with_microbatches_and_checkpoints_equal_one(name: str, tmp_path: Path):
    fields = {"OPTIMIZER": name, "CLIP_GRADIENT_NORM": 0.5}
    expected = stepped([1, 1, 1], None, **fields)
    actual = stepped([2, 2, 2], tmp_path, GRADIENT_ACCUMULATION_STEPS=2, **fields)
    # Directions of entries whose gradient is all rounding errors may differ. In the eigenbasis of
    # SOAP, most entries of a gradient of a low rank are such: only its checkpoint is compared.
    share = 1.0 if name == "soap" else 0.01
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.mean(np.abs(a - b) > 1e-3 * RATE) <= share


def test_unknown_name_and_field_that_is_not_read_raise(raises: Any):
    with raises(ConfigError, owner="LocalText", field="OPTIMIZER", value="lyon") as caught:
        resolve(LocalText(OPTIMIZER="lyon"))
    assert "Did you mean 'lion'?" in str(caught.value)
    with raises(FieldError, owner="LocalText", field="ADAM_BETA2", value=0.9):
        resolve(LocalText(OPTIMIZER="lion", ADAM_BETA2=0.9))
    resolve(LocalText(OPTIMIZER="muon", ADAM_BETA2=0.9))
    mixers = {"MIXERS": ("mamba2",), "QK_CLIP": 5.0}
    with raises(FieldError, owner="HybridText", field="QK_CLIP", value=5.0):
        HybridText(**mixers).task()


def test_a_flag_changes_the_rate_of_matrices_alone():
    flag = parse_override("task.train.learner.learning_rate.peak", "0.02")
    learner = resolve(LocalText(OPTIMIZER="muon"), [flag]).task.train.learner
    assert learner.learning_rate.peak == 0.02
    assert learner.auxiliary_optimizers[0].learning_rate.peak == LocalText.LEARNING_RATE


def test_start_report_states_the_factors_of_the_rates():
    assert LocalText().start_notes() == []
    (note,) = LocalText(OPTIMIZER="lion").start_notes()
    assert "lion: rate 0.1 × LEARNING_RATE, weight decay 10 × WEIGHT_DECAY" in note


@pytest.mark.parametrize(
    "name", ["psgd", *(pytest.param(n, marks=SLOW) for n in ("muon", "soap", "shampoo"))]
)
def test_updates_of_matrices_are_about_as_large_as_those_of_adamw(name: str):
    """Gradients are noise; rates have the factors."""
    params, box = {"w": jnp.zeros((16, 16))}, WeightBox(None, ("embed", "mlp"), is_factor=True)
    box = box.replace(fans=(16, 16), fan_in_dims=(-2,), fan_out_dims=(-1,))
    sizes = []
    for row in (OPTIMIZERS[name], OPTIMIZERS["adamw"]):
        optimizer = row.config(Dense(WEIGHT_DECAY=0.0), None).Instantiate()(learning_rate=row.rate)

        def step(state: Any, key: Any, optimizer: Any = optimizer) -> Any:
            grads = {"w": jax.random.normal(key, (16, 16))}
            updates, state = optimizer.update(grads, state, params)
            return state, jnp.sqrt(jnp.mean(jnp.square(updates["w"])))

        with declared({("w",): box}):
            keys = jax.random.split(jax.random.key(0), 300)
            sizes.append(float(jax.lax.scan(step, optimizer.init(params), keys)[1][-100:].mean()))
    assert 0.5 < sizes[0] / sizes[1] < 2.0


def rate_at(step: int, **fields: Any) -> float:
    return float(Dense(**fields).learner().learning_rate.Instantiate()(step)) / RATE


def test_rates_follow_the_row_and_the_named_schedule():
    assert rate_at(9, OPTIMIZER="schedule_free") == pytest.approx(1.0)
    named = {"LEARNING_RATE_SCHEDULE": "linear"}
    assert rate_at(9, OPTIMIZER="schedule_free", **named) == pytest.approx(0.1)
    assert rate_at(9, OPTIMIZER="lion", **named) == pytest.approx(0.01)
    staged = {"STAGES": [{"until_step": 10, "rate": 0.5 * RATE}]}
    assert rate_at(5, OPTIMIZER="schedule_free", **staged) == pytest.approx(0.25)


# In the ordinary tests, optimizers take turns with the first experiment of each module.
FIRST = [*{name.rpartition(".")[0]: name for name in reversed(EXPERIMENTS)}.values()]


@pytest.mark.parametrize(
    ("name", "optimizers"),
    [
        *((name, [one]) for name, one in zip(FIRST, itertools.cycle(OPTIMIZERS), strict=False)),
        *(pytest.param(name, [*OPTIMIZERS], marks=SLOW) for name in EXPERIMENTS),
    ],
)
def test_experiment_has_a_state_of_optimizers(name: str, optimizers: list[str]):
    task = resolve(EXPERIMENTS[name]()).task
    boxes = jax.eval_shape(task.model.Instantiate().init_boxed, jax.random.key(0))[PARAMS]
    for optimizer in optimizers:
        learner = EXPERIMENTS[name](OPTIMIZER=optimizer).learner().Instantiate()
        with declared(declarations_of(boxes)):
            init = functools.partial(learner.init, stacks=stacks_of(boxes))
            assert jax.eval_shape(init, unbox(boxes))
