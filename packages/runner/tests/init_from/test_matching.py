"""Matching of the values of a run with stored names, shapes and dtypes."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from layerkit.base.base_model import BaseModel
from layerkit.errors import UserError
from layerkit_runner.checkpointing.stored_state import LeafSpec, spec_of
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from import InitFrom, Source
from layerkit_runner.init_from.matching import Matched, match
from layerkit_runner.init_from.sources import Opened
from layerkit_runner.step.train_state import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class Names:
    """A source with names only."""

    label: str
    leaves: Mapping[tuple[str, ...], LeafSpec]
    step: int | None = 3

    def read(self, like: Any) -> Any:
        raise AssertionError("names are compared before anything is read")


def spec(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class Compared(BaseModel):
    """A model whose `encoder` is frozen and, if asked for, starts as a copy of `head`."""

    copied: bool = True

    @property
    def frozen_weights(self) -> tuple[str, ...]:
        return ("encoder/.*",)

    @property
    def initial_copies(self) -> Mapping[str, str]:
        return {"encoder": "head"} if self.copied else {}


STATE = TrainState(
    step=spec(dtype=np.int32),
    params={"encoder": {"w": spec(4, 2), "b": spec(2)}, "head": {"w": spec(2, 9)}},
    non_trainable={"encoder": {"mean": spec(2)}},
    opt_state={"count": spec(dtype=np.int32), "mu": {"encoder": {"w": spec(4, 2)}}},
)
SAME = {
    ("params", "encoder", "w"): spec(4, 2),
    ("params", "encoder", "b"): spec(2),
    ("params", "head", "w"): spec(2, 9),
    ("non_trainable", "encoder", "mean"): spec(2),
    ("opt_state", "count"): spec(dtype=np.int32),
    ("opt_state", "mu", "encoder", "w"): spec(4, 2),
    ("step",): spec(dtype=np.int32),
}


def matched(
    *stored: Mapping[tuple[str, ...], Any],
    at: int | None = 3,
    begin: Any = None,
    state: TrainState = STATE,
    model: BaseModel | None = None,
    **fields: Any,
) -> Matched:
    """Match against sources called a, b, …, which all have `fields`."""
    named = [
        Names("abc"[i], {path: spec_of(leaf) for path, leaf in leaves.items()}, at)
        for i, leaves in enumerate(stored)
    ]
    sources = [Source(folder=one.label, **fields) for one in named]
    settings = InitFrom(sources=sources, label="begin", **(begin or {}))
    opened = [Opened(source, one) for source, one in zip(sources, named, strict=True)]
    return match(settings, opened, state, model=model or BaseModel())


def state_of(params: Mapping[str, Any]) -> TrainState:
    """Return a state of weights alone, by path."""
    nested = unflatten_dict(params, sep="/")
    step = spec(dtype=np.int32)
    return TrainState(step=step, params=nested, non_trainable={}, opt_state={})


def differences(*stored: Any, **fields: Any) -> list[str]:
    """Return the line of each difference in the error."""
    with pytest.raises(UsageError) as caught:
        matched(*stored, **fields)
    assert caught.value.owner == "begin"
    first, *lines = caught.value.problem.splitlines()
    result = [line.removeprefix("  ") for line in lines if line.startswith("  ")]
    assert f"({len(result)} difference" in first
    return result


def origins(matching: Matched) -> dict[str, str]:
    return {"/".join(path): str(one) for path, one in matching.values.items()}


def without(*names: str) -> dict[tuple[str, ...], Any]:
    return {path: leaf for path, leaf in SAME.items() if "/".join(path) not in names}


def test_weights_of_the_same_names_are_matched():
    assert origins(matched(SAME)) == {
        "params/encoder/w": "a:params/encoder/w",
        "params/encoder/b": "a:params/encoder/b",
        "params/head/w": "a:params/head/w",
        "non_trainable/encoder/mean": "a:non_trainable/encoder/mean",
    }


def test_first_matching_rule_wins():
    rules = [("encoder/w", "head/w[0]"), (".*/w", "encoder/w"), (".*", r"\g<0>")]
    stored = {**SAME, ("params", "head", "w"): spec(1, 4, 2)}
    told = differences(stored, rules=rules)
    assert told == ["head/w: float32[2, 9] here, but encoder/w float32[4, 2] in a"]


def test_missing_weight_is_reported_with_the_nearest_name():
    stored = {**without("params/head/w"), ("params", "heads", "w"): spec(2, 9)}
    assert differences(stored) == [
        "head/w float32[2, 9]: not in a; did you mean 'heads/w'?",
        "heads/w float32[2, 9]: in a, not in the model",
    ]


def test_rule_with_an_unknown_stored_name_is_reported():
    rules = [("head/(.*)", r"haed/\1"), (".*", r"\g<0>")]
    (told,) = differences(SAME, rules=rules)
    assert told == (
        r"head/w: a: rules[0] ('head/(.*)', 'haed/\\1'): haed/w is not in a; did you mean 'head/w'?"
    )


def test_other_shapes_and_kinds_of_dtypes_are_reported():
    stored = {
        **SAME,
        ("params", "head", "w"): spec(2, 8),
        ("params", "encoder", "b"): spec(2, dtype=np.int32),
        ("params", "encoder", "w"): spec(4, 2, dtype=jnp.bfloat16),
    }
    assert differences(stored) == [
        "encoder/b: float32[2] here, but int32[2] in a",
        "head/w: float32[2, 9] here, but float32[2, 8] in a",
    ]


def test_patterns_without_a_match_are_reported():
    begin = {"draw": ("hed/.*",)}
    (told,) = differences(SAME, begin=begin)
    assert told == "draw: 'hed/.*' matches no name; did you mean 'head/w'?"
    (told,) = differences(SAME, ignore=("haed/w",))
    assert told == "a: ignore: 'haed/w' matches no name; did you mean 'head/w'?"
    told = differences(SAME, rules=[("encodr/.*", r"\g<0>"), (".*", r"\g<0>")])
    assert told == [
        "a: rules[0]: 'encodr/.*' matches no name; did you mean 'encoder/w' or 'encoder/b'?"
    ]
    (told,) = differences(SAME, rules=[(".*", r"\g<0>"), ("head/.*", r"\g<0>")])
    assert told == r"a: rules[1] ('head/.*', '\\g<0>') matches only values that others provide"
    (told,) = differences(SAME, opt_state_rules=[("nu/.*", r"\g<0>")])
    assert told.startswith("a: opt_state_rules[0]: 'nu/.*' matches no name")


def test_use_ema_of_a_source_without_averages_is_an_error(raises):
    with raises(UsageError, owner="begin", field="use_ema"):
        matched(SAME, use_ema=True)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"load_step": True}, "load_step"),
        ({"use_ema": True}, "use_ema"),
        ({"step": 0}, "step"),
        ({"opt_state_rules": [("a", "b")]}, "opt_state_rules"),
    ],
)
def test_hugging_face_folder_provides_only_weights(raises, fields: dict[str, Any], named: str):
    with raises(UsageError, owner="begin", field=named, value=fields[named]):
        matched(SAME, at=None, **fields)


def test_rule_is_suggested_if_only_one_side_stacks_its_layers():
    unrolled = {("params", "lm", "stack", f"layers_{i}", "w"): spec(3) for i in (0, 1)}
    stacked = {("params", "lm", "stack", "repeat", "sub", "w"): spec(2, 3)}

    def advised(here: Any, there: Any) -> tuple[str, str]:
        """Return the suggested rule after matching with it."""
        state = state_of({"/".join(path[1:]): leaf for path, leaf in here.items()})
        with pytest.raises(UsageError) as caught:
            matched(there, state=state)
        (line,) = [one for one in str(caught.value).splitlines() if "Put this rule" in one]
        rule = ast.literal_eval(line.rpartition(": ")[2])
        assert len(matched(there, state=state, rules=[rule]).values) == len(here)
        return rule

    assert advised(unrolled, stacked) == (r"(.*)/layers_(\d+)/(.*)", r"\1/repeat/sub/\3[\2]")
    assert advised(stacked, unrolled) == (r"(.*)/repeat/sub/(.*)", r"\1/layers_{layer}/\2")


@pytest.mark.parametrize(("field", "value"), [("sources", []), ("missing", "drwa")])
def test_invalid_setting_is_an_error(raises, field: str, value: Any):
    settings = {"sources": [Source(folder="x")], "label": "begin", field: value}
    with raises(UserError, owner="begin", field=field, value=value):
        InitFrom(**settings)


def test_step_of_two_sources_is_an_error(raises):
    sources = [Source(folder=name, load_step=True) for name in "ab"]
    with raises(UserError, owner="begin", value=["a", "b"]):
        InitFrom(sources=sources, label="begin")


def match_compared(*, copied: bool, rules: Any = None, **begin: Any) -> Matched:
    """Match a source that holds `head` alone against a model of `encoder` and `head`."""
    stored = {("params", "head" if rules is None else "top", "w"): spec(3)}
    state = state_of({"encoder/w": spec(3), "head/w": spec(3)})
    return matched(stored, state=state, model=Compared(copied=copied), rules=rules, begin=begin)


@pytest.mark.parametrize("missing", ["error", "draw"])
@pytest.mark.parametrize("rules", [None, [(r"head/(.*)", r"top/\1")]], ids=["names", "rules"])
def test_match_copies_weight_that_source_lacks_if_model_declares_original(rules: Any, missing: str):
    result = match_compared(copied=True, rules=rules, missing=missing)
    assert result.copied == {("encoder", "w"): ("head", "w")}
    assert result.drawn == ()
    assert set(result.values) == {("params", "head", "w")}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"copied": True, "draw": ["encoder/w"]}, ["encoder/w", "draw=", "copy of head/w"]),
        ({"copied": False, "draw": ["encoder/.*"]}, ["encoder/w", "draw=", "a source"]),
        ({"copied": False, "missing": "draw"}, ["encoder/w", "not in a"]),
    ],
)
def test_match_raises_if_frozen_weight_would_be_drawn(fields: Any, words: list[str]):
    with pytest.raises(UsageError) as caught:
        match_compared(**fields)
    assert all(word in str(caught.value) for word in words)
