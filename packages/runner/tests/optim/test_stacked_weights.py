"""A stack of repeated layers trains as the same layers in a row do, whatever goes by tensors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Partial, is_config, sub_config_field
from layerkit.config.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import FeedForward
from layerkit.layers.transformer.repeat import Repeat
from layerkit_runner.optim import optimizer_updates
from layerkit_runner.optim.adamw_variants import cautious
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizer_groups import map_tensors, stacks_of
from layerkit_runner.optim.optimizer_updates import per_layer_of
from layerkit_runner.optim.optimizers import (
    adam_with_update_cap,
    bfloat16_state,
    lp_regularized,
)
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor
from layerkit_runner.step.metrics import GLOBAL_BATCH
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams

DIMS, LAYERS, STEPS = 6, 3, 20


class Residual(FeedForward):
    def fprop(self, x: jax.Array) -> jax.Array:
        return x + super().fprop(x)


class Network(BaseModel):
    """Learns to turn its inputs around, by repeated layers or by layers in a row."""

    layer_tpl: Any = sub_config_field(Residual.HParams, input_dims=DIMS, output_dims=DIMS)
    repeated: bool = True

    def setup(self) -> None:
        if self.repeated:
            repeat = Repeat.HParams.config(sub_tpl=self.layer_tpl, num_repeats=LAYERS)
            self.create_child("stack", repeat)
        else:
            self.create_children("layers", [self.layer_tpl] * LAYERS)
        self.create_child("last", self.layer_tpl)

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        x = batch.x
        if self.repeated:
            x = self.stack(x)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.last(x)

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        loss = jnp.mean(jnp.square(predictions - batch.x[:, ::-1]))
        return {"loss": WeightedScalar.of(loss, len(batch.x))}, NestedMap()


def task_of(*, repeated: bool, **fields: Any) -> SingleTask:
    return SingleTask.HParams.config(
        model=Network.HParams.config(repeated=repeated),
        train=TrainHParams.HParams.config(learner=Learner.HParams.config(**fields)),
    ).Instantiate()


def in_a_row(params: Any) -> Any:
    """The weights of the repeated network as those of layers in a row."""
    layers = {
        f"layers_{index}": jax.tree.map(lambda leaf, i=index: leaf[i], params["stack"]["sub"])
        for index in range(LAYERS)
    }
    return {**layers, "last": params["last"]}


def batch_of(step: int) -> NestedMap:
    rng = np.random.default_rng(step)
    return NestedMap(x=rng.normal(size=(8, DIMS))).transform(np.float32)


def trained(task: SingleTask, params: Any) -> tuple[Any, list[float]]:
    """Weights after the last step, and the losses of all."""
    shapes = jax.eval_shape(task.init_state, jax.random.key(0))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    with task.declared_weights() as stacks:
        opt_state = task.train.learner.init(params, stacks=stacks)
    state = state.replace(params=params, opt_state=opt_state)
    step_fn = jax.jit(lambda s, b: task.train_step(s, b, GLOBAL_BATCH))
    losses = []
    for step in range(STEPS):
        state, (metrics, _) = step_fn(state, batch_of(step))
        losses.append(float(metrics["loss"].value))
    return state.params, losses


@pytest.fixture(scope="module")
def first_params() -> Any:
    """Layers whose sizes differ by tens, or it would not matter what is taken together."""
    task = task_of(repeated=True, optimizer=Partial(optax.sgd), learning_rate=1.0)
    params = jax.jit(task.init_state)(jax.random.key(1)).params
    sizes = jnp.array([0.02, 0.2, 2.0])
    params["stack"] = jax.tree.map(
        lambda leaf: leaf * sizes.reshape(-1, *[1] * (leaf.ndim - 1)), params["stack"]
    )
    return params


CASES = {
    "clip per tensor": {"optimizer": Partial(optax.sgd), "clip_per_tensor_norm": 0.05},
    "adam with a cap": {
        "optimizer": Partial(adam_with_update_cap, update_rms_cap=0.3, weight_decay=0.1)
    },
    "adafactor": {"optimizer": Partial(optax.adafactor, min_dim_size_to_factor=2)},
    "sharded adafactor": {"optimizer": Partial(sharded_adafactor)},
}
MORE_CASES = {
    "adam": {"optimizer": Partial(optax.adam)},
    "lamb": {"optimizer": Partial(optax.lamb)},
    "novograd": {"optimizer": Partial(optax.novograd)},
    "clip across": {"optimizer": Partial(optax.sgd), "clip_global_norm": 0.05},
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CASES)]
)
def test_repeated_layers_train_as_layers_in_a_row(first_params: Any, name: str):
    fields = {"learning_rate": 0.05, **(CASES | MORE_CASES)[name]}
    result, losses = trained(task_of(repeated=True, **fields), first_params)
    expected, row_losses = trained(task_of(repeated=False, **fields), in_a_row(first_params))
    np.testing.assert_allclose(losses, row_losses, rtol=2e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5),
        in_a_row(result),
        expected,
    )


@pytest.mark.parametrize("name", [*CASES, "lamb"])
def test_it_would_matter_if_a_stack_were_one_tensor(name: str):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(LAYERS, DIMS, DIMS)).astype(np.float32)}
    sizes = np.array([0.01, 1.0, 10.0])[:, None, None]
    grads = [rng.normal(size=params["w"].shape), sizes * rng.normal(size=params["w"].shape)]
    fields = {"learning_rate": 0.05, **(CASES | MORE_CASES)[name]}
    learner = Learner.HParams.config(**fields)

    def steps(params: Any, grads: Any, stacks: Any) -> Any:
        ours = learner.Instantiate()
        state = ours.init(params, stacks=stacks)
        for count, each in enumerate(grads):
            update = ours.update({"w": each}, state, params, step=jnp.int32(count), stacks=stacks)
            params, state = update.params, update.opt_state
        return params["w"]

    each_alone = np.stack(
        [
            jax.jit(lambda p, g: steps(p, g, {}))(
                {"w": params["w"][layer]}, [grad[layer] for grad in grads]
            )
            for layer in range(LAYERS)
        ]
    )
    stacked = jax.jit(lambda p, g: steps(p, g, {("w",): (LAYERS,)}))(params, grads)
    as_one = jax.jit(lambda p, g: steps(p, g, {}))(params, grads)
    np.testing.assert_allclose(stacked, each_alone, rtol=1e-5, atol=1e-6)
    assert np.max(np.abs(as_one - each_alone)) > 1e-3


def test_stacks_are_found_by_the_names_of_the_axes():
    task = task_of(repeated=True, optimizer=Partial(optax.sgd), learning_rate=1.0)
    boxed = jax.eval_shape(lambda: task.model.init_boxed(jax.random.key(0)))["params"]
    stacks = stacks_of(boxed)
    assert set(stacks.values()) == {(LAYERS,)}
    assert {path[0] for path in stacks} == {"stack"}
    assert ("stack", "sub", "linear", "w") in stacks


def test_tensors_of_stacks_within_stacks():
    tree = {"a": jnp.arange(24.0).reshape(2, 3, 4), "b": jnp.arange(4.0)}
    result = map_tensors(lambda x: x / jnp.sum(x), tree, {("a",): (2, 3)})
    np.testing.assert_allclose(result["a"].sum(axis=-1), np.ones((2, 3)), rtol=1e-6)
    np.testing.assert_allclose(result["b"].sum(), 1.0)


def changes(transformation: optax.GradientTransformation, params: Any, grads: Any) -> Any:
    """The sum of the updates of three steps."""
    state, start = transformation.init(params), params
    for scale in (1.0, 0.1, -2.0):
        updates, state = transformation.update(scale * grads, state, params)
        params = optax.apply_updates(params, updates)
    return params - start


@pytest.mark.parametrize("name", sorted(optimizer_updates._OPTAX))
def test_optimizer_of_optax_depends_on_whole_tensors_as_declared(name: str):
    """If not, a stack and its layers one at a time have the same updates."""
    optimizer = getattr(optax, name, None) or getattr(optax.contrib, name)
    params = jax.random.normal(jax.random.key(0), (3, 4, 5))
    grads = jax.random.normal(jax.random.key(1), params.shape)
    grads *= jnp.array([0.01, 1.0, 100.0])[:, None, None]
    arguments = {"min_dim_size_to_factor": 2} if name == "adafactor" else {}
    if name == "lars":
        arguments = {"trust_coefficient": 0.5}
    make = functools.partial(optimizer, 0.01, **arguments)
    together = changes(make(), params, grads)
    alone = jnp.stack([changes(make(), *layer) for layer in zip(params, grads, strict=True)])
    is_same = np.allclose(together, alone, rtol=1e-4, atol=1e-6)
    assert is_same == (not per_layer_of(optimizer))


@pytest.mark.parametrize(
    ("optimizer", "declared"),
    [
        (optax.lamb, True),
        (functools.partial(optax.adamw, b2=0.9), False),
        (Partial(adam_with_update_cap), True),
        (Partial(adam_with_update_cap, update_rms_cap=None), False),
        (Partial(sharded_adafactor), True),
        (Partial(bfloat16_state, optimizer=Partial(optax.adam)), False),
        (Partial(cautious, optimizer=Partial(optax.adam)), False),
        (Partial(lp_regularized, optimizer=Partial(optax.lamb), l2_regularizer_weight=0.1), True),
        (optax.prodigy if hasattr(optax, "prodigy") else optax.contrib.prodigy, None),
        (optax.sgd(0.1), None),
    ],
)
def test_declarations(optimizer: Any, declared: bool | None):
    assert per_layer_of(optimizer) is declared
    assert per_layer_of(build(optimizer) if is_config(optimizer) else optimizer) is declared


def test_optimizer_without_a_declaration_needs_per_layer_for_a_stack(raises):
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    params, stacks = {"w": jnp.ones((3, 4)), "b": jnp.ones(3)}, {("w",): (3,)}
    learner = Learner.HParams.config(optimizer=chain).Instantiate()
    with raises(ConfigError, owner="Learner.optimizer", field="Learner.per_layer", value=None):
        learner.init(params, stacks=stacks)
    learner = Learner.HParams.config(optimizer=chain, per_layer=False).Instantiate()
    state = learner.init(params, stacks=stacks)
    update = learner.update(params, state, params, step=jnp.int32(0), stacks=stacks)
    np.testing.assert_allclose(update.params["w"], 1 - 0.1 / np.sqrt(15), rtol=1e-6)


def test_state_is_that_of_optax_unless_layers_are_separate_tensors():
    params, stacks = {"w": jnp.ones((3, 4))}, {("w",): (3,)}
    adam = Learner.HParams.config(optimizer=Partial(optax.adam), learning_rate=0.1).Instantiate()
    assert jax.tree.structure(adam.init(params, stacks=stacks)) == jax.tree.structure(
        optax.adam(0.1).init(params)
    )
    both = {"w": params["w"], "b": jnp.ones(2)}
    factored = Learner.HParams.config(
        optimizer=Partial(optax.lamb), learning_rate=0.1
    ).Instantiate()
    assert set(factored.init(both, stacks=stacks)) == {"main", "main-layers-3"}
