"""Configs: what they refuse, what they build, what they share, and what an edit reaches."""

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
    assigned_fields,
    build,
    copy_config,
    field_names,
    instance_field,
    is_config,
    near_names,
    sub_config_field,
    target_of,
    walk_configs,
)


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


def refusal(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


LEAF_TYPO = "Leaf: unknown field: 'sise'. Did you mean 'size'?"


class TestTypos:
    def test_a_keyword_typo_is_a_type_error(self):
        assert refusal(TypeError, lambda: Leaf.HParams.config(sise=1)) == LEAF_TYPO
        assert refusal(TypeError, lambda: Leaf.HParams.partial(sise=1)) == LEAF_TYPO
        assert refusal(TypeError, lambda: Config(Leaf, sise=1)) == LEAF_TYPO

    @pytest.mark.parametrize(
        "call",
        [
            lambda: build(Leaf.HParams.config(), sise=1),
            lambda: Leaf.HParams.config().Instantiate(sise=1),
            lambda: Leaf.HParams.config().clone(sise=1),
            lambda: Leaf.HParams.config().set(size=2, sise=1),
            lambda: Leaf.HParams.partial().Instantiate(sise=1),
            lambda: build(Leaf.HParams.partial())(sise=1),
            lambda: sub_config_field(Leaf.HParams, sise=1).default_factory(),
        ],
    )
    def test_so_it_is_wherever_fields_are_keywords(self, call):
        assert refusal(TypeError, call) == LEAF_TYPO

    def test_an_attribute_typo_is_an_attribute_error(self):
        config = Leaf.HParams.config()
        assert refusal(AttributeError, lambda: setattr(config, "sise", 1)) == LEAF_TYPO
        assert refusal(AttributeError, lambda: config.sise) == LEAF_TYPO
        assert not hasattr(config, "sise")

    def test_a_rejected_set_changes_nothing(self):
        config = Leaf.HParams.config()
        refusal(TypeError, lambda: config.set(size=2, sise=1))
        assert config == Leaf.HParams.config()

    def test_functions_are_checked_by_their_signature(self):
        assert refusal(TypeError, lambda: Config(add, d=1)) == (
            "add: unknown field: 'd'. Choices: a, b, c."
        )

    def test_a_function_that_takes_any_keyword_may_be_given_any(self):
        assert build(Config(dict, x=1, y=2)) == {"x": 1, "y": 2}

    def test_near_names_ignore_case(self):
        assert near_names("percore_batch_sise", ["PERCORE_BATCH_SIZE"]) == (
            "; did you mean 'PERCORE_BATCH_SIZE'?"
        )
        assert near_names("zzz", ["size"]) == "."

    def test_missing_fields_are_named(self):
        text = "Needy cannot be built: no value for rate."
        assert refusal(TypeError, Needy.HParams.config(size=1).Instantiate) == text

    def test_only_configs_can_be_built(self):
        text = "build() needs a Config or a Partial, got 3"
        assert refusal(TypeError, lambda: build(3)) == text


class TestBuild:
    def test_gives_the_described_object(self):
        leaf = Leaf.HParams.config(size=3).Instantiate()
        assert type(leaf) is Leaf and (leaf.size, leaf.rate) == (3, 0.5)

    def test_overrides_hold_for_this_once(self):
        config = Leaf.HParams.config(size=3)
        assert config.Instantiate(size=4).size == 4
        assert config.size == 3

    def test_builds_nested_configs_also_in_containers(self):
        leaf = Leaf.HParams.config(size=3)
        tree = Tree.HParams.config(left=[(leaf.clone(),)], right={"k": leaf.clone()}).Instantiate()
        assert tree.left[0][0].size == 3 and isinstance(tree.left[0], tuple)
        assert tree.right["k"].size == 3

    def test_a_named_tuple_and_a_special_dict_keep_their_kind(self):
        pair = collections.namedtuple("pair", "a b")
        counts = collections.defaultdict(list, k=[Leaf.HParams.config()])
        tree = Tree.HParams.config(left=pair(Leaf.HParams.config(), 2), right=counts).Instantiate()
        assert type(tree.left) is pair and isinstance(tree.left.a, Leaf)
        assert isinstance(tree.right["k"][0], Leaf) and tree.right["new"] == []
        assert "new" not in counts

    def test_leaves_a_template_as_a_config(self):
        tree = Tree.HParams.config().Instantiate()
        assert is_config(tree.leaf_tpl) and target_of(tree.leaf_tpl) is Leaf

    def test_builds_an_instance_field(self):
        config = Owning.HParams.config()
        assert is_config(config.leaf) and config.leaf.size == 7
        config.leaf.size = 8
        assert config.Instantiate().leaf.size == 8
        assert Owning().leaf.size == 7

    def test_a_field_with_no_default_config(self):
        class Empty(Configurable):
            tpl: Any = sub_config_field(None)
            part: Any = instance_field(None)

        empty = Empty.HParams.config().Instantiate()
        assert empty.tpl is None and empty.part is None

    def test_later_edits_do_not_reach_what_was_built(self):
        config = Tree.HParams.config(names=["a"], left=Leaf.HParams.config(size=3))
        tree = config.Instantiate()
        config.names.append("b")
        config.left.size = 4
        config.leaf_tpl.size = 5
        assert (tree.names, tree.left.size, tree.leaf_tpl.size) == (["a"], 3, 1)

    def test_building_does_not_change_the_config(self):
        config = Tree.HParams.config(left=Leaf.HParams.config(size=3))
        before = copy.deepcopy(config)
        tree = config.Instantiate()
        tree.names.append("x")
        assert config == before
        config.leaf_tpl.size = 9  # its own, not that of the tree
        assert tree.leaf_tpl.size == 1

    def test_two_configs_share_no_default(self):
        first, second = Tree.HParams.config(), Tree.HParams.config()
        first.leaf_tpl.size = 9
        first.names.append("x")
        assert (second.leaf_tpl.size, second.names) == (1, [])
        assert Tree().leaf_tpl.size == 1 and Tree().names == []


class TestSharing:
    def test_the_same_config_in_two_built_fields_is_one_object(self):
        leaf = Leaf.HParams.config()
        tree = Tree.HParams.config(left=leaf, right=leaf).Instantiate()
        assert tree.left is tree.right

    def test_equal_but_distinct_configs_are_two_objects(self):
        leaf = Leaf.HParams.config()
        tree = Tree.HParams.config(left=leaf, right=leaf.clone()).Instantiate()
        assert leaf == leaf.clone() and tree.left is not tree.right

    def test_a_config_that_is_also_a_template_is_built_once_and_kept_once(self):
        leaf = Leaf.HParams.config()
        tree = Tree.HParams.config(left=leaf, leaf_tpl=leaf).Instantiate()
        assert isinstance(tree.left, Leaf) and is_config(tree.leaf_tpl)

    def test_each_build_makes_objects_of_its_own(self):
        config = Tree.HParams.config(left=Leaf.HParams.config())
        assert config.Instantiate().left is not config.Instantiate().left

    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, copy_config, lambda c: c.clone(), lambda c: pickle.loads(pickle.dumps(c))],
    )
    def test_copies_keep_what_is_shared_and_can_be_edited_apart(self, duplicate):
        leaf = Leaf.HParams.config()
        config = Tree.HParams.config(left=leaf, right=[leaf])
        twin = duplicate(config)
        assert twin == config and twin.left is twin.right[0]
        twin.left.size = 9
        assert config.left.size == 1 and twin != config

    @given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=8))
    def test_the_objects_have_the_graph_of_the_configs(self, edges):
        """A random graph without cycles: node i points at two earlier nodes (or at nothing)."""
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


