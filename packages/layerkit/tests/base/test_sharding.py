"""Logical axes: the table of rules, its errors, and the shards on devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from layerkit.base.sharding import DEFAULT_RULES, BoundSharding, ShardingRules
from layerkit.base.weights import is_box
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import FeedForward

RULES = ShardingRules.of(embed="fsdp", mlp="tensor", batch=("data", "fsdp"), norm=None)


def make_mesh(*shape, names=("data", "fsdp", "tensor")):
    return jax.sharding.Mesh(np.reshape(jax.devices(), shape), names)


@pytest.fixture(scope="module")
def cube():
    return BoundSharding(make_mesh(2, 2, 2), RULES)


def test_spec_follows_the_rules(cube):
    assert cube.spec(("batch", None, "mlp")) == P(("data", "fsdp"), None, "tensor")
    assert cube.spec(("embed", "mlp")) == P("fsdp", "tensor")
    assert cube.spec(("norm",)) == P(None)
    assert cube.spec(()) == P()


def test_mesh_axes_of_size_one_and_missing_standard_axes_do_not_split():
    bound = BoundSharding(make_mesh(8, 1, 1), RULES.extend(expert="expert"))
    assert bound.spec(("batch", "mlp", "expert")) == P("data", None, None)


def test_axis_is_split_if_its_mesh_axes_have_several_devices(cube):
    assert cube.is_split("mlp") and cube.is_split("batch")
    assert not cube.is_split("norm")
    assert not cube.is_split("length")  # without a rule
    row = BoundSharding(make_mesh(8, 1, 1), RULES.extend(length="context"))
    assert row.is_split("batch") and not row.is_split("mlp")
    assert not row.is_split("length")  # a mesh axis that the mesh lacks
    assert not BoundSharding(None, RULES).is_split("batch")


@pytest.mark.parametrize(
    ("axes", "shape", "data"),
    [
        (("embd",), None, {"field": "logical axis", "value": "embd"}),
        (("zzz",), None, {"field": "logical axis", "value": "zzz"}),
        (("batch", "embed"), None, {"field": "axes", "value": ("batch", "embed")}),
        (("embed", "mlp"), (4, 7), {"field": "dimension 'mlp'", "value": 7}),
        (("batch",), (6,), {"field": "dimension 'batch'", "value": 6}),
        (("embed",), (4, 8), {"field": "axes", "value": ("embed",)}),
    ],
    ids=["near", "unknown", "same_mesh_axis", "uneven_features", "uneven_rows", "rank"],
)
def test_invalid_axes_raise(raises, cube, axes, shape, data):
    with raises(ConfigError, owner="Linear(up).w", **data):
        cube.spec(axes, shape=shape, owner="Linear(up).w")


def test_unknown_names_in_rules_raise(raises, cube):
    with raises(ConfigError, owner=None, value="embd"):
        RULES.replace(embd="data")
    with raises(ConfigError, value="tensr"):
        BoundSharding(cube.mesh, RULES.extend(mine="tensr"))


def test_single_token_or_key_head_is_not_split_and_a_single_row_raises(raises):
    bound = BoundSharding(make_mesh(2, 2, 2, names=("data", "context", "tensor")))
    axes = ("batch", "length", "act_kv_heads", "head_dim")
    assert bound.spec(axes) == P("data", "context", "tensor", None)
    assert bound.spec(axes, shape=(4, 1, 1, 8)) == P("data", None, None, None)
    assert bound.spec(("embed", "kv_heads"), shape=(4, 1)) == P(None, None)
    with raises(ConfigError, field="dimension 'batch'", value=1):
        bound.spec(axes, shape=(1, 4, 2, 8))
    with raises(ConfigError, field="dimension 'act_heads'", value=1):
        bound.spec(("act_heads",), shape=(1,))
    step = jax.jit(lambda x: bound.constrain(x * 1.0, axes))(jnp.ones((4, 1, 1, 8)))
    assert step.sharding.shard_shape(step.shape) == (2, 1, 1, 8)


def test_features_may_be_uneven_if_allowed_and_rows_never(cube):
    axes = ("batch", "mlp")
    assert cube.spec(axes, shape=(8, 7), allow_uneven=True) == P(("data", "fsdp"), "tensor")
    for shape in ((6, 7), (8, 1)):  # (8, 1): fewer features than devices
        with pytest.raises(ConfigError):
            cube.spec(axes, shape=shape, allow_uneven=True)
    experts = BoundSharding(cube.mesh, RULES.extend(expert=None))
    with pytest.raises(ConfigError):
        experts.spec(("expert", "mlp"), shape=(4, 7), allow_uneven=True)


def test_uneven_activation_is_constrained_only_under_jit(cube):
    x = np.arange(8 * 7, dtype=np.float32).reshape(8, 7)
    lowered = jax.jit(lambda x: jnp.cumsum(cube.constrain(x, ("batch", "mlp")), axis=1)).lower(x)
    assert '"tensor"' in lowered.as_text()
    np.testing.assert_array_equal(lowered.compile()(x), np.cumsum(x, axis=1))
    with pytest.raises(ConfigError):
        cube.constrain(jnp.ones(3), ("mlp",))


def test_residuals_must_be_split_at_least_like_their_rows(raises):
    mesh = make_mesh(2, 2, 2, names=("data", "tensor", "context"))
    with raises(ConfigError, field="mesh axes of residual_length", value=("tensor",)):
        BoundSharding(mesh, DEFAULT_RULES.replace(residual_length="tensor"))
    BoundSharding(make_mesh(2, 2, 2), DEFAULT_RULES.replace(residual_length="tensor"))
    BoundSharding(mesh, DEFAULT_RULES.replace(length=None))


def test_names_are_checked_and_nothing_is_split_without_a_mesh(raises):
    bound = BoundSharding(None, RULES)
    x = jnp.ones((3, 5))
    assert bound.constrain(x, ("batch", "mlp")) is x
    assert bound.spec(("batch", "mlp")) == P(None, None)
    with pytest.raises(ConfigError):
        bound.constrain(x, ("bath", "mlp"))
    with raises(ConfigError, field="mesh", value=None):
        bound.sharding(("mlp",))


def test_constrain_shards_under_jit_and_keeps_the_values(cube):
    x = np.arange(8 * 3 * 6, dtype=np.float32).reshape(8, 3, 6)
    y = jax.jit(lambda x: cube.constrain(x * 1.0, ("batch", None, "mlp")))(x)
    assert y.sharding.is_equivalent_to(
        NamedSharding(cube.mesh, P(("data", "fsdp"), None, "tensor")), 3
    )
    assert {shard.data.shape for shard in y.addressable_shards} == {(2, 3, 3)}
    assert len({shard.device for shard in y.addressable_shards}) == 8
    np.testing.assert_array_equal(y, x)


def test_gradient_of_a_gathered_weight_keeps_the_layout_of_the_weight(cube):
    stored = ("embed", "mlp")
    w = jax.device_put(jnp.ones((4, 6)), cube.sharding(stored))

    def differentiate(**options):
        def gather(w):
            return jnp.sum(cube.constrain(w, (None, None), **options) ** 2)

        return jax.jit(jax.grad(gather))(w)

    assert differentiate().sharding.spec == P()
    gradient = differentiate(gradient_axes=stored)
    assert gradient.sharding.is_equivalent_to(w.sharding, 2)
    np.testing.assert_array_equal(gradient, 2 * np.ones((4, 6)))


def test_weights_are_initialized_in_the_layout_of_their_axes():
    bound = BoundSharding(make_mesh(2, 2, 2))
    layer = FeedForward(input_dims=4, output_dims=8, sharding=bound)
    key = jax.random.key(0)
    boxed = jax.eval_shape(layer.init_boxed, key)
    shardings = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    born = jax.jit(layer.init, out_shardings=shardings)(key)
    assert born["params"]["linear"]["w"].addressable_shards[0].data.shape == (2, 4)
    assert born["params"]["bias"]["b"].addressable_shards[0].data.shape == (4,)
    jax.tree.map(np.testing.assert_array_equal, born, layer.init(key))


@given(st.lists(st.sampled_from([*dict(DEFAULT_RULES.table), None]), max_size=4))
def test_spec_names_each_mesh_axis_once_or_raises(axes):
    bound = BoundSharding(make_mesh(2, 2, 2))
    expected = [a for name in axes if name for a in DEFAULT_RULES.mesh_axes(name)]
    expected = [axis for axis in expected if axis in bound.mesh.shape]
    if len(expected) != len(set(expected)):
        with pytest.raises(ConfigError) as caught:
            bound.spec(axes)
        assert caught.value.field == "axes"
    else:
        spec = bound.spec(axes)
        entries = [e if isinstance(e, tuple) else (e,) for e in spec if e is not None]
        assert len(spec) == len(axes)
        assert [axis for entry in entries for axis in entry] == expected
