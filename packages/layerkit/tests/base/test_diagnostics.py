"""Errors that name their layer, and the warning about training with `train=None`."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

from layerkit.base.base_layer import AUX_LOSS, RANDOM, BaseLayer
from layerkit.base.base_model import BaseModel, WeightedScalar
from layerkit.config import build, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError, layer_of
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.layers.transformer.transformer import TransformerFeedForward
from layerkit.models.transformer_lm import TransformerLm

KEY = jax.random.key(0)
IDS = jnp.ones((2, 4), jnp.int32)


class Wider(TransformerFeedForward):
    """A feed-forward that returns one feature too many."""

    def fprop(self, x, *, is_token=None):
        return jnp.concatenate([x, x[..., :1]], axis=-1)


class Failing(BaseLayer):
    input_dims: int = 0
    hidden_dims: int = 0

    def fprop(self, x, *, is_token=None):
        return x + jnp.ones(x.shape[-1] + 1)


class WithoutOwner(BaseLayer):
    input_dims: int = 0
    hidden_dims: int = 0

    def fprop(self, x, *, is_token=None):
        raise ConfigError(field="x", value=1)


class NarrowerLayer(BaseLayer):
    input_dims: int = 0
    hidden_dims: int = 0
    num_heads: int = 0
    num_kv_heads: int | None = None
    dim_per_head: int | None = None

    def fprop(self, x, *, mask, positions):
        return x[..., :-1]


def small(**fields):
    config = TransformerLm.HParams.config(
        vocab_size=8, model_dims=4, hidden_dims=8, num_heads=2, num_layers=2
    )
    return config.set(**fields)


def run(layer, *args, **kwargs):
    jax.eval_shape(lambda: layer.init(KEY, *args, **kwargs))


LOGITS = {"method": "logits"}


def layer_notes(error):
    """Return the notes of an error without those of JAX."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("In layer")]


STACKS = pytest.mark.parametrize(
    ("stack", "place"),
    [(StackedTransformer, "layers_0"), (StackedTransformerRepeated, "repeat/sub")],
)


@STACKS
def test_wrong_shape_raises_with_path_and_both_shapes(stack, place):
    config = small(stack_tpl=stack.HParams.config())
    wide_branch, narrow_layer = config.stack_tpl.layer_tpl.clone(), NarrowerLayer.HParams.config()
    wide_branch.feed_forward_tpl = Wider.HParams.config()
    for layer, owner, shape in (
        (wide_branch, f"Wider(stack/{place}/feed_forward)", "[2, 4, 5]"),
        (narrow_layer, "NarrowerLayer(stack/", "[2, 4, 3]"),
    ):
        config.stack_tpl.layer_tpl = layer
        with pytest.raises(ValueError) as raised:
            run(build(config), IDS, **LOGITS)
        assert all(part in str(raised.value) for part in (owner, shape, "[2, 4, 4]"))


@STACKS
def test_error_of_jax_has_a_note_with_the_innermost_layer(stack, place):
    config = small(stack_tpl=stack.HParams.config())
    config.stack_tpl.layer_tpl.feed_forward_tpl = Failing.HParams.config()
    with pytest.raises((TypeError, ValueError)) as raised:
        run(build(config), IDS, **LOGITS)
    assert layer_of(raised.value) == f"Failing(stack/{place}/feed_forward)"
    assert layer_notes(raised.value) == [f"In layer Failing(stack/{place}/feed_forward)"]


def test_user_error_without_owner_gets_the_innermost_layer_as_owner():
    config = small()
    config.stack_tpl.layer_tpl.feed_forward_tpl = WithoutOwner.HParams.config()
    with pytest.raises(ConfigError) as raised:
        run(build(config), IDS, **LOGITS)
    assert raised.value.owner == "WithoutOwner(stack/layers_0/feed_forward)"
    assert layer_of(raised.value) == raised.value.owner
    assert layer_notes(raised.value) == []


@pytest.mark.parametrize(
    ("owner", "layer"),
    [
        ("Linear(lm/softmax)", "Linear(lm/softmax)"),
        ("Linear().w", "Linear()"),
        ("SampleDecoder", None),
        (None, None),
    ],
)
def test_layer_of_a_user_error_is_its_owner(owner, layer):
    assert layer_of(ConfigError("Linear(lm): text", owner=owner)) == layer


def test_error_of_a_check_of_a_layer_has_no_note():
    with pytest.raises(ValueError) as raised:
        run(build(small(num_heads=3)))
    assert layer_of(raised.value) == "MultiHeadAttention(stack/layers_0/attention)"
    assert layer_notes(raised.value) == []


class Model(BaseModel):
    body_tpl: BaseLayer = sub_config_field(None)

    def setup(self):
        self.create_child("body", self.body_tpl)

    def compute_predictions(self, batch):
        return self.body(batch.x)

    def compute_loss(self, predictions, batch):
        loss = jnp.mean(jnp.square(predictions))
        return {"loss": WeightedScalar.of(loss, 1.0)}, NestedMap()


EXPERTS = MoeFeedForward.HParams.config(input_dims=4, hidden_dims=4, num_experts=2)
BATCH = NestedMap(x=jnp.ones((2, 4, 4)))


def losses(body, *, mutable=(AUX_LOSS,), **fields):
    model = Model(body_tpl=body, **fields)
    variables = jax.eval_shape(model.init, KEY)
    run = lambda v: model.apply(v, BATCH, rngs={RANDOM: KEY}, mutable=list(mutable))  # noqa: E731
    return jax.eval_shape(run, variables)


@pytest.mark.parametrize(
    "body", [Dropout.HParams.config(rate=0.5), EXPERTS], ids=["dropout", "moe"]
)
def test_training_with_train_unset_warns(body):
    with pytest.warns(UserWarning, match=r"Model\(\): train=None.*clone\(train=True\)"):
        losses(body)


def test_model_with_train_set_or_that_does_not_depend_on_train_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for train in (True, False):
            losses(Dropout.HParams.config(rate=0.5), train=train)
            losses(EXPERTS, train=train)
        losses(Dropout.HParams.config(rate=0.0))
        losses(TransformerFeedForward.HParams.config(input_dims=4, hidden_dims=4))
        # Auxiliary losses are not collected, so this is no training step.
        losses(EXPERTS, mutable=())
