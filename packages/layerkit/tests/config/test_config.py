"""Tests of configs: unknown fields, building, sharing, partials, edits and nested HParams."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
from typing import Any, ClassVar

import fiddle as fdl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config import (
    BaseHParams,
    Config,
    Configurable,
    Partial,
    UnknownFieldError,
    assigned_fields,
    build,
    copy_config,
    field_names,
    instance_field,
    is_config,
    sub_config_field,
    walk_configs,
)
from layerkit.config.field_types import FieldTypeError


class Leaf(Configurable):
    size: int = 1
    rate: float = 0.5


class Tree(Configurable):
    left: Any = None
    right: Any = None
    leaf_tpl: Any = sub_config_field(Leaf.HParams)
    names: list = dataclasses.field(default_factory=list)


class Needy(Configurable):
    size: int
    rate: float


class Owning(Configurable):
    leaf: Any = instance_field(Leaf.HParams, size=7)


def add(a, b=10, *, c=100):
    return a + b + c


def chain(*steps, reverse=False):
    return list(reversed(steps)) if reverse else list(steps)


def joined(first, /, second, *rest):
    return [first, second, *rest]


UNKNOWN_FIELD = [
    lambda: Leaf.HParams.config(sise=1),
    lambda: build(Leaf.HParams.config(), sise=1),
    lambda: Leaf.HParams.config().clone(sise=1),
    lambda: Leaf.HParams.config().set(size=2, sise=1),
    lambda: build(Leaf.HParams.partial())(sise=1),
    lambda: sub_config_field(Leaf.HParams, sise=1).default_factory(),
    lambda: setattr(Leaf.HParams.config(), "sise", 1),
    lambda: Leaf.HParams.config().sise,
]


@pytest.mark.parametrize("call", UNKNOWN_FIELD, ids=range(len(UNKNOWN_FIELD)))
def test_unknown_field_raises(call):
    with pytest.raises(UnknownFieldError) as caught:
        call()
    error = caught.value
    assert (error.owner, error.value, error.choices) == ("Leaf", "sise", ("size", "rate"))
    assert isinstance(error, TypeError)
    assert isinstance(error, AttributeError)


def test_unknown_parameter_of_a_function_raises(raises):
    with raises(UnknownFieldError, owner="add", value="d", choices=("a", "b", "c")):
        Config(add, d=1)
    with raises(UnknownFieldError, owner="chain", value="steps", choices=("reverse",)):
        Config(chain, steps=1)


def test_function_with_variable_keywords_accepts_any_field():
    assert build(Config(dict, x=1, y=2)) == {"x": 1, "y": 2}


def test_build_raises_without_a_config_or_a_required_field(raises):
    with raises(FieldTypeError, owner="build()", value=3):
        build(3)
    with raises(FieldTypeError, owner="Needy", problem="missing value"):
        Needy.HParams.config(size=1).Instantiate()
    with raises(TypeError):
        build(Needy.HParams.partial(size=1))()


def test_named_tuple_and_default_dict_keep_their_type():
    pair = collections.namedtuple("pair", "a b")
    counts = collections.defaultdict(list, k=[Leaf.HParams.config()])
    tree = Tree.HParams.config(left=pair(Leaf.HParams.config(), 2), right=counts).Instantiate()
    assert type(tree.left) is pair and isinstance(tree.left.a, Leaf)
    assert isinstance(tree.right["k"][0], Leaf) and tree.right["new"] == []
    assert "new" not in counts


def test_instance_field_is_built():
    config = Owning.HParams.config()
    assert is_config(config.leaf) and config.leaf.size == 7
    config.leaf.size = 8
    assert config.Instantiate().leaf.size == 8
    assert Owning().leaf.size == 7


def test_field_without_default_config_is_none():
    class Empty(Configurable):
        tpl: Any = sub_config_field(None)
        part: Any = instance_field(None)

    empty = Empty.HParams.config().Instantiate()
    assert empty.tpl is None and empty.part is None


def test_edits_of_a_config_do_not_change_built_objects():
    config = Tree.HParams.config(names=["a"], left=Leaf.HParams.config(size=3))
    tree = config.Instantiate()
    config.names.append("b")
    config.left.size = 4
    config.leaf_tpl.size = 5
    assert (tree.names, tree.left.size, tree.leaf_tpl.size) == (["a"], 3, 1)


def test_configs_do_not_share_mutable_defaults():
    first, second = Tree.HParams.config(), Tree.HParams.config()
    first.leaf_tpl.size = 9
    first.names.append("x")
    assert (second.leaf_tpl.size, second.names) == (1, [])
    assert Tree().leaf_tpl.size == 1 and Tree().names == []


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy_config, lambda c: c.clone(), lambda c: pickle.loads(pickle.dumps(c))],
)
def test_copies_keep_sharing_and_are_independent(duplicate):
    leaf = Leaf.HParams.config()
    config = Tree.HParams.config(left=leaf, right=[leaf])
    twin = duplicate(config)
    assert twin == config and twin.left is twin.right[0]
    twin.left.size = 9
    assert config.left.size == 1 and twin != config


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=8))
def test_built_objects_have_the_graph_of_the_configs(edges):
    """Build a random acyclic graph, whose node i refers to two earlier nodes or None."""
    nodes: list[Config] = []
    for left, right in edges:
        before = [*nodes, None]
        config = Tree.HParams.config(
            left=before[left % len(before)], right=before[right % len(before)]
        )
        nodes.append(config)

    pairs: dict[int, Any] = {}

    def compare(config, built):
        if config is None:
            assert built is None
        elif id(config) in pairs:
            assert pairs[id(config)] is built
        else:
            pairs[id(config)] = built
            compare(config.left, built.left)
            compare(config.right, built.right)

    compare(nodes[-1], nodes[-1].Instantiate())
    assert len({id(built) for built in pairs.values()}) == len(pairs)


def test_arguments_of_the_call_override_those_of_a_partial():
    partial = Partial(add, a=1)
    function = build(partial)
    partial.a = 50  # does not change the built function
    assert (function(), function(a=3), function(b=0, c=0)) == (111, 113, 1)
    assert build(Partial(add, c=0))(1, 2) == 3
    leaf = build(Leaf.HParams.partial(size=2))(rate=0.1)
    assert (type(leaf), leaf.size, leaf.rate) == (Leaf, 2, 0.1)
    assert build(Needy.HParams.partial(size=1))(rate=0.5).rate == 0.5  # a required field


def test_partial_builds_nested_configs_at_each_call():
    leaf = Leaf.HParams.config()
    function = build(Tree.HParams.partial(left=leaf, right=leaf))
    first, second = function(), function()
    assert first.left is first.right and second.left is second.right
    assert first.left is not second.left


def test_positional_arguments_are_built_and_come_before_those_of_the_call():
    assert build(Config(joined, 1, 2, 3, 4)) == [1, 2, 3, 4]
    assert build(Config(joined, 1, second=2)) == [1, 2]
    assert build(Config(joined, 1, 2), second=5) == [1, 5]
    total, leaf = Config(chain, Config(Leaf, size=2), Config(add, 1), reverse=True).Instantiate()
    assert (total, leaf.size) == (111, 2)
    function = build(Partial(chain, Config(add, 1), 2))
    assert function() == [111, 2] and function(3, reverse=True) == [3, 2, 111]


def test_variable_positional_arguments_are_copied_and_walked():
    config = Config(chain, Leaf.HParams.config(size=2))
    copied = config.clone(reverse=True)
    copied[0].size = 3
    assert build(config)[0].size == 2
    assert [c.size for c in list(walk_configs(copied))[1:]] == [3]
    assert field_names(chain) == ["reverse"] and assigned_fields(config).keys() == {0}


@pytest.mark.parametrize(
    "edit",
    [
        lambda leaf: setattr(leaf, "size", 9),
        lambda leaf: leaf.set(size=9),
        lambda leaf: delattr(leaf, "size"),
    ],
)
@pytest.mark.parametrize("make", [Tree.HParams.config().Instantiate, Tree])
def test_template_of_a_built_object_cannot_be_edited(raises, edit, make):
    with raises(dataclasses.FrozenInstanceError):
        edit(make().leaf_tpl)


def test_config_in_a_template_of_a_built_object_cannot_be_edited():
    inner = Config(chain, 1)
    tree = build(Tree.HParams.config(leaf_tpl=Config(Tree, right=[{"k": inner}])))
    kept = tree.leaf_tpl.right[0]["k"]
    for edit in (lambda: kept.__setitem__(0, 2), lambda: kept.__delitem__(0)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            edit()
    inner[0] = 2  # the original config stays editable
    assert kept[0] == 1


def test_equal_configs_have_equal_hashes():
    first, second = Leaf.HParams.config(size=1), Leaf.HParams.config()
    assert first == second and hash(first) == hash(second)
    first.size = 2
    assert first != second and hash(first) == hash(second)
    assert Leaf.HParams.config() != Leaf.HParams.partial()


def test_fiddle_config_is_a_config():
    assert is_config(fdl.Config(Leaf)) and not is_config(Leaf)
    assert build(fdl.Config(Leaf, size=2)).size == 2


def test_walk_configs_yields_the_config_and_then_nested_ones():
    config = Tree.HParams.config(left=[{"k": Leaf.HParams.config(size=2)}])
    result = list(walk_configs(config))
    assert result[0] is config
    assert [c.size for c in result[1:]] == [2, 1] or [c.size for c in result[1:]] == [1, 2]


def test_nested_hparams_become_fields():
    class Nested(Configurable):
        class HParams(BaseHParams):
            """Numbers."""

            size: int = 1
            leaf_tpl: Any = sub_config_field(Leaf.HParams)

    assert Nested(size=3).size == 3
    assert field_names(Nested) == ["size", "leaf_tpl"]
    assert Nested.HParams.__doc__ == "Numbers."
    assert Nested.HParams.__qualname__.endswith("Nested.HParams")


@pytest.mark.parametrize("base", [BaseHParams, Leaf.HParams])
def test_nested_hparams_of_a_subclass_extend_those_of_the_base(base):
    class Bigger(Leaf):
        class HParams(base):
            depth: int = 2

    assert field_names(Bigger) == ["size", "rate", "depth"]
    assert issubclass(Bigger.HParams, Leaf.HParams)
    bigger = Bigger.HParams.config(size=5).Instantiate()
    assert (type(bigger), bigger.size, bigger.depth) == (Bigger, 5, 2)


def test_default_of_an_intermediate_class_is_kept():
    class First(Configurable):
        class HParams(BaseHParams):
            size: int = 1

    class Second(First):
        size: int = 2

    class Third(Second):
        class HParams(Second.HParams):
            depth: int = 3

    assert Third().size == Third.HParams.config().size == 2


@pytest.mark.parametrize("value", [9, add, None])
def test_assignment_without_annotation_changes_an_inherited_default(value):
    class Direct(Leaf):
        size = value

    class Nested(Leaf):
        class HParams(BaseHParams):
            size = value

    assert Direct().size is value and Nested().size is value
    assert Direct.HParams.config().size is value and Leaf().size == 1


def test_assignment_of_an_undeclared_field_raises(raises):
    with raises(UnknownFieldError, value="sise"):

        class Wrong(Leaf):
            class HParams(BaseHParams):
                sise = 3


class Labeled(Configurable):
    label: ClassVar[str] = "plain"


def test_class_variable_is_no_field_of_a_subclass():
    # A module that does not import ClassVar.
    scope = {"Labeled": Labeled, "__name__": "elsewhere"}
    exec("class Fancy(Labeled):\n    label = 'fancy'", scope)
    assert field_names(scope["Fancy"]) == [] and scope["Fancy"].label == "fancy"
