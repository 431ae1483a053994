"""The base layer: weights, children, what flows down, what is never lost, and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from layerkit.base_layer import BaseHParams, BaseLayer, WeightHParams, derive_fields
from layerkit.config import Config, sub_config_field
from layerkit.layers.linears import FeedForward, Linear
from layerkit.sharding import BoundSharding, ShardingRules
from layerkit.weights import WeightInit, logical_axes

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
    """Runs the layers built with it, in any container, then `num_copies` of a template."""

    first: Any = None
    second: Any = None
    several: Any = ()
    link_tpl: Any = sub_config_field(Linear.HParams)
    num_copies: int = 0

    def setup(self):
        self.create_children("links", [self.link_tpl] * self.num_copies, **SQUARE)

    def fprop(self, x):
        several = self.several.values() if hasattr(self.several, "values") else self.several
        for layer in [self.first, self.second, *several, *self.links]:
            x = x if layer is None else layer(x)
        return x


class Assigning(BaseLayer):
    """Makes children as plain Flax does, by assignment."""

    def setup(self):
        self.one = Linear(**SQUARE)
        self.many = [Linear(**SQUARE), Linear(**SQUARE)]
        self.named = {"a": Linear(**SQUARE)}

    def fprop(self, x):
        return self.named["a"](self.many[1](self.many[0](self.one(x))))


class Declaring(BaseLayer):
    """Has the weight that it is told to have, and gives the one that it is asked for."""

    weight: Any = None

    def setup(self):
        self.create_variable("scale", self.weight)

    def fprop(self, name):
        return getattr(self.theta, name)


class Wrapping(BaseLayer):
    """Makes one child of whatever it is given."""

    child_tpl: Any = sub_config_field(None)

    def setup(self):
        self.create_child("child", self.child_tpl)


class Counter(BaseLayer):
    """Counts its calls in a variable that is not trained."""

    def setup(self):
        start = WeightHParams((1,), axes=("norm",), init=WeightInit.Constant(0.0))
        self.create_variable("calls", start, trainable=False)

    def fprop(self, x):
        self.update_var("calls", self.get_var("calls") + 1.0)
        return x


class Reporting(BaseLayer):
    """Two auxiliary losses of one name and two summaries of one name."""

    def fprop(self, x):
        for factor in (1.0, 2.0):
            self.add_aux_loss("size", factor * jnp.mean(x))
            self.add_summary("mean", factor * jnp.mean(x))
        return x


INITIALISED = {
    "one layer": square(),
    "a template": FeedForward.HParams.config(**SQUARE),
    "copies of a template": Chain.HParams.config(num_copies=3),
    "a built field": Chain.HParams.config(first=square()),
    "a shared built field": (lambda c: Chain.HParams.config(first=c, second=c))(square()),
    "built layers in a list": Chain.HParams.config(several=[square(), square()]),
    "built layers in a dict": Chain.HParams.config(several={"a": square()}),
    "a built layer in a built layer": Chain.HParams.config(
        first=Chain.HParams.config(first=square(), num_copies=1)
    ),
    "a built layer in a template": Chain.HParams.config(
        first=Config(Chain, num_copies=2, link_tpl=square(shared_weight_id="x"))
    ),
    "children assigned in setup": Assigning.HParams.config(),
    "a variable that fprop updates": Counter.HParams.config(),
    "auxiliary losses": Reporting.HParams.config(),
}


class TestInit:
    @pytest.mark.parametrize("train", [False, True])
    @pytest.mark.parametrize("config", INITIALISED.values(), ids=INITIALISED.keys())
    def test_without_and_with_inputs_gives_the_same_bits(self, config, train):
        layer = config.Instantiate(train=train)
        bare, run = layer.init(KEY), layer.init(KEY, X)
        assert shapes(bare) == shapes(run)
        jax.tree.map(np.testing.assert_array_equal, bare, run)

    def test_by_another_method(self):
        class Other(Chain):
            def backwards(self, x):
                return self.links[0](self.links[1](x))

        layer = Other(num_copies=2)
        bare = layer.init(KEY)
        jax.tree.map(np.testing.assert_array_equal, bare, layer.init(KEY, X, method="backwards"))
        jax.tree.map(
            np.testing.assert_array_equal, bare, layer.init(KEY, X, method=Other.backwards)
        )

    def test_takes_a_key_by_stream(self):
        jax.tree.map(
            np.testing.assert_array_equal,
            Linear(**SQUARE).init({"params": KEY}),
            Linear(**SQUARE).init(KEY),
        )

    def test_of_a_layer_without_weights(self):
        assert Reporting().init(KEY) == Reporting().init(KEY, X) == {"params": {}}

    def test_every_weight_draws_from_a_stream_of_its_own(self):
        params = Chain(num_copies=3).init(KEY)["params"]
        drawn = np.stack([params[f"links_{i}"]["w"] for i in range(3)])
        assert len(np.unique(drawn)) == drawn.size

    def test_a_weight_depends_on_its_path_not_on_its_neighbours(self):
        few, many = (Chain(num_copies=n).init(KEY)["params"] for n in (1, 3))
        np.testing.assert_array_equal(few["links_0"]["w"], many["links_0"]["w"])

    def test_another_key_gives_other_weights(self):
        layer = Linear(**SQUARE)
        other = layer.init(jax.random.key(1))["params"]["w"]
        assert np.all(layer.init(KEY)["params"]["w"] != other)

    def test_boxed_tells_the_axes_without_drawing(self):
        boxed = jax.eval_shape(FeedForward(**SQUARE).init_boxed, KEY)
        assert logical_axes(boxed) == {
            "params": {"linear": {"w": ("embed", "mlp")}, "bias": {"b": ("mlp",)}}
        }
        assert logical_axes(Counter().init_boxed(KEY, X)["non_trainable"]) == {"calls": ("norm",)}

    def test_a_plain_flax_module_below_is_refused(self):
        text = refusal(TypeError, lambda: Chain(first=nn.Dense(2)).init(KEY))
        assert text == (
            "Chain(): Dense is a plain Flax module, whose weights cannot be created without inputs"
        )

    def test_a_layer_works_as_an_ordinary_flax_module(self):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(Linear(**SQUARE, name="in")(x))

        variables = nn.meta.unbox(Net().init(KEY, X))
        assert shapes(variables["params"]["in"]) == W
        assert Net().apply(variables, X).shape == (2, 3)


class TestWeights:
    def test_theta_is_cast_to_the_compute_dtype(self):
        layer = Declaring(weight=WeightHParams((2,), axes=("norm",)), fprop_dtype="bfloat16")
        variables = layer.init(KEY)
        assert variables["params"]["scale"].dtype == jnp.float32
        assert layer.apply(variables, "scale").dtype == jnp.bfloat16

    def test_a_weight_may_have_a_dtype_of_its_own(self):
        weight = WeightHParams((2,), axes=("norm",), dtype="float16")
        drawn = Declaring(weight=weight, dtype=jnp.bfloat16).init(KEY)["params"]["scale"]
        assert drawn.dtype == jnp.float16

    def test_a_parent_may_read_a_weight_of_a_child_that_it_has_not_called(self):
        class Tied(BaseLayer):
            def setup(self):
                self.create_child("linear", square())
                self.create_child("counter", Counter.HParams.config())

            def fprop(self, x):
                return x @ self.linear.theta.w.T + self.counter.get_var("calls")

        variables = Tied().init(KEY)
        w = np.asarray(variables["params"]["linear"]["w"])
        np.testing.assert_allclose(Tied().apply(variables, X), X @ w.T, rtol=1e-6)

    def test_an_unknown_weight_names_the_near_one(self):
        layer = Declaring(weight=WeightHParams((2,), axes=("norm",)))
        text = refusal(AttributeError, lambda: layer.apply(layer.init(KEY), "scael"))
        assert text == (
            "Declaring() has no weight 'scael'; did you mean 'scale'? Its weights: scale."
        )

    @pytest.mark.parametrize(
        ("weight", "text"),
        [
            (
                WeightHParams((2, 3), axes=("embed",)),
                "Declaring().scale: axes ('embed',) do not name the dimensions of (2, 3)",
            ),
            (
                WeightHParams((2, 0), axes=("embed", "mlp")),
                "Declaring().scale: every size of its shape must be at least 1, got embed=2, mlp=0",
            ),
        ],
    )
    def test_a_wrong_declaration_is_refused(self, weight, text):
        assert refusal(ValueError, lambda: Declaring(weight=weight).init(KEY)) == text

    def test_a_variable_counts_and_is_handed_back(self):
        variables = Counter().init(KEY)
        assert shapes(variables) == {"params": {}, "non_trainable": {"calls": (1,)}}
        for calls in (1.0, 2.0):
            _, updated = Counter().apply(variables, X, mutable=["non_trainable"])
            variables = {**variables, **updated}
            assert float(variables["non_trainable"]["calls"][0]) == calls

    def test_an_update_is_never_lost(self):
        text = refusal(ValueError, lambda: Counter().apply(Counter().init(KEY), X))
        assert text == (
            "Counter().calls: the update would be lost; apply with mutable=['non_trainable', …]"
        )


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
        text = refusal(ValueError, lambda: built.apply(built.init(KEY), X))
        assert text == ("Linear(linear): no sharding rule for logical axis 'batch'. Known: embed.")
        free = built.clone(sharding=None)
        assert free.apply(free.init(KEY), X).shape == (2, 2)

    def test_a_wrong_dtype_names_the_field(self):
        layer = Linear(**SQUARE, fprop_dtype="bfloat61")
        text = refusal(ValueError, lambda: layer.apply(layer.init(KEY), X))
        assert (
            text == "fprop_dtype='bfloat61' is not a dtype; did you mean 'bfloat16' or 'float64'?"
        )


class TestCast:
    def test_floats_take_the_compute_dtype_and_the_rest_stays(self):
        layer = Reporting(fprop_dtype=jnp.bfloat16)
        assert layer.cast(X).dtype == jnp.bfloat16
        assert layer.cast(np.arange(3)).dtype == jnp.int32
        assert layer.cast(np.array([True])).dtype == jnp.bool_

    def test_a_numpy_input_does_not_leave_the_compute_dtype_again(self):
        assert (Reporting(fprop_dtype=jnp.bfloat16).cast(X) * 0.5).dtype == jnp.bfloat16


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
        text = refusal(ValueError, lambda: layer.init(KEY))
        assert text.splitlines()[0] == (
            "Chain(second).links_0 and Chain(first).links_0 share weights"
            " (shared_weight_id='a') but their configs differ:"
        )
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
        assert refusal(ValueError, lambda: config.Instantiate().init(KEY)) == (
            "FeedForward().linear: input_dims=5 is set in its config, but its owner derives"
            " input_dims=2; leave the field out or make them agree"
        )
        config.linear_tpl.input_dims = 2
        assert shapes(config.Instantiate().init(KEY))["params"]["linear"] == {"w": (2, 3)}

    def test_derived_fields_may_be_templates(self):
        theirs = Linear.HParams.config(weight_axes=("mlp", "embed"))
        config = derive_fields(FeedForward.HParams.config(), "here", linear_tpl=theirs)
        assert config.linear_tpl == theirs

    def test_deriving_leaves_the_template_and_what_is_none(self):
        template = Linear.HParams.config(output_dims=3)
        derived = derive_fields(template, "here", input_dims=2, output_dims=None)
        assert (derived.input_dims, derived.output_dims, template.input_dims) == (2, 3, 0)

    def test_children_have_their_names_in_errors(self):
        config = Chain.HParams.config(first=Config(Chain, first=Linear.HParams.config()))
        text = refusal(ValueError, lambda: config.Instantiate().init(KEY))
        assert text == "Linear(first/first): input_dims=0, expected at least 1"


class Stochastic(BaseLayer):
    def fprop(self, x):
        return self.next_prng_key()


class TestCollections:
    def test_auxiliary_losses_of_one_name_are_all_kept(self):
        _, sown = Reporting(train=True).apply({}, X, mutable=["aux_loss"])
        mean = X.mean()
        assert sown == {"aux_loss": {"size": (mean, 2.0 * mean)}}
        assert all(value.dtype == jnp.float32 for value in jax.tree.leaves(sown))

    def test_an_auxiliary_loss_of_training_is_never_lost(self):
        text = refusal(ValueError, lambda: Reporting(train=True).apply({}, X))
        assert text == (
            "Reporting(): auxiliary loss 'size' would be lost; apply with mutable=['aux_loss', …]"
        )

    def test_evaluation_needs_no_collection_for_it(self):
        np.testing.assert_array_equal(Reporting().apply({}, X), X)

    def test_auxiliary_losses_have_gradients_and_summaries_none(self):
        def total(x, collection):
            _, sown = Reporting().apply({}, x, mutable=[collection])
            return sum(jnp.sum(value) for value in jax.tree.leaves(sown))

        # Two values, 1·mean and 2·mean, of four elements.
        np.testing.assert_allclose(jax.grad(total)(X, "aux_loss"), np.full((2, 2), 3.0 / 4.0))
        np.testing.assert_array_equal(jax.grad(total)(X, "summaries"), np.zeros((2, 2)))

    def test_summaries_of_one_name_are_all_kept_under_the_path_of_the_layer(self):
        layer = Chain.HParams.config(first=Reporting.HParams.config()).Instantiate()
        _, sown = layer.apply({}, X, mutable=["summaries"])
        assert sown == {"summaries": {"first": {"mean": (X.mean(), 2.0 * X.mean())}}}

    def test_a_layer_that_needs_random_numbers_says_so(self):
        layer = Chain.HParams.config(first=Stochastic.HParams.config()).Instantiate()
        assert refusal(ValueError, lambda: layer.apply({}, X)) == (
            "Stochastic(first) needs random numbers: apply with rngs={'random': key}"
        )

    def test_random_keys_are_of_the_step_and_the_layer(self):
        layer = Chain.HParams.config(first=Stochastic.HParams.config()).Instantiate()

        def draw(seed, layer=layer):
            return jax.random.key_data(layer.apply({}, X, rngs={"random": jax.random.key(seed)}))

        np.testing.assert_array_equal(draw(0), draw(0))
        assert np.any(draw(0) != draw(1))
        assert np.any(draw(0) != draw(0, Stochastic()))


class TestStatic:
    """Modules are values: they hash, compare, copy, and key JAX's caches."""

    def feed_forward(self):
        config = FeedForward.HParams.config(**SQUARE, sharding=BoundSharding(None))
        config.linear_tpl.weight_init = WeightInit.Gaussian(0.5)
        return config

    def test_modules_of_equal_configs_are_equal_and_hash_alike(self):
        first, second = self.feed_forward().Instantiate(), self.feed_forward().Instantiate()
        assert first == second and hash(first) == hash(second)
        other = self.feed_forward()
        other.linear_tpl.weight_init = WeightInit.Gaussian(0.6)
        assert other.Instantiate() != first

    def test_jit_takes_a_module_as_a_static_argument_and_traces_once_per_value(self):
        traced = []

        @jax.jit
        def weights_of(key):
            return self.feed_forward().Instantiate().init(key)

        def apply(layer, variables, x):
            traced.append(layer)
            return layer.apply(variables, x)

        run = jax.jit(apply, static_argnums=0)
        variables = weights_of(KEY)
        outputs = run(self.feed_forward().Instantiate(), variables, X)
        run(self.feed_forward().Instantiate(), variables, X)
        assert len(traced) == 1
        run(self.feed_forward().Instantiate().clone(train=True), variables, X)
        assert len(traced) == 2
        eager = self.feed_forward().Instantiate().apply(variables, X)
        np.testing.assert_allclose(outputs, eager, rtol=1e-6)

    @pytest.mark.parametrize(
        "duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
    )
    def test_copies_and_pickles(self, duplicate):
        layer = self.feed_forward().Instantiate()
        twin = duplicate(layer)
        assert twin == layer and hash(twin) == hash(layer)
        jax.tree.map(np.testing.assert_array_equal, twin.init(KEY), layer.init(KEY))

    def test_edits_of_the_config_do_not_reach_the_module(self):
        config = self.feed_forward()
        layer = config.Instantiate()
        before = layer.init(KEY)
        config.output_dims = 7
        config.linear_tpl.weight_init = WeightInit.Constant(0.0)
        jax.tree.map(np.testing.assert_array_equal, before, layer.init(KEY))

    def test_one_module_serves_many_calls(self):
        layer = Chain.HParams.config(num_copies=2, link_tpl=square(shared_weight_id="a"))
        built = layer.Instantiate()
        first, second = built.init(KEY), built.init(jax.random.key(1))
        assert np.any(jax.tree.leaves(first)[0] != jax.tree.leaves(second)[0])
        np.testing.assert_array_equal(built.apply(first, X), layer.Instantiate().apply(first, X))


