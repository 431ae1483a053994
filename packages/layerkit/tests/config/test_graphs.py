"""Tests of equality of configs: the one-pass comparison gives what Fiddle's comparison gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import fiddle as fdl
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config import Config


@dataclasses.dataclass
class Node:
    left: Any = None
    right: Any = None
    size: int = 1


EDGES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=4)


def graph(edges):
    """Return a config whose sub-configs may be shared; True sets a field to its default."""
    nodes = [None, Config(Node)]
    for left, right, is_set in edges:
        node = Config(Node, left=nodes[left % len(nodes)], right=[nodes[right % len(nodes)]])
        if is_set:
            node.size = 1
        nodes.append(node)
    return nodes[-1]


@given(EDGES, EDGES)
def test_equality_is_that_of_fiddle(first, second):
    one, other = graph(first), graph(second)
    assert (one == other) == fdl.Buildable.__eq__(one, other)
    assert one == graph([(left, right, not is_set) for left, right, is_set in first])


def test_sharing_and_kinds_of_containers_are_compared():
    leaf = Config(Node)
    shared, apart = Config(Node, left=leaf, right=leaf), Config(Node, left=leaf, right=leaf.clone())
    assert shared != apart and apart != shared and shared == shared.clone()
    assert Config(Node, left=[leaf]) != Config(Node, left=(leaf,))
    assert Config(Node, left={"a": 1}) != Config(Node, left={"a": 2})
    assert Config(Node) != Config(dict) and Config(Node) != 1