class TestPartial:
    def test_the_caller_wins(self):
        function = build(Partial(add, a=1))
        assert function() == 111
        assert function(a=3) == 113
        assert function(b=0, c=0) == 1

    def test_positional_arguments_are_passed_on(self):
        assert build(Partial(add, c=0))(1, 2) == 3

    def test_of_a_class(self):
        leaf = build(Leaf.HParams.partial(size=2))(rate=0.1)
        assert (leaf.size, leaf.rate) == (2, 0.1)

    def test_each_call_builds_nested_configs_afresh_and_shares_within_the_call(self):
        leaf = Leaf.HParams.config()
        function = build(Tree.HParams.partial(left=leaf, right=leaf))
        first, second = function(), function()
        assert first.left is first.right and second.left is second.right
        assert first.left is not second.left

    def test_in_a_field_becomes_a_function(self):
        tree = Tree.HParams.config(left=Partial(add, a=1)).Instantiate()
        assert tree.left(b=2) == 103

    def test_later_edits_do_not_reach_the_function(self):
        partial = Partial(add, a=1)
        function = build(partial)
        partial.a = 50
        assert function() == 111

    def test_required_fields_may_come_with_the_call(self):
        function = build(Needy.HParams.partial(size=1))
        assert function(rate=0.5).rate == 0.5
        text = "Needy cannot be built: no value for rate."
        assert refusal(TypeError, function) == text