class TestFields:
    def test_are_keyword_only(self):
        with pytest.raises(TypeError, match="positional"):
            Linear(2, 3)
        with pytest.raises(TypeError, match="unexpected keyword argument 'input_dimz'"):
            Linear(input_dimz=2)

    def test_nested_hparams_and_direct_fields_are_the_same_thing(self):
        class Direct(BaseLayer):
            dims: int = 3

        class Nested(BaseLayer):
            class HParams(BaseHParams):
                dims: int = 3

        assert Direct().dims == Nested().dims == 3
        assert Direct.HParams.config(dims=4).Instantiate().dims == 4
        assert Nested.HParams.config(dims=4).Instantiate().dims == 4

    def test_a_subclass_changes_a_default_without_annotation_even_to_a_callable(self):
        class Half(Linear):
            class HParams(Linear.HParams):
                fprop_dtype = jnp.bfloat16

        class AlsoHalf(Linear):
            fprop_dtype = jnp.bfloat16

        for cls in (Half, AlsoHalf):
            layer = cls.HParams.config(**SQUARE).Instantiate()
            assert layer.apply(layer.init(KEY), X).dtype == jnp.bfloat16

    def test_a_layer_without_fprop_says_so(self):
        class Empty(BaseLayer):
            pass

        text = refusal(NotImplementedError, lambda: Empty().apply({}, X))
        assert text.endswith("Empty does not define fprop")
