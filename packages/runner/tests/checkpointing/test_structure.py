"""Names of leaves, and comparisons of stored with expected leaves."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_runner.checkpointing import stored_state


class Moments(NamedTuple):
    mu: dict
    count: int
    nothing: None = None


def test_leaves_are_named_by_keys_fields_and_positions():
    tree = {"opt": (Moments({"w": 1}, 2), Moments({}, 3)), "params": {"a b": [4]}}
    assert stored_state.named_leaves(tree) == {
        ("opt", "0", "mu", "w"): 1,
        ("opt", "0", "count"): 2,
        ("opt", "1", "count"): 3,
        ("params", "a b", "0"): 4,
    }


class Twice:
    """A container whose two children have the same name."""


jax.tree_util.register_pytree_with_keys(
    Twice,
    lambda _: (((jax.tree_util.DictKey(1), 1), (jax.tree_util.DictKey("1"), 2)), None),
    lambda _, __: Twice(),
)


def test_two_leaves_of_one_name_are_an_error(raises):
    with raises(ConfigError, field="leaf", value="x/1"):
        stored_state.named_leaves({"x": Twice()})


@pytest.mark.parametrize("leaf", [np.ones(3), jax.random.key(0), jnp.ones((0, 4)), 3])
def test_leaf_that_cannot_be_restored_is_an_error(leaf):
    with pytest.raises(TypeError, match="cannot save a/b"):
        stored_state.check_storable({("fine",): jnp.ones(3), ("a", "b"): leaf})