class TestPositionalArguments:
    def test_a_variable_number_of_them_is_built(self):
        described = Config(chain, Config(Leaf, size=2), Config(add, 1), reverse=True)
        total, leaf = described.Instantiate()
        assert (total, leaf.size) == (111, 2)

    def test_those_with_a_name_before_them_come_first(self):
        assert build(Config(joined, 1, 2, 3, 4)) == [1, 2, 3, 4]
        assert build(Config(joined, 1, second=2)) == [1, 2]
        assert build(Config(joined, 1, 2), second=5) == [1, 5]

    def test_a_partial_keeps_its_own_in_front_of_those_of_the_call(self):
        function = build(Partial(chain, Config(add, 1), 2))
        assert function() == [111, 2]
        assert function(3, reverse=True) == [3, 2, 111]

    def test_they_are_copied_walked_and_have_no_name(self):
        config = Config(chain, Leaf.HParams.config(size=2))
        copied = config.clone(reverse=True)
        copied[0].size = 3
        assert build(config)[0].size == 2
        assert [c.size for c in list(walk_configs(copied))[1:]] == [3]
        assert field_names(chain) == ["reverse"] and assigned_fields(config).keys() == {0}
        assert refusal(TypeError, lambda: Config(chain, steps=1)) == (
            "chain: unknown field: 'steps'. Choices: reverse."
        )


class TestFixedTemplates:
    """What a built object holds may be a key of JAX's caches, so it never changes."""

    @pytest.mark.parametrize(
        "edit",
        [
            lambda leaf: setattr(leaf, "size", 9),
            lambda leaf: leaf.set(size=9),
            lambda leaf: delattr(leaf, "size"),
        ],
    )
    @pytest.mark.parametrize("make", [Tree.HParams.config().Instantiate, Tree])
    def test_cannot_be_edited(self, edit, make):
        assert refusal(dataclasses.FrozenInstanceError, lambda: edit(make().leaf_tpl)) == (
            "Leaf.size cannot be changed: this config belongs to a built object; use clone() to"
            " edit a copy, and build from that"
        )

    def test_nor_can_what_is_inside_them(self):
        inner = Config(chain, 1)
        tree = build(Tree.HParams.config(leaf_tpl=Config(Tree, right=[{"k": inner}])))
        kept = tree.leaf_tpl.right[0]["k"]
        for edit in (lambda: kept.__setitem__(0, 2), lambda: kept.__delitem__(0)):
            assert refusal(dataclasses.FrozenInstanceError, edit).startswith("chain.0 cannot be")
        inner[0] = 2  # the config that was built from is as free as before
        assert kept[0] == 1

    @pytest.mark.parametrize("copied", [lambda c: c.clone(), copy_config, copy.copy])
    def test_a_copy_is_free(self, copied):
        kept = Tree.HParams.config().Instantiate().leaf_tpl
        free = copied(kept)
        free.size = 9
        assert (free.size, kept.size) == (9, 1)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies_of_the_built_object_are_as_fixed(self, copied):
        tree = copied(Tree.HParams.config().Instantiate())
        assert tree.leaf_tpl == Leaf.HParams.config()
        refusal(dataclasses.FrozenInstanceError, lambda: tree.leaf_tpl.set(size=9))


