"""Names of leaves, and the whole text of a mismatch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_nested_dicts_have_the_same_names_again():
    leaves = structure.named_leaves({"opt": (Moments({"w": 1}, 2), {"a/b": 5})})
    assert structure.nest(leaves) == {"opt": {"0": {"mu": {"w": 1}, "count": 2}, "1": {"a/b": 5}}}
    assert dict(structure.named_leaves(structure.nest(leaves))) == leaves


def test_a_bare_leaf_has_no_name():
    with pytest.raises(ValueError, match="The state is a bare int; expected a tree"):
        structure.named_leaves(3)


class Twice:
    """A container whose two children have the same name."""


jax.tree_util.register_pytree_with_keys(
    Twice,
    lambda _: (((jax.tree_util.DictKey(1), 1), (jax.tree_util.DictKey("1"), 2)), None),
    lambda _, __: Twice(),
)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match="Two leaves of the state are both named x/1"):
        structure.named_leaves({"x": Twice()})


def test_every_leaf_that_cannot_be_stored_is_named():
    leaves = structure.named_leaves(
        {
            "a": np.ones(3),
            "fine": jnp.ones(3),
            "key": jax.random.key(0),
            "none": jnp.ones((0, 4)),
            "step": 3,
        }
    )
    with pytest.raises(TypeError) as error:
        structure.check_storable(leaves)
    assert str(error.value) == (
        "The state cannot be saved:\n"
        "  a is a ndarray; make it a jax.Array\n"
        "  key is a typed random key; store jax.random.key_data of it\n"
        "  none float32[0, 4] has no elements; leave it out\n"
        "  step is a int; make it a jax.Array"
    )


def test_every_difference_is_listed_by_path():
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
    with pytest.raises(structure.StructureMismatchError) as error:
        structure.check_match(stored, wanted, where="The checkpoint DIR")
    assert str(error.value) == (
        "The checkpoint DIR does not fit the state to restore (5 differences):\n"
        "  params/ffn/w_up: unexpected, float32[4, 8] in the checkpoint\n"
        "  params/ffn/w_uq: missing in the checkpoint, wanted float32[4, 8]; the nearest that it "
        "holds is params/ffn/w_up\n"
        "  params/old: unexpected, float32[2] in the checkpoint\n"
        "  params/scale: dtype float32 in the checkpoint, wanted bfloat16\n"
        "  step: shape [] in the checkpoint, wanted [1]\n"
        "Nothing is padded or cast. Restore with the configuration that wrote the checkpoint, or "
        "start a new job that is initialised from it."
    )
    assert len(error.value.differences) == 5


def test_message_of_many_differences_shows_a_few_and_counts_the_rest():
    wanted = {("params", f"w{n}"): jax.ShapeDtypeStruct((2,), jnp.float32) for n in range(20)}
    with pytest.raises(structure.StructureMismatchError) as error:
        structure.check_match({}, wanted, where="The checkpoint DIR")
    assert len(error.value.differences) == 20
    assert str(error.value).count("missing in the checkpoint") == 6
    assert "(20 differences)" in str(error.value)
    assert "… and 14 more" in str(error.value)


def test_targets_need_shardings():
    bare = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(ValueError, match="these have none: a, b/c"):
        structure.check_target(
            structure.named_leaves({"a": bare, "b": {"c": bare}, "d": jnp.ones(1)})
        )
