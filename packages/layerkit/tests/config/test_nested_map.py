"""Tests of NestedMap, a dict with attributes that is a pytree."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config.nested_map import NestedMap


def test_keys_are_attributes():
    batch = NestedMap(ids=1)
    batch.labels = 2
    batch["weights"] = 3
    assert batch == {"ids": 1, "labels": 2, "weights": 3}
    assert (batch.ids, batch["labels"], batch.weights) == (1, 2, 3)
    del batch.labels
    assert list(batch) == ["ids", "weights"]


def test_missing_attribute_raises_with_the_nearest_key(raises):
    with raises(AttributeError, value="label", choices=("ids", "labels")):
        _ = NestedMap(labels=1, ids=2).label
    with raises(AttributeError, value="ids"):
        del NestedMap().ids
    assert not hasattr(NestedMap(), "ids")


def test_subscript_of_missing_key_raises_key_error_with_keys(raises):
    batch = NestedMap(chosen=1)
    with raises(KeyError, value="rejected", choices=("chosen",)):
        _ = batch["rejected"]
    assert batch.get("rejected") is None and "rejected" not in batch


def test_dict_methods_keep_the_type():
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


def test_leaves_of_dicts_and_lists_are_those_of_praxis():
    tree = NestedMap(b=[1, [2, NestedMap(x=3)]], a={"y": 4, "c": 5}, t=(6, 7), e=[])
    # Results of FlattenItems and Transform of praxis 1.4.0.
    items = [("a.c", 5), ("a.y", 4), ("b[0]", 1), ("b[1][0]", 2), ("b[1][1].x", 3), ("t", (6, 7))]
    assert list(tree.flatten_items()) == items
    twice = tree.transform(lambda leaf: leaf * 2)
    assert twice == {"a": {"c": 10, "y": 8}, "b": [2, [4, {"x": 6}]], "e": [], "t": (6, 7, 6, 7)}
    assert type(twice.a) is dict and isinstance(twice.b[1][1], NestedMap)


keys = st.from_regex(r"[a-z_]{1,4}", fullmatch=True).filter(lambda key: not hasattr(dict, key))
trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(keys, inner, max_size=3).map(NestedMap)
)


@given(trees)
def test_pytree_equals_that_of_a_dict(tree):
    def plain(value):
        return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value

    assert jax.tree.leaves(tree) == jax.tree.leaves(plain(tree))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == [path for path, _ in jax.tree_util.tree_leaves_with_path(plain(tree))]
    leaves, treedef = jax.tree.flatten(tree)
    rebuilt = jax.tree.unflatten(treedef, leaves)
    assert rebuilt == tree and type(rebuilt) is type(tree)


@pytest.mark.parametrize(
    "lines",
    [
        ("early = NestedMap(b=1, a=2)", "import layerkit.base.base_layer, jax"),
        ("import jax", "early = NestedMap(b=1, a=2)"),
    ],
    ids=["made before", "made after"],
)
def test_map_is_a_pytree_whenever_jax_is_imported(lines):
    program = (
        "import sys",
        "from layerkit.config.nested_map import NestedMap",
        "assert 'jax' not in sys.modules",
        *lines,
        "assert jax.tree.leaves(early) == [2, 1]",
    )
    subprocess.run([sys.executable, "-c", "\n".join(program)], check=True, timeout=120)
