"""NestedMap: a dict with attributes, and a pytree wherever JAX is."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.nested_map import NestedMap


def test_keys_are_attributes():
    batch = NestedMap(ids=1)
    batch.labels = 2
    batch["weights"] = 3
    assert batch == {"ids": 1, "labels": 2, "weights": 3}
    assert (batch.ids, batch["labels"], batch.weights) == (1, 2, 3)
    del batch.labels
    assert list(batch) == ["ids", "weights"]


def test_a_key_that_is_not_there_names_the_near_ones():
    with pytest.raises(AttributeError) as caught:
        _ = NestedMap(labels=1, ids=2).label
    assert str(caught.value) == (
        "NestedMap has no key 'label'; did you mean 'labels'? Its keys: ['ids', 'labels']"
    )
    with pytest.raises(AttributeError, match="NestedMap has no key 'ids'"):
        del NestedMap().ids
    assert not hasattr(NestedMap(), "ids")


def test_subscript_of_missing_key_raises_key_error_with_keys():
    batch = NestedMap(chosen=1)
    with pytest.raises(KeyError) as caught:
        _ = batch["rejected"]
    assert str(caught.value) == "NestedMap has no key 'rejected'. Its keys: ['chosen']"
    assert batch.get("rejected") is None and "rejected" not in batch


@pytest.mark.parametrize("key", ["a b", "", "1st", "a.b", 3])
@pytest.mark.parametrize(
    "assign",
    [
        lambda key: NestedMap({key: 1}),
        lambda key: NestedMap().__setitem__(key, 1),
        lambda key: NestedMap().update({key: 1}),
        lambda key: NestedMap().setdefault(key, 1),
        lambda key: NestedMap() | {key: 1},
        lambda key: NestedMap().__ior__({key: 1}),
    ],
)
def test_a_key_must_be_an_identifier_however_it_is_set(assign, key):
    with pytest.raises(ValueError) as caught:
        assign(key)
    assert str(caught.value) == f"a NestedMap key must be an identifier, got {key!r}"


def test_a_key_must_not_hide_a_method():
    with pytest.raises(ValueError) as caught:
        NestedMap(items=1)
    assert str(caught.value) == "a NestedMap key must not hide the dict method 'items'"


def test_the_ways_of_a_dict_keep_the_type():
    first = NestedMap(a=1)
    merged = first | {"b": 2}
    assert isinstance(merged, NestedMap) and merged == {"a": 1, "b": 2} and first == {"a": 1}
    first |= {"c": 3}
    assert isinstance(first, NestedMap) and first == {"a": 1, "c": 3}
    assert first.setdefault("a", 9) == 1 and first.setdefault("d", 4) == 4
    first.update([("a", 5)], c=6)
    assert first == {"a": 5, "c": 6, "d": 4}
    copied = first.copy()
    assert isinstance(copied, NestedMap) and copied == first and copied is not first


def test_flatten_items_sorts_and_descends_into_nested_maps_only():
    tree = NestedMap(b=NestedMap(y=1, x={"k": 2}), a=[3, 4])
    assert list(tree.flatten_items()) == [("a", [3, 4]), ("b.x", {"k": 2}), ("b.y", 1)]


def test_transform_keeps_the_structure():
    tree = NestedMap(b=NestedMap(y=1), a=2)
    doubled = tree.transform(lambda leaf: leaf * 2)
    assert doubled == {"b": {"y": 2}, "a": 4}
    assert isinstance(doubled, NestedMap) and isinstance(doubled.b, NestedMap)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_and_pickles(duplicate):
    tree = NestedMap(a=1, b=NestedMap(c=[2]))
    twin = duplicate(tree)
    assert twin == tree and isinstance(twin, NestedMap) and isinstance(twin.b, NestedMap)


keys = st.from_regex(r"[a-z_]{1,4}", fullmatch=True).filter(lambda key: not hasattr(dict, key))
trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(keys, inner, max_size=3).map(NestedMap)
)


@given(trees)
def test_is_the_pytree_that_a_dict_of_the_same_items_is(tree):
    def plain(value):
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    assert jax.tree.leaves(tree) == jax.tree.leaves(plain(tree))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == [path for path, _ in jax.tree_util.tree_leaves_with_path(plain(tree))]
    leaves, treedef = jax.tree.flatten(tree)
    rebuilt = jax.tree.unflatten(treedef, leaves)
    assert rebuilt == tree and type(rebuilt) is type(tree)


def test_order_of_insertion_does_not_matter_to_jax():
    first, second = NestedMap(a=1, b=2), NestedMap(b=2, a=1)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert jax.tree.map(lambda x, y: x - y, first, second) == {"a": 0, "b": 0}


def test_passes_through_jit_and_grad():
    weights = NestedMap(w=np.float32(3.0), inner=NestedMap(b=np.float32(1.0)))
    gradient = jax.jit(jax.grad(lambda v: v.w**2 + 5.0 * v.inner.b))(weights)
    assert isinstance(gradient, NestedMap) and isinstance(gradient.inner, NestedMap)
    assert (float(gradient.w), float(gradient.inner.b)) == (6.0, 5.0)


def run_fresh(program):
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_a_map_made_before_jax_is_imported_is_a_pytree_for_layers():
    printed = run_fresh(
        "import sys\n"
        "from layerkit.nested_map import NestedMap\n"
        "early = NestedMap(b=1, a=NestedMap(c=2))\n"
        "print('jax' in sys.modules)\n"
        "import layerkit.base_layer, jax\n"
        "print(jax.tree.leaves(early) == [2, 1])"
    )
    assert printed == ["False", "True"]


def test_a_map_made_after_jax_is_imported_is_a_pytree():
    printed = run_fresh(
        "from layerkit.nested_map import NestedMap\n"
        "import jax\n"
        "print(jax.tree.leaves(NestedMap(b=1, a=2)) == [2, 1])"
    )
    assert printed == ["True"]


def test_needs_neither_jax_nor_flax():
    printed = run_fresh(
        "import sys, layerkit.nested_map, layerkit.config\n"
        "print([m for m in ('jax', 'jaxlib', 'flax', 'tensorflow', 'optax') if m in sys.modules])"
    )
    assert printed == ["[]"]
