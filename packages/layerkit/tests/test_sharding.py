"""Logical axes: the table, its errors in full, and what devices really hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from layerkit.layers.linears import FeedForward
from layerkit.sharding import DEFAULT_RULES, BoundSharding, ShardingRules
from layerkit.weights import logical_axes, unbox

RULES = ShardingRules.of(embed="fsdp", mlp="tensor", batch=("data", "fsdp"), norm=None)


def make_mesh(*shape, names=("data", "fsdp", "tensor")):
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


@pytest.fixture(scope="module")
def cube():
    return BoundSharding(make_mesh(2, 2, 2), RULES)


def refusal(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_spec_follows_the_table(cube):
    assert cube.spec(("batch", None, "mlp")) == P(("data", "fsdp"), None, "tensor")
    assert cube.spec(("embed", "mlp")) == P("fsdp", "tensor")
    assert cube.spec(("norm",)) == P(None)
    assert cube.spec(()) == P()


def test_mesh_axes_of_one_device_and_standard_axes_that_the_mesh_lacks_split_nothing():
    bound = BoundSharding(make_mesh(8, 1, 1), RULES.extend(expert="expert"))
    assert bound.spec(("batch", "mlp", "expert")) == P("data", None, None)


def test_replace_changes_a_rule_and_leaves_the_table_it_came_from():
    changed = RULES.replace(mlp=None)
    assert changed.mesh_axes("mlp") == () and RULES.mesh_axes("mlp") == ("tensor",)


def test_extend_adds_a_name_of_your_own(cube):
    bound = BoundSharding(cube.mesh, RULES.extend(mine=("fsdp", "tensor")))
    assert bound.spec(("mine",)) == P(("fsdp", "tensor"))


def test_mesh_axes_may_come_in_a_list():
    assert ShardingRules.of(batch=["data", "fsdp"]) == ShardingRules.of(batch=("data", "fsdp"))
    hash(RULES.replace(batch=["data"]).extend(mine=["fsdp", "tensor"]))


def test_an_axis_is_split_where_its_mesh_axes_have_several_devices(cube):
    assert cube.is_split("mlp") and cube.is_split("batch")
    assert not cube.is_split("norm")
    assert not cube.is_split("length")  # without a rule
    row = BoundSharding(make_mesh(8, 1, 1), RULES.extend(length="context"))
    assert row.is_split("batch") and not row.is_split("mlp")
    assert not row.is_split("length")  # a mesh axis that the mesh lacks
    assert not BoundSharding(None, RULES).is_split("batch")


def test_rules_with_the_same_content_are_equal_and_hash_alike():
    first, second = ShardingRules.of(a="data", b=None), ShardingRules.of(b=None, a="data")
    assert first == second and hash(first) == hash(second)
    mesh = make_mesh(2, 2, 2)
    assert hash(BoundSharding(mesh, first)) == hash(BoundSharding(mesh, second))


def test_an_unknown_name_is_refused_with_its_owner_and_the_near_one(cube):
    assert refusal(lambda: cube.spec(("embd",), owner="Linear(up).w")) == (
        "Linear(up).w: no sharding rule for logical axis 'embd'; did you mean 'embed'?"
        " Known: batch, embed, mlp, norm."
    )
    assert refusal(lambda: RULES.mesh_axes("zzz")) == (
        "no sharding rule for logical axis 'zzz'. Known: batch, embed, mlp, norm."
    )


def test_replacing_an_unknown_name_is_refused():
    assert refusal(lambda: RULES.replace(embd="data")) == (
        "no sharding rule for 'embd'; did you mean 'embed'? Use extend() to add a logical axis."
    )


def test_two_dimensions_on_one_mesh_axis_are_refused(cube):
    assert refusal(lambda: cube.spec(("batch", "embed"), owner="x")) == (
        "x: axes ('batch', 'embed'): 'batch' and 'embed' are both split over mesh axis 'fsdp';"
        " change the rule of one of them"
    )


def test_an_uneven_dimension_is_refused(cube):
    assert refusal(lambda: cube.spec(("embed", "mlp"), shape=(4, 7), owner="Linear(up).w")) == (
        "Linear(up).w: dimension 'mlp' of size 7 cannot be split evenly over mesh axes ('tensor',)"
        " of size 2; use another mesh, another size, or ShardingRules.replace(mlp=None)"
    )
    assert refusal(lambda: cube.spec(("batch",), shape=(6,))) == (
        "dimension 'batch' of size 6 cannot be split evenly over mesh axes ('data', 'fsdp') of size"
        " 4; use another mesh, another size, or ShardingRules.replace(batch=None)"
    )


def test_a_single_token_or_key_head_stays_whole_and_a_single_row_is_refused():
    bound = BoundSharding(make_mesh(2, 2, 2, names=("data", "context", "tensor")))
    axes = ("batch", "length", "act_kv_heads", "head_dim")
    assert bound.spec(axes) == P("data", "context", "tensor", None)
    assert bound.spec(axes, shape=(4, 1, 1, 8)) == P("data", None, None, None)
    assert bound.spec(("embed", "kv_heads"), shape=(4, 1)) == P(None, None)
    assert "'batch' of size 1 cannot" in refusal(lambda: bound.spec(axes, shape=(1, 4, 2, 8)))
    assert "'act_heads' of size 1" in refusal(lambda: bound.spec(("act_heads",), shape=(1,)))
    step = jax.jit(lambda x: bound.constrain(x * 1.0, axes))(jnp.ones((4, 1, 1, 8)))
    assert step.sharding.shard_shape(step.shape) == (2, 1, 1, 8)


def test_features_may_be_uneven_where_asked_and_rows_never(cube):
    axes = ("batch", "mlp")
    assert cube.spec(axes, shape=(8, 7), allow_uneven=True) == P(("data", "fsdp"), "tensor")
    for shape in ((6, 7), (8, 1)):  # no entry for every part of mlp
        message = refusal(lambda shape=shape: cube.spec(axes, shape=shape, allow_uneven=True))
        assert "cannot be split evenly" in message
    experts = BoundSharding(cube.mesh, RULES.extend(expert=None))
    shape = (4, 7)
    message = refusal(lambda: experts.spec(("expert", "mlp"), shape=shape, allow_uneven=True))
    assert message.startswith("dimension 'mlp' of size 7 cannot be split evenly")


def test_an_uneven_activation_is_laid_out_under_jit_alone(cube):
    x = np.arange(8 * 7, dtype=np.float32).reshape(8, 7)
    lowered = jax.jit(lambda x: jnp.cumsum(cube.constrain(x, ("batch", "mlp")), axis=1)).lower(x)
    assert '"tensor"' in lowered.as_text()
    np.testing.assert_array_equal(lowered.compile()(x), np.cumsum(x, axis=1))
    message = refusal(lambda: cube.constrain(jnp.ones(3), ("mlp",)))
    assert message.startswith("dimension 'mlp' of size 3 cannot be split evenly")


def test_a_wrong_number_of_names_is_refused(cube):
    assert refusal(lambda: cube.spec(("embed",), shape=(4, 8), owner="w")) == (
        "w: axes ('embed',) do not name the dimensions of (4, 8)"
    )
    assert refusal(lambda: cube.constrain(jnp.ones((4, 8)), ("embed",), owner="w")) == (
        "w: axes ('embed',) do not name the dimensions of (4, 8)"
    )


def test_a_rule_for_an_unknown_mesh_axis_is_refused(cube):
    assert refusal(lambda: BoundSharding(cube.mesh, RULES.extend(mine="tensr"))) == (
        "the rule for 'mine' names mesh axis 'tensr'; did you mean 'tensor'?"
        " The mesh has data, fsdp, tensor."
    )


def test_a_mesh_may_have_axes_of_its_own():
    bound = BoundSharding(make_mesh(8, names=("rows",)), ShardingRules.of(batch="rows"))
    assert bound.spec(("batch",)) == P("rows")


def test_without_a_mesh_names_are_still_checked_and_nothing_is_split():
    bound = BoundSharding(None, RULES)
    x = jnp.ones((3, 5))
    assert bound.constrain(x, ("batch", "mlp")) is x
    assert bound.spec(("batch", "mlp")) == P(None, None)
    assert "did you mean 'batch'" in refusal(lambda: bound.constrain(x, ("bath", "mlp")))
    assert refusal(lambda: bound.sharding(("mlp",))) == "this BoundSharding has no mesh"


def test_constrain_lays_out_under_jit_and_keeps_the_values(cube):
    x = np.arange(8 * 3 * 6, dtype=np.float32).reshape(8, 3, 6)
    y = jax.jit(lambda x: cube.constrain(x * 1.0, ("batch", None, "mlp")))(x)
    assert y.sharding.is_equivalent_to(
        NamedSharding(cube.mesh, P(("data", "fsdp"), None, "tensor")), 3
    )
    assert {shard.data.shape for shard in y.addressable_shards} == {(2, 3, 3)}
    assert len({shard.device for shard in y.addressable_shards}) == 8
    np.testing.assert_array_equal(y, x)


def test_weights_are_born_in_the_layout_that_their_axes_say():
    bound = BoundSharding(make_mesh(2, 2, 2))
    layer = FeedForward(input_dims=4, output_dims=8, sharding=bound)
    key = jax.random.key(0)
    shapes = jax.eval_shape(layer.init_boxed, key)
    shardings = jax.tree.map(
        lambda axes, weight: bound.sharding(axes, shape=weight.shape),
        logical_axes(shapes),
        unbox(shapes),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    born = jax.jit(layer.init, out_shardings=shardings)(key)
    assert born["params"]["linear"]["w"].addressable_shards[0].data.shape == (2, 4)
    assert born["params"]["bias"]["b"].addressable_shards[0].data.shape == (4,)
    jax.tree.map(np.testing.assert_array_equal, born, layer.init(key))


def test_the_default_table_names_every_standard_axis_of_weights_and_activations():
    names = {name for name, _ in DEFAULT_RULES.table}
    weights = {"embed", "mlp", "heads", "kv_heads", "head_dim", "vocab", "norm", "positions"}
    stacked = {"layers", "stage", "expert"}
    activations = {"batch", "length", "act_embed", "act_mlp", "act_heads", "act_kv_heads"}
    assert weights | stacked | activations | {"act_vocab"} <= names


@given(st.lists(st.sampled_from([*dict(DEFAULT_RULES.table), None]), max_size=4))
def test_a_spec_names_each_mesh_axis_once_or_is_refused(axes):
    bound = BoundSharding(make_mesh(2, 2, 2))
    wanted = [a for name in axes if name for a in DEFAULT_RULES.mesh_axes(name)]
    wanted = [axis for axis in wanted if axis in bound.mesh.shape]
    if len(wanted) != len(set(wanted)):
        assert "are both split over mesh axis" in refusal(lambda: bound.spec(axes))
    else:
        spec = bound.spec(axes)
        entries = [e if isinstance(e, tuple) else (e,) for e in spec if e is not None]
        assert len(spec) == len(axes)
        assert [axis for entry in entries for axis in entry] == wanted
