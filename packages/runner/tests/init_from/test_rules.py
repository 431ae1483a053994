"""Rules of initial weights: stored names, shapes, and errors."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from.settings import InitFrom, Origin, Rule, Source, parse_rules


def origin(pattern: str, source: str, name: str, shape: tuple[int, ...] = (2, 3)) -> Origin:
    result = Rule(pattern, source, "rules[0]").origin(name, shape)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("pattern", "source", "names", "indices"),
    [
        (r"a/(.*)", r"b/\1", ("b/0/w",), ()),
        (r"a/(?P<layer>\d)/w", r"b/w[\g<layer>]", ("b/w",), (0,)),
        (r"a/.*", r"\g<0>[3][1]", ("a/0/w",), (3, 1)),
        (r"a/.*", r"\g<0>[1, 0,0]", ("a/0/w",), ((1, 0, 0),)),
        (r"a/.*", r"b[2,]", ("b",), ((2,),)),
        (r"a/.*/w", r"b/{layer}/w", ("b/0/w", "b/1/w"), ()),
    ],
)
def test_rule_gives_stored_names_and_indices(
    pattern: str, source: str, names: tuple[str, ...], indices: tuple
):
    result = origin(pattern, source, "a/0/w")
    assert (result.names, result.indices) == (names, indices)


def test_rule_matches_whole_names_only():
    rule = Rule("a", "b", "rules[0]")
    assert rule.origin("a/w", (1,)) is None
    assert rule.origin("ba", (1,)) is None


@pytest.mark.parametrize("indices", ["", "[2]", "[1][0]", "[0, 0, 2]", "[1][2, 0]", "[2, 1][1]"])
def test_shape_of_an_indexed_value_is_that_of_numpy(indices: str):
    stored = np.zeros((3, 4, 5))
    result = origin("a", f"b{indices}", "a")
    # One axis after the other, as a rule reads; NumPy would pair several lists.
    expected = stored
    for axis, index in reversed(list(enumerate(result.indices))):
        expected = np.take(expected, index, axis=axis)
    assert result.shape({"b": stored.shape}) == expected.shape


def test_stack_has_a_new_first_axis_and_needs_equal_shapes():
    result = origin("a", "b{layer}", "a", (3, 9))
    assert result.shape({"b0": (4,), "b1": (4,), "b2": (4,)}) == (3, 4)
    with pytest.raises(ValueError, match="differ"):
        result.shape({"b0": (4,), "b1": (5,), "b2": (4,)})


@pytest.mark.parametrize(
    ("source", "text"),
    [("b[3]", "index=3"), ("b[0, 7]", "index=7"), ("b[0][0][0]", "more indices than the 2 axes")],
)
def test_index_beyond_the_value_is_an_error(source: str, text: str):
    with pytest.raises(ValueError, match=text):
        origin("a", source, "a").shape({"b": (3, 4)})


@pytest.mark.parametrize(
    ("source", "shape"),
    [(r"b/\2", (1,)), ("b[0]/w", (1,)), ("b[x]", (1,)), ("b{layer}", ()), ("b{layer}[1]", (2,))],
)
def test_rule_without_a_valid_stored_name_is_an_error(raises, source: str, shape: tuple[int, ...]):
    with raises(UsageError, field="rules[0]", value=("(a)", source)):
        Rule("(a)", source, "rules[0]").origin("a", shape)


def test_rule_with_a_malformed_pattern_is_an_error(raises):
    with raises(ConfigError, field="rules[0]", value="(a"):
        parse_rules([("(a", "b")], label="rules")


def test_sources_are_kept_whose_rules_are_all_of_frozen_weights():
    teacher = Source(folder="teacher", rules=[("teacher/(.*)", r"lm/\1")])
    both = Source(folder="both", rules=[("teacher/(.*)", r"lm/\1"), ("lm/.*", r"\g<0>")])
    settings = InitFrom(sources=[Source(folder="student"), both, teacher], draw=["head/.*"])
    kept = settings.only(("teacher/(.*)",))
    assert kept is not None
    assert (kept.sources, kept.draw) == ([teacher], ())
    assert settings.only(()) is None
