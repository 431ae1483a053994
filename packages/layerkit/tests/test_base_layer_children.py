"""Layers in layers: what a child inherits, what it shares, and what its owner may decide."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from layerkit.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.derived_fields import derive_fields
from layerkit.errors import ConfigError
from layerkit.field_types import FieldTypeError
from layerkit.layers.linears import FeedForward, Linear
from layerkit.sharding import BoundSharding, ShardingRules
from layerkit.weights import WeightInit

KEY = jax.random.key(0)
X = np.array([[1.0, -2.0], [0.5, 4.0]], np.float32)
SQUARE = {"input_dims": 2, "output_dims": 2}
W = {"w": (2, 2)}


def shapes(variables):
    return jax.tree.map(jnp.shape, variables)


def refusal(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def square(**fields):
    return Linear.HParams.config(**SQUARE, **fields)


class Chain(BaseLayer):
    """Runs the layers built with it, then `num_copies` of a template."""

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
    """Makes one child of whatever it is given."""

    child_tpl: Any = sub_config_field(None)

    def setup(self):
        self.create_child("child", self.child_tpl)


class Probe(BaseLayer):
    """Tells what it inherits."""

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


class TestInheritance:
    @pytest.mark.parametrize("field", INHERITED)
    def test_flows_to_the_leaves_unless_a_child_sets_its_own(self, field):
        above, own = INHERITED[field]
        assert top_config().Instantiate().apply({}, field) == (None, None)
        assert top_config(**{field: above}).Instantiate().apply({}, field) == (above, above)

        template_sets = top_config(**{field: above})
        setattr(template_sets.middle_tpl.probe_tpl, field, own)
        assert template_sets.Instantiate().apply({}, field) == (own, above)

        built_sets = top_config(**{field: above})
        setattr(built_sets.middle_tpl.built, field, own)
        assert built_sets.Instantiate().apply({}, field) == (above, own)

        between_sets = top_config(**{field: above})
        setattr(between_sets.middle_tpl, field, own)
        assert between_sets.Instantiate().apply({}, field) == (own, own)

    @pytest.mark.parametrize("field", INHERITED)
    def test_a_clone_changes_all_below(self, field):
        first, second = INHERITED[field]
        layer = top_config(**{field: first}).Instantiate().clone(**{field: second})
        assert layer.apply({}, field) == (second, second)

    def test_dtype_and_initialiser_reach_the_weights(self):
        layer = FeedForward(**SQUARE, dtype=jnp.bfloat16, params_init=WeightInit.Constant(3.0))
        w = layer.init(KEY)["params"]["linear"]["w"]
        assert w.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(w, np.float32), np.full((2, 2), 3.0))

    def test_sharding_reaches_the_constraints(self):
        layer = FeedForward.HParams.config(**SQUARE, sharding=BoundSharding(None, RULES))
        layer.linear_tpl.activation_axes = ("batch", "mlp")
        built = layer.Instantiate()
        with pytest.raises(ConfigError, match="logical axis='batch'") as caught:
            built.apply(built.init(KEY), X)
        assert caught.value.owner == "Linear(linear)"
        free = built.clone(sharding=None)
        assert free.apply(free.init(KEY), X).shape == (2, 2)

    def test_a_wrong_dtype_names_the_field(self):
        layer = Linear(**SQUARE, fprop_dtype="bfloat61")
        with pytest.raises(ConfigError, match="fprop_dtype='bfloat61'"):
            layer.apply(layer.init(KEY), X)

    @pytest.mark.parametrize("field", ["dtype", "fprop_dtype"])
    @pytest.mark.parametrize("value", ["int32", "bool", "complex64"])
    def test_a_dtype_that_is_not_floating_is_refused(self, field, value):
        layer = FeedForward(**SQUARE, **{field: value})
        with pytest.raises(ConfigError, match=rf"Linear\(linear\): {field}='{value}'"):
            layer.init(KEY, X)

    def test_an_initialiser_of_another_type_raises(self, raises):
        with raises(FieldTypeError, owner="FeedForward()", field="params_init", value=0.02):
            FeedForward(**SQUARE, params_init=0.02).init(KEY)


class TestSharing:
    def test_the_same_config_in_built_fields_is_one_set_of_weights(self):
        linear = square()
        layer = Chain.HParams.config(first=linear, second=linear).Instantiate()
        variables = layer.init(KEY)
        assert shapes(variables) == {"params": {"first": W}}
        w = np.asarray(variables["params"]["first"]["w"])
        np.testing.assert_allclose(layer.apply(variables, X), X @ w @ w, rtol=1e-5)

    def test_equal_but_distinct_configs_are_two_sets(self):
        layer = Chain.HParams.config(first=square(), second=square()).Instantiate()
        assert shapes(layer.init(KEY)) == {"params": {"first": W, "second": W}}

    def test_a_template_used_several_times_makes_as_many_sets(self):
        layer = Chain.HParams.config(num_copies=2).Instantiate()
        assert shapes(layer.init(KEY)) == {"params": {"links_0": W, "links_1": W}}

    def test_the_same_config_in_two_templates_is_two_sets(self):
        linear = square()
        layer = Chain.HParams.config(
            first=Config(Chain, link_tpl=linear, num_copies=1),
            second=Config(Chain, link_tpl=linear, num_copies=1),
        ).Instantiate()
        assert shapes(layer.init(KEY)) == {
            "params": {"first": {"links_0": W}, "second": {"links_0": W}}
        }

    def test_sharing_inside_a_template_stays_inside_each_copy(self):
        linear = square()
        pair = Chain.HParams.config(first=linear, second=linear)

        class Pairs(BaseLayer):
            pair_tpl: Any = sub_config_field(None)

            def setup(self):
                self.create_children("pairs", [self.pair_tpl] * 2)

            def fprop(self, x):
                return self.pairs[1](self.pairs[0](x))

        layer = Pairs.HParams.config(pair_tpl=pair).Instantiate()
        assert shapes(layer.init(KEY)) == {
            "params": {"pairs_0": {"first": W}, "pairs_1": {"first": W}}
        }

    def test_a_config_shared_across_depths(self):
        linear = square()
        inner = Chain.HParams.config(first=linear)
        layer = Chain.HParams.config(first=inner, second=linear).Instantiate()
        variables = layer.init(KEY, X)
        (w,) = jax.tree.leaves(variables)
        np.testing.assert_allclose(layer.apply(layer.init(KEY), X), X @ w @ w, rtol=1e-5)

    def test_gradients_of_shared_weights_add_up(self):
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

    def test_a_shared_weight_id_joins_children_of_templates_anywhere(self):
        linear = square(shared_weight_id="tied")
        layer = Chain.HParams.config(
            first=Config(Chain, link_tpl=linear, num_copies=2),
            second=Config(Chain, link_tpl=linear.clone(), num_copies=1),
        ).Instantiate()
        variables = layer.init(KEY)
        (w,) = jax.tree.leaves(variables)
        assert shapes(variables) == shapes(layer.init(KEY, X))
        np.testing.assert_allclose(layer.apply(variables, X), X @ w @ w @ w, rtol=1e-4)

    def test_another_id_is_another_layer(self):
        layer = Chain.HParams.config(
            first=Config(Chain, link_tpl=square(shared_weight_id="a"), num_copies=1),
            second=Config(Chain, link_tpl=square(shared_weight_id="b"), num_copies=1),
        ).Instantiate()
        assert len(jax.tree.leaves(layer.init(KEY))) == 2

    def test_two_models_do_not_share(self):
        config = Chain.HParams.config(num_copies=1, link_tpl=square(shared_weight_id="a"))
        first, second = config.Instantiate(), config.Instantiate()
        assert first.init(KEY)["params"].keys() == second.init(KEY)["params"].keys()
        changed = config.clone()
        changed.link_tpl.weight_init = WeightInit.Constant(1.0)
        assert np.all(changed.Instantiate().init(KEY)["params"]["links_0"]["w"] == 1.0)

    def test_one_id_with_two_configs_is_refused(self):
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

    def test_parents_that_would_give_a_shared_layer_different_things_are_refused(self):
        linear = square()
        layer = Chain.HParams.config(
            first=Config(Chain, first=linear, fprop_dtype="bfloat16"),
            second=Config(Chain, first=linear),
        ).Instantiate()
        assert refusal(ValueError, lambda: layer.init(KEY)) == (
            "Linear(first/first) is shared with Chain(second), which would give it another"
            " fprop_dtype: 'bfloat16' and None; set fprop_dtype on the shared config"
        )
        agreed = Chain.HParams.config(
            first=Config(Chain, first=square(), fprop_dtype="bfloat16"),
            second=Config(Chain, first=square()),
        )
        agreed.first.first.fprop_dtype = "float32"
        agreed.second.first = agreed.first.first
        assert len(jax.tree.leaves(agreed.Instantiate().init(KEY))) == 1


class TestChildren:
    def test_what_is_not_the_config_of_a_layer_is_refused(self):
        def text(template):
            return refusal(TypeError, lambda: Wrapping(child_tpl=template).init(KEY))

        assert text(None) == "Wrapping().child needs the config of a layer, got None"
        assert text(Config(nn.Dense, features=3)) == (
            "Wrapping().child needs the config of a layer, got one of"
            " <class 'flax.linen.linear.Dense'>"
        )

    def test_a_derived_field_that_the_template_contradicts_is_refused(self):
        config = FeedForward.HParams.config(input_dims=2, output_dims=3)
        config.linear_tpl.input_dims = 5
        with pytest.raises(ConfigError, match=r"^FeedForward\(\)\.linear: input_dims=5\. .* 2,"):
            config.Instantiate().init(KEY)
        config.linear_tpl.input_dims = 2
        assert shapes(config.Instantiate().init(KEY))["params"]["linear"] == {"w": (2, 3)}

    def test_a_value_that_equals_the_default_is_no_less_explicit(self):
        template = Chain.HParams.config(num_copies=0)
        with pytest.raises(ConfigError, match=r"^here: num_copies=0\."):
            derive_fields(template, "here", num_copies=2)
        del template.num_copies
        assert derive_fields(template, "here", num_copies=2).num_copies == 2
        # None is how a config says that it leaves a field to others.
        template.first = None
        assert derive_fields(template, "here", first=square()).first == square()

    def test_derived_fields_may_be_templates(self):
        theirs = Linear.HParams.config(weight_axes=("mlp", "embed"))
        config = derive_fields(FeedForward.HParams.config(), "here", linear_tpl=theirs)
        assert config.linear_tpl == theirs

    def test_deriving_leaves_the_template_and_what_is_none(self):
        template = Linear.HParams.config(output_dims=3)
        derived = derive_fields(template, "here", input_dims=2, output_dims=None)
        assert (derived.input_dims, derived.output_dims, template.input_dims) == (2, 3, 0)

    def test_errors_name_the_path_of_a_child(self, raises):
        config = Chain.HParams.config(first=Config(Chain, first=Linear.HParams.config()))
        with raises(ConfigError, owner="Linear(first/first)", field="input_dims", value=0):
            config.Instantiate().init(KEY)
