"""Names of leaves, and comparisons of stored with expected leaves."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_runner.checkpointing import structure
from layerkit_runner.checkpointing.structure import LeafSpec


class Moments(NamedTuple):
    mu: dict
    count: int
    nothing: None = None


def test_leaves_are_named_by_keys_fields_and_positions():
    tree = {"opt": (Moments({"w": 1}, 2), Moments({}, 3)), "params": {"a b": [4]}}
    assert structure.named_leaves(tree) == {
        ("opt", "0", "mu", "w"): 1,
        ("opt", "0", "count"): 2,
        ("opt", "1", "count"): 3,
        ("params", "a b", "0"): 4,
    }


def test_nest_keeps_the_names():
    leaves = structure.named_leaves({"opt": (Moments({"w": 1}, 2), {"a/b": 5})})
    assert structure.nest(leaves) == {"opt": {"0": {"mu": {"w": 1}, "count": 2}, "1": {"a/b": 5}}}
    assert dict(structure.named_leaves(structure.nest(leaves))) == leaves


class Twice:
    """A container whose two children have the same name."""


jax.tree_util.register_pytree_with_keys(
    Twice,
    lambda _: (((jax.tree_util.DictKey(1), 1), (jax.tree_util.DictKey("1"), 2)), None),
    lambda _, __: Twice(),
)


@pytest.mark.parametrize(
    ("state", "field", "value"), [(3, "state", "int"), ({"x": Twice()}, "leaf", "x/1")]
)
def test_leaf_without_a_name_of_its_own_is_an_error(raises, state, field, value):
    with raises(ConfigError, field=field, value=value):
        structure.named_leaves(state)


def test_all_leaves_that_cannot_be_stored_are_listed(raises):
    leaves = structure.named_leaves(
        {
            "a": np.ones(3),
            "fine": jnp.ones(3),
            "key": jax.random.key(0),
            "none": jnp.ones((0, 4)),
            "step": 3,
        }
    )
    with raises(TypeError) as caught:
        structure.check_storable(leaves)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["a", "key", "none", "step"]


def test_differences_are_listed_by_path(raises):
    def spec(shape, dtype):
        return LeafSpec(shape, jnp.dtype(dtype))

    stored = {
        ("params", "ffn", "w_up"): spec((4, 8), "float32"),
        ("params", "old"): spec((2,), "float32"),
        ("params", "scale"): spec((8,), "float32"),
        ("params", "same"): spec((8,), "float32"),
        ("step",): spec((), "int32"),
    }
    wanted = {
        ("params", "ffn", "w_uq"): jax.ShapeDtypeStruct((4, 8), jnp.float32),
        ("params", "scale"): jax.ShapeDtypeStruct((8,), jnp.bfloat16),
        ("params", "same"): jax.ShapeDtypeStruct((8,), jnp.float32),
        ("step",): jax.ShapeDtypeStruct((1,), jnp.int32),
    }
    with raises(structure.StructureMismatchError, owner="The checkpoint DIR") as error:
        structure.check_match(stored, wanted, where="The checkpoint DIR")
    assert len(error.value.differences) == 5


def test_message_of_many_differences_shows_a_few_and_counts_the_rest(raises):
    wanted = {("params", f"w{n}"): jax.ShapeDtypeStruct((2,), jnp.float32) for n in range(20)}
    with raises(structure.StructureMismatchError) as error:
        structure.check_match({}, wanted, where="The checkpoint DIR")
    assert len(error.value.differences) == 20


def test_target_without_sharding_is_an_error(raises):
    bare = jax.ShapeDtypeStruct((2,), jnp.float32)
    with raises(ValueError):
        structure.check_target(
            structure.named_leaves({"a": bare, "b": {"c": bare}, "d": jnp.ones(1)})
        )
