"""Tests of children of layers: inherited fields, shared weights and derived fields."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from layerkit.base.base_layer import BaseLayer
from layerkit.base.sharding import BoundSharding, ShardingRules
from layerkit.base.weights import WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.field_types import FieldTypeError
from layerkit.config.hparams import derive_fields
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import FeedForward, Linear

KEY = jax.random.key(0)
X = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)
SQUARE = {"input_dims": 2, "output_dims": 2}
W = {"w": (2, 2)}


def shapes(variables):
    return jax.tree.map(jnp.shape, variables)


def square(**fields):
    return Linear.HParams.config(**SQUARE, **fields)


class Chain(BaseLayer):
    """A sequence of built layers, then `num_copies` of a template."""

    first: Any = None
    second: Any = None
    link_tpl: Any = sub_config_field(Linear.HParams)
    num_copies: int = 0

    def setup(self):
        self.create_children("links", [self.link_tpl] * self.num_copies, **SQUARE)

    def fprop(self, x):
        for layer in [self.first, self.second, *self.links]:
            x = x if layer is None else layer(x)
        return x


class Wrapping(BaseLayer):
    """A layer with one child of a given template."""

    child_tpl: Any = sub_config_field(None)

    def setup(self):
        self.create_child("child", self.child_tpl)


class Probe(BaseLayer):
    """A layer that returns the inherited value of a field."""

    def fprop(self, field):
        return self.inherited(field)


class Middle(BaseLayer):
    probe_tpl: Any = sub_config_field(Probe.HParams)
    built: Any = None

    def setup(self):
        self.create_child("probe", self.probe_tpl)

    def fprop(self, field):
        return self.probe(field), self.built(field)


class Top(BaseLayer):
    middle_tpl: Any = sub_config_field(Middle.HParams)

    def setup(self):
        self.create_child("middle", self.middle_tpl)

    def fprop(self, field):
        return self.middle(field)


RULES = ShardingRules.of(embed=None)
INHERITED = {
    "dtype": (jnp.bfloat16, jnp.float16),
    "fprop_dtype": (jnp.bfloat16, jnp.float32),
    "params_init": (WeightInit.Gaussian(1.0), WeightInit.Constant(0.0)),
    "train": (True, False),
    "sharding": (BoundSharding(None), BoundSharding(None, RULES)),
}


def top_config(**fields):
    config = Top.HParams.config(**fields)
    config.middle_tpl.built = Probe.HParams.config()
    return config


@pytest.mark.parametrize("field", INHERITED)
def test_inherited_field_reaches_descendants_that_do_not_set_it(field):
    above, own = INHERITED[field]
    assert top_config().Instantiate().apply({}, field) == (None, None)
    layer = top_config(**{field: above}).Instantiate()
    assert layer.apply({}, field) == (above, above)
    assert layer.clone(**{field: own}).apply({}, field) == (own, own)

    # The template sets the field, the built layer, or the layer between.
    for setter, expected in (
        (lambda middle: middle.probe_tpl, (own, above)),
        (lambda middle: middle.built, (above, own)),
        (lambda middle: middle, (own, own)),
    ):
        config = top_config(**{field: above})
        setattr(setter(config.middle_tpl), field, own)
        assert config.Instantiate().apply({}, field) == expected


def test_inherited_sharding_reaches_constraints(raises):
    layer = FeedForward.HParams.config(**SQUARE, sharding=BoundSharding(None, RULES))
    layer.linear_tpl.activation_axes = ("batch", "mlp")
    built = layer.Instantiate()
    free = built.clone(sharding=None)
    with raises(ConfigError, owner="Linear(linear).w", field="logical axis", value="mlp"):
        built.apply(free.init(KEY), X)
    assert free.apply(free.init(KEY), X).shape == (2, 2)


LINEAR = square()
TIED = square(shared_weight_id="tied")
SHARING = {
    "one config in two fields": Chain.HParams.config(first=LINEAR, second=LINEAR),
    "one config at two depths": Chain.HParams.config(
        first=Chain.HParams.config(first=LINEAR), second=LINEAR
    ),
    "one shared weight id in copies": Chain.HParams.config(link_tpl=TIED, num_copies=2),
    "one shared weight id": Chain.HParams.config(
        first=Config(Chain, link_tpl=TIED, num_copies=1),
        second=Config(Chain, link_tpl=TIED.clone(), num_copies=1),
    ),
}


@pytest.mark.parametrize("config", SHARING.values(), ids=SHARING)
def test_layers_share_weights(config):
    layer = config.Instantiate()
    variables = layer.init(KEY)
    (w,) = jax.tree.leaves(variables)
    assert shapes(variables) == shapes(layer.init(KEY, X))
    np.testing.assert_allclose(layer.apply(variables, X), X @ w @ w, rtol=1e-5)


ALSO_APART = {
    "equal configs": (Chain.HParams.config(first=square(), second=square()), ("first", "second")),
    "copies of a template": (Chain.HParams.config(num_copies=2), ("links_0", "links_1")),
    "two shared weight ids": (
        Chain.HParams.config(
            first=Config(Chain, link_tpl=square(shared_weight_id="a"), num_copies=1),
            second=Config(Chain, link_tpl=square(shared_weight_id="b"), num_copies=1),
        ),
        ("first/links_0", "second/links_0"),
    ),
}


@pytest.mark.parametrize(("config", "paths"), ALSO_APART.values(), ids=ALSO_APART)
def test_layers_do_not_share_weights_otherwise(config, paths):
    params = config.Instantiate().init(KEY)["params"]
    assert flatten_dict(shapes(params), sep="/") == {f"{path}/w": (2, 2) for path in paths}


def test_copies_of_a_template_share_weights_internally():
    linear = square()
    pair = Chain.HParams.config(first=linear, second=linear)

    class Pairs(BaseLayer):
        pair_tpl: Any = sub_config_field(None)

        def setup(self):
            self.create_children("pairs", [self.pair_tpl] * 2)

        def fprop(self, x):
            return self.pairs[1](self.pairs[0](x))

    layer = Pairs.HParams.config(pair_tpl=pair).Instantiate()
    assert shapes(layer.init(KEY)) == {"params": {"pairs_0": {"first": W}, "pairs_1": {"first": W}}}


def test_gradients_of_shared_weights_are_summed():
    linear = square()
    layer = Chain.HParams.config(first=linear, second=linear).Instantiate()
    apart = Chain.HParams.config(first=square(), second=square()).Instantiate()
    shared = layer.init(KEY)["params"]["first"]

    def gradient(layer, params):
        return jax.grad(lambda p: jnp.sum(layer.apply({"params": p}, X) ** 2))(params)

    two = gradient(apart, {"first": shared, "second": shared})
    np.testing.assert_allclose(
        gradient(layer, {"first": shared})["first"]["w"],
        two["first"]["w"] + two["second"]["w"],
        rtol=1e-5,
    )


def test_models_do_not_share_weights():
    config = Chain.HParams.config(num_copies=1, link_tpl=square(shared_weight_id="a"))
    config.Instantiate().init(KEY)
    changed = config.clone()
    changed.link_tpl.weight_init = WeightInit.Constant(1.0)
    assert np.all(changed.Instantiate().init(KEY)["params"]["links_0"]["w"] == 1.0)


def test_shared_weight_id_with_two_configs_raises():
    layer = Chain.HParams.config(
        first=Config(Chain, link_tpl=square(shared_weight_id="a"), num_copies=1),
        second=Config(
            Chain,
            link_tpl=square(shared_weight_id="a", weight_init=WeightInit.Constant(1.0)),
            num_copies=1,
        ),
    ).Instantiate()
    with pytest.raises(ConfigError) as caught:
        layer.init(KEY)
    assert caught.value.owner == "Chain(second).links_0"
    assert (caught.value.field, caught.value.value) == ("shared_weight_id", "a")
    text = str(caught.value)
    assert text.count("Config[Linear") == 2 and text.count("constant") == 1


def test_shared_layer_with_different_inherited_fields_raises(raises):
    linear = square()
    layer = Chain.HParams.config(
        first=Config(Chain, first=linear, fprop_dtype="bfloat16"),
        second=Config(Chain, first=linear),
    ).Instantiate()
    with raises(ConfigError, field="fprop_dtype"):
        layer.init(KEY)
    agreed = Chain.HParams.config(
        first=Config(Chain, first=square(), fprop_dtype="bfloat16"),
        second=Config(Chain, first=square()),
    )
    agreed.first.first.fprop_dtype = "float32"
    agreed.second.first = agreed.first.first
    assert len(jax.tree.leaves(agreed.Instantiate().init(KEY))) == 1


@pytest.mark.parametrize("template", [None, Config(nn.Dense, features=3)], ids=["none", "flax"])
def test_child_that_is_no_layer_config_raises(raises, template):
    with raises(FieldTypeError, owner="Wrapping()", field="child", value=template):
        Wrapping(child_tpl=template).init(KEY)


def test_template_that_contradicts_a_derived_field_raises(raises):
    config = FeedForward.HParams.config(input_dims=2, output_dims=3)
    config.linear_tpl.input_dims = 5
    with raises(ConfigError, owner="FeedForward().linear", field="input_dims", value=5):
        config.Instantiate().init(KEY)
    config.linear_tpl.input_dims = 2
    assert shapes(config.Instantiate().init(KEY))["params"]["linear"] == {"w": (2, 3)}


def test_derive_fields_keeps_the_template_and_skips_none():
    template = Linear.HParams.config(output_dims=3)
    derived = derive_fields(template, "here", input_dims=2, output_dims=None)
    assert (derived.input_dims, derived.output_dims, template.input_dims) == (2, 3, 0)
    # Derived fields may be templates.
    config = derive_fields(FeedForward.HParams.config(), "here", linear_tpl=template)
    assert config.linear_tpl == template
