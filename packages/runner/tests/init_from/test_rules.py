"""One rule: which name it stands for, and the shape of the value."""

from __future__ import annotations

import re

import numpy as np
import pytest

from layerkit_runner.errors import UsageError, check_patterns
from layerkit_runner.init_from.rules import Origin, Rule, parse_rules


def origin(pattern: str, source: str, name: str, shape: tuple[int, ...] = (2, 3)) -> Origin:
    found = Rule(pattern, source, "rules[0]").origin(name, shape)
    assert found is not None
    return found


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
def test_names(pattern: str, source: str, names: tuple[str, ...], indices: tuple):
    found = origin(pattern, source, "a/0/w")
    assert (found.names, found.indices) == (names, indices)


def test_the_whole_name_has_to_match():
    rule = Rule("a", "b", "rules[0]")
    assert rule.origin("a/w", (1,)) is None
    assert rule.origin("ba", (1,)) is None


@pytest.mark.parametrize("indices", ["", "[2]", "[1][0]", "[0, 0, 2]", "[1][2, 0]", "[2, 1][1]"])
def test_shapes_are_those_of_numpy(indices: str):
    stored = np.zeros((3, 4, 5))
    found = origin("a", f"b{indices}", "a")
    # One axis after the other, as a rule reads; NumPy would pair several lists.
    expected = stored
    for axis, index in reversed(list(enumerate(found.indices))):
        expected = np.take(expected, index, axis=axis)
    assert found.shape({"b": stored.shape}) == expected.shape


def test_the_shape_of_a_stack():
    found = origin("a", "b{layer}", "a", (3, 9))
    assert found.shape({"b0": (4,), "b1": (4,), "b2": (4,)}) == (3, 4)
    with pytest.raises(
        ValueError, match=r"^b\{layer\} names values of different shapes: \[4\], \["
    ):
        found.shape({"b0": (4,), "b1": (5,), "b2": (4,)})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("b[3]", "b[3]: index 3 is beyond an axis of 3, which are counted from 0"),
        ("b[0, 7]", "b[0, 7]: index 7 is beyond an axis of 3, which are counted from 0"),
        ("b[0][0][0]", "b[0][0][0] has more indices than [3, 4] has axes"),
    ],
)
def test_indices_beyond_the_value(source: str, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        origin("a", source, "a").shape({"b": (3, 4)})


@pytest.mark.parametrize(
    ("source", "shape", "message"),
    [
        (r"b/\2", (1,), r"rules[0] ('(a)', 'b/\\2'): 'b/\\2': invalid group reference 2"),
        ("b[0]/w", (1,), "rules[0] ('(a)', 'b[0]/w'): 'b[0]/w' is no name; indices stand at"),
        ("b[x]", (1,), "rules[0] ('(a)', 'b[x]'): 'b[x]' is no name; indices stand at its end,"),
        (
            "b{layer}",
            (),
            "rules[0] ('(a)', 'b{layer}'): a cannot be stacked of b{layer}: it has no",
        ),
        (
            "b{layer}[1]",
            (2,),
            "a cannot be stacked of b{layer}[1]: it cannot have an index besides",
        ),
    ],
)
def test_rules_that_stand_for_nothing(source: str, shape: tuple[int, ...], message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        Rule("(a)", source, "rules[0]").origin("a", shape)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("a",), "rules[0]=('a',): expected (pattern, name in the source)"),
        ("ab", "rules[0]='ab': expected (pattern, name in the source)"),
        (("a", 3), "rules[0]=('a', 3): expected (pattern, name in the source)"),
        (("(a", "b"), "rules[0]: '(a' is not a regular expression: missing ), unterminated"),
    ],
)
def test_what_is_no_rule(pair: tuple, message: str):
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        parse_rules([pair], label="rules")


def test_patterns_are_a_list():
    with pytest.raises(UsageError, match=r"^draw='a': expected a tuple of patterns$"):
        check_patterns("a", label="draw")
    with pytest.raises(UsageError, match=r"^draw\[1\]: 3 is not a regular expression"):
        check_patterns(["a", 3], label="draw")  # type: ignore[list-item]
