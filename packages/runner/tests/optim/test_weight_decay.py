"""Weight decay follows the declarations of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from layerkit.base.base_layer import BaseLayer, WeightHParams, WeightInit
from layerkit.config import Config, Partial
from layerkit.errors import ConfigError
from layerkit.layers import (
    FlaxModule,
    Linear,
    MultitaskResidualAdapter,
    RelativeBias,
    Repeat,
    TrainablePositionalEmbedding,
    TransformerFeedForward,
)
from layerkit.layers.attention.base_attention import HeadProjection
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.quantization.lora import add_lora
from layerkit_runner.optim.optimizers import (
    adam_with_update_cap,
    decays,
    elastic_weight_consolidation,
    lp_regularized,
    spares_norms,
)
from layerkit_runner.optim.sharded_adafactor import sharded_adafactor
from layerkit_runner.optim.weight_selection import weight_decay_of

ZEROS = WeightInit.Constant(0.0)

# The paths of all weights of the model below that are no matrices.
SPARED = {
    *("experts/up_bias", "experts/gate_bias", "experts/down_bias", "experts/router/b"),
    *("tasks/down_b", "tasks/up_b", "tasks/norm/scale", "tasks/norm/bias"),
    *("positions/w", "relative/w", "heads/b"),
    *("layers/sub/up_bias/b", "layers/sub/down_bias/b"),
    *("custom/w", "custom/start", "custom/table"),
    *("flax/module/query/bias", "flax/module/key/bias", "flax/module/value/bias"),
    "flax/module/out/bias",
}


class Custom(BaseLayer):
    """A layer of a user, with weights of any names."""

    def setup(self) -> None:
        """Create the weights."""
        self.create_variable("kernel", WeightHParams((2, 3, 4), (None, None, None)))
        self.create_variable("zeros", WeightHParams((2, 3), (None, None), init=ZEROS, decays=True))
        self.create_variable("w", WeightHParams((3,), (None,)))
        self.create_variable("start", WeightHParams((2, 3), (None, None), init=ZEROS))
        self.create_variable("table", WeightHParams((2, 3), (None, None), decays=False))


@pytest.fixture
def task_of(tiny: SimpleNamespace) -> Any:
    """Return a function from the fields of a learner to a task whose model has many layers."""

    class Parts(tiny.Regression):
        def setup(self) -> None:
            super().setup()
            sizes: dict[str, Any] = {"input_dims": 4, "hidden_dims": 6}
            experts = MoeFeedForward.HParams.config(**sizes, num_experts=2, use_bias=True)
            experts.router_tpl.set(use_noise=True, use_bias=True)
            self.create_child("experts", experts)
            adapter = MultitaskResidualAdapter.HParams.config(input_dims=4, num_tasks=2)
            self.create_child("tasks", adapter)
            positions = TrainablePositionalEmbedding.HParams.config(dims=4, max_length=3)
            self.create_child("positions", positions)
            self.create_child("relative", RelativeBias.HParams.config(num_heads=2))
            heads = HeadProjection.HParams.config(input_dims=4, num_heads=2, head_dim=2)
            self.create_child("heads", add_lora(heads.set(use_bias=True), rank=2))
            layer = TransformerFeedForward.HParams.config(**sizes, has_bias=True)
            self.create_child("layers", Repeat.HParams.config(sub_tpl=layer, num_repeats=2))
            self.create_child("custom", Custom.HParams.config())
            attention = Config(nn.MultiHeadDotProductAttention, num_heads=2)
            module = FlaxModule.HParams.config(module_tpl=attention, example_shapes=((1, 3, 4),))
            self.create_child("flax", module)

    def task_of(**fields: Any) -> Any:
        config = tiny.task_config(learner=fields)
        return config.set(model=Parts.HParams.config(dims=4)).Instantiate()

    return task_of


def shapes_of(task: Any) -> Any:
    return jax.eval_shape(task.init_state, jax.random.key(0)).params


def unchanged_by_decay(task: Any) -> set[str]:
    """Return the paths of the weights that a step with a gradient of zero keeps."""
    ones = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes_of(task))

    @jax.jit
    def update(params: Any) -> Any:
        zeros, learner = jax.tree.map(jnp.zeros_like, params), task.train.learner
        with task.declared_weights() as stacks:
            state = learner.init(params, stacks=stacks)
            return learner.update(zeros, state, params, step=jnp.int32(0), stacks=stacks).params

    new = flatten_dict(jax.device_get(update(ones)), sep="/")
    return {path for path, leaf in new.items() if bool((leaf == 1.0).all())}


OPTIMIZERS = {
    "adamw": Partial(optax.adamw, weight_decay=0.5),
    "adam": Partial(adam_with_update_cap, weight_decay=0.5),
    "adafactor": Partial(sharded_adafactor, decay_adam=0.9, weight_decay=0.5),
    "lp": Partial(lp_regularized, optimizer=Partial(optax.sgd), l2_regularizer_weight=0.5),
}


def test_update_without_gradient_shrinks_the_weights_that_declare_it(task_of: Any):
    task = task_of(optimizer=OPTIMIZERS["adam"].clone().set(mask=decays), learning_rate=0.1)
    assert unchanged_by_decay(task) == SPARED


@pytest.mark.parametrize(
    ("optimizer", "decays_all"),
    [
        # Optimizers with schedules of their own, or a pull to the first weights.
        (Config(optax.adamw, Config(optax.linear_schedule, 0.0, 0.1, 10)), True),
        (Config(lp_regularized, 0.1, optimizer=Partial(optax.sgd), l1_regularizer_weight=1), True),
        (Config(optax.lamb, 0.1), False),
        (
            Config(
                elastic_weight_consolidation,
                0.1,
                optimizer=Partial(optax.adam),
                ewc_regularizer_weight=1.0,
            ),
            False,
        ),
    ],
)
def test_decay_of_a_complete_optimizer_is_reported(tiny: Any, optimizer: Any, *, decays_all: bool):
    task = tiny.task_config(learner={"optimizer": optimizer, "learning_rate": None}).Instantiate()
    (report,) = task.decayed_weights(shapes_of(task))
    assert report.decayed == ((("linear", "w"),) if decays_all else ())


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (
            Config(
                optax.chain,
                Config(optax.adamw, 0.1, weight_decay=0.5),
                Config(optax.apply_every, 4),
            ),
            "unknown: weight_decay=0.5 changed no weight in one step without a gradient",
        ),
        (
            Config(optax.adamw, 0.1, weight_decay=0.5, mask={"linear": {"w": False}}),
            "no weight: weight_decay=0.5 has no effect, because its mask spares all weights",
        ),
    ],
    ids=["accumulated", "masked"],
)
def test_report_blames_a_mask_only_if_there_is_one(tiny: Any, optimizer: Any, line: str):
    task = tiny.task_config(learner={"optimizer": optimizer, "learning_rate": None}).Instantiate()
    (report,), shapes = task.decayed_weights(shapes_of(task)), flatten_dict(shapes_of(task))
    assert [*report.lines(shapes, strength=weight_decay_of(optimizer))] == [f"decayed      {line}"]


def test_mask_without_norms_spares_their_scales_and_biases_alone(task_of: Any):
    optimizer = OPTIMIZERS["adam"].clone().set(mask=spares_norms)
    task = task_of(optimizer=optimizer, learning_rate=0.1)
    (report,) = task.decayed_weights(shapes_of(task))
    assert {"/".join(path) for path in report.spared} == {path for path in SPARED if "norm" in path}


def test_mask_reads_boxes_and_needs_declarations_for_norms(raises):
    boxed = Linear.HParams.config(input_dims=2, output_dims=3).Instantiate()
    params = boxed.init_boxed(jax.random.key(0))["params"]
    assert decays(params) == {"w": True}
    with pytest.warns(UserWarning, match="^layer/b, … \\(1 more\\): weights without a declaration"):
        assert decays({"layer": {"b": np.ones(2), "w": np.ones((2, 2))}}) == {
            "layer": {"b": False, "w": True}
        }
    with raises(ConfigError, owner="mask of weights"):
        spares_norms({"w": np.ones((2, 2))})