class TestEquality:
    def test_equal_configs_hash_alike_whatever_is_edited(self):
        first, second = Leaf.HParams.config(size=1), Leaf.HParams.config()
        assert first == second and hash(first) == hash(second)
        first.size = 2
        assert first != second and hash(first) == hash(second)

    def test_config_and_partial_of_the_same_target_differ(self):
        assert Leaf.HParams.config() != Leaf.HParams.partial()


class TestReading:
    def test_field_names(self):
        assert field_names(Leaf) == ["size", "rate"]
        assert field_names(Leaf.HParams.config()) == ["size", "rate"]
        assert field_names(add) == ["a", "b", "c"]

    def test_assigned_fields_are_those_with_a_value_of_their_own(self):
        assert assigned_fields(Leaf.HParams.config(rate=0.5)) == {"rate": 0.5}

    def test_a_plain_fiddle_config_is_a_config(self):
        assert is_config(fdl.Config(Leaf)) and not is_config(Leaf)
        assert build(fdl.Config(Leaf, size=2)).size == 2

    def test_walk_configs_finds_all_itself_first(self):
        config = Tree.HParams.config(left=[{"k": Leaf.HParams.config(size=2)}])
        found = list(walk_configs(config))
        assert found[0] is config
        assert [c.size for c in found[1:]] == [2, 1] or [c.size for c in found[1:]] == [1, 2]


class TestNestedHParams:
    def test_become_fields(self):
        class Nested(Configurable):
            class HParams(BaseHParams):
                """Numbers."""

                size: int = 1
                leaf_tpl: Any = sub_config_field(Leaf.HParams)

        assert Nested(size=3).size == 3
        assert field_names(Nested) == ["size", "leaf_tpl"]
        assert Nested.HParams.__doc__ == "Numbers."
        assert Nested.HParams.__qualname__.endswith("Nested.HParams")

    def test_a_subclass_inherits_and_adds(self):
        class Bigger(Leaf):
            class HParams(BaseHParams):
                depth: int = 2

        assert field_names(Bigger) == ["size", "rate", "depth"]
        assert issubclass(Bigger.HParams, Leaf.HParams)
        assert target_of(Bigger.HParams.config()) is Bigger

    def test_may_inherit_explicitly_as_in_praxis(self):
        class Bigger(Leaf):
            class HParams(Leaf.HParams):
                depth: int = 2

        bigger = Bigger.HParams.config(size=5).Instantiate()
        assert (bigger.size, bigger.depth) == (5, 2)

    def test_defaults_set_in_between_survive_further_nesting(self):
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
    def test_an_assignment_without_annotation_changes_an_inherited_default(self, value):
        class Direct(Leaf):
            size = value

        class Nested(Leaf):
            class HParams(BaseHParams):
                size = value

        assert Direct().size is value and Nested().size is value
        assert Direct.HParams.config().size is value and Leaf().size == 1

    def test_an_assignment_that_nobody_declared_is_refused(self):
        def define():
            class Wrong(Leaf):
                class HParams(BaseHParams):
                    sise = 3

        prefix = "TestNestedHParams.test_an_assignment_that_nobody_declared_is_refused.<locals>"
        assert refusal(TypeError, define) == (
            f"{prefix}.define.<locals>.Wrong.HParams assigns 'sise', which is not declared;"
            " did you mean 'size'? A new field needs an annotation."
        )


class Labelled(Configurable):
    label: ClassVar[str] = "plain"


class TestConfigurable:
    def test_what_belongs_to_the_class_is_no_field_of_a_subclass_that_changes_it(self):
        # Elsewhere, where the name ClassVar may mean nothing.
        scope = {"Labelled": Labelled, "__name__": "elsewhere"}
        exec("class Fancy(Labelled):\n    label = 'fancy'", scope)
        assert field_names(scope["Fancy"]) == [] and scope["Fancy"].label == "fancy"

    def test_takes_keywords_only_and_prints_its_fields(self):
        with pytest.raises(TypeError, match="positional"):
            Leaf(1)
        assert repr(Leaf(size=2)) == "Leaf(size=2, rate=0.5)"

    def test_equality_is_identity(self):
        assert Leaf() != Leaf()
