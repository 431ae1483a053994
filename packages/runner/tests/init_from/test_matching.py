"""Rules against names: every weight and every pattern has to come out even."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from layerkit.base_model import BaseModel
from layerkit_runner.checkpointing.structure import LeafSpec, spec_of
from layerkit_runner.errors import UsageError
from layerkit_runner.init_from import InitFrom, Source
from layerkit_runner.init_from.matching import Matched, match
from layerkit_runner.init_from.sources import Opened
from layerkit_runner.training.train_state import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class Names:
    """What a source holds, by name."""

    label: str
    leaves: Mapping[tuple[str, ...], LeafSpec]
    step: int | None = 3

    def read(self, wanted: Any) -> Any:
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
    *stored: Mapping[tuple[str, ...], Any], at: int | None = 3, begin: Any = None, **fields: Any
) -> Matched:
    """Against sources called a, b, …; `fields` are of each source."""
    named = [
        Names("abc"[i], {path: spec_of(leaf) for path, leaf in leaves.items()}, at)
        for i, leaves in enumerate(stored)
    ]
    sources = [Source(folder=one.label, **fields) for one in named]
    settings = InitFrom(sources=sources, label="begin", **(begin or {}))
    opened = [Opened(source, one) for source, one in zip(sources, named, strict=True)]
    return match(settings, opened, STATE, model=BaseModel())


def differences(*stored: Any, **fields: Any) -> list[str]:
    """What is told of each difference."""
    with pytest.raises(UsageError) as caught:
        matched(*stored, **fields)
    first, *lines = str(caught.value).splitlines()
    told = [line.removeprefix("  ") for line in lines if line.startswith("  ")]
    number = "1 difference" if len(told) == 1 else f"{len(told)} differences"
    assert first == f"begin does not fit the model ({number}):"
    assert lines[-1].startswith("Nothing is padded or cut. Weights can be drawn instead")
    return told


def origins(found: Matched) -> dict[str, str]:
    return {"/".join(path): str(one) for path, one in found.found.items()}


def without(*names: str) -> dict[tuple[str, ...], Any]:
    return {path: leaf for path, leaf in SAME.items() if "/".join(path) not in names}


def test_the_same_names():
    assert origins(matched(SAME)) == {
        "params/encoder/w": "a:params/encoder/w",
        "params/encoder/b": "a:params/encoder/b",
        "params/head/w": "a:params/head/w",
        "non_trainable/encoder/mean": "a:non_trainable/encoder/mean",
    }


def test_the_first_rule_that_matches():
    rules = [("encoder/w", "head/w[0]"), (".*/w", "encoder/w"), (".*", r"\g<0>")]
    stored = {**SAME, ("params", "head", "w"): spec(1, 4, 2)}
    told = differences(stored, rules=rules)
    assert told == ["head/w: float32[2, 9] here, but encoder/w float32[4, 2] in a"]


def test_the_first_source_that_has_it():
    found = matched(without("params/head/w"), {("params", "head", "w"): spec(2, 9)})
    assert origins(found)["params/head/w"] == "b:params/head/w"


def test_a_weight_that_nobody_has():
    stored = {**without("params/head/w"), ("params", "heads", "w"): spec(2, 9)}
    assert differences(stored) == [
        "head/w float32[2, 9]: not in a; did you mean 'heads/w'?",
        "heads/w float32[2, 9]: in a, not in the model",
    ]


def test_a_rule_that_asks_for_what_is_not_there():
    rules = [("head/(.*)", r"haed/\1"), (".*", r"\g<0>")]
    (told,) = differences(SAME, rules=rules)
    assert told == (
        r"head/w: a: rules[0] ('head/(.*)', 'haed/\\1') asks for haed/w, which a does not hold; did"
        " you mean 'head/w'?"
    )


def test_other_shapes_and_kinds_of_numbers():
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


def test_patterns_that_match_nothing():
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
    assert told == r"a: rules[1] ('head/.*', '\\g<0>') matches only what comes from elsewhere"
    (told,) = differences(SAME, opt_state_rules=[("nu/.*", r"\g<0>")])
    assert told.startswith("a: opt_state_rules[0]: 'nu/.*' matches no name")


def test_drawing_accounts_for_both_sides():
    found = matched(SAME, begin={"draw": ("head/.*",)})
    assert found.drawn == (("params", "head", "w"),)
    assert "params/head/w" not in origins(found)


def test_ignoring_and_missing():
    stored = {**without("params/head/w"), ("params", "old", "w"): spec(1)}
    found = matched(stored, ignore=("old/.*",), begin={"missing": "draw"})
    assert found.drawn == (("params", "head", "w"),)


def test_the_optimizer():
    found = matched(SAME, opt_state_rules=[("mu/(.*)", r"mu/\1")])
    assert origins(found)["opt_state/mu/encoder/w"] == "a:opt_state/mu/encoder/w"
    assert ("opt_state", "count") not in found.found


def test_the_step():
    assert (matched(SAME).step, matched(SAME).step_from) == (0, None)
    found = matched(SAME, load_step=True)
    assert (found.step, found.step_from) == (3, "a")


def test_averages_first():
    stored = {**SAME, ("ema", "encoder", "w"): spec(4, 2)}
    found = origins(matched(stored, use_ema=True))
    assert found["params/encoder/w"] == "a:ema/encoder/w"
    assert found["params/encoder/b"] == "a:params/encoder/b"
    with pytest.raises(UsageError, match=r"^begin: use_ema is set, but a holds no moving averages"):
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
def test_hugging_face_holds_weights_alone(fields: dict[str, Any], named: str):
    expected = f"begin: {named} is set, but a is a Hugging Face folder, which holds weights alone"
    with pytest.raises(UsageError, match=f"^{re.escape(expected)}$"):
        matched(SAME, at=None, **fields)


def test_only_the_first_differences_are_shown():
    stored = {("params", f"layer_{i}", "w"): spec(1) for i in range(30)}
    with pytest.raises(UsageError) as caught:
        matched(stored)
    text = str(caught.value)
    assert text.startswith("begin does not fit the model (34 differences):\n  encoder/b float32[2")
    assert "\n  … and 14 more\nNothing is padded" in text


def test_layers_that_lie_otherwise():
    unrolled = {("params", "lm", "stack", f"layers_{i}", "w"): spec(3) for i in (0, 1)}
    stacked = {("params", "lm", "stack", "repeat", "sub", "w"): spec(2, 3)}

    def advised(here: Any, there: Any) -> tuple[str, str]:
        """The rule that is advised, once it is found to do."""
        params = {"/".join(path[1:]): leaf for path, leaf in here.items()}
        state = TrainState(
            step=spec(dtype=np.int32),
            params=unflatten_dict(params, sep="/"),
            non_trainable={},
            opt_state={},
        )
        stored = Names("a", {path: spec_of(leaf) for path, leaf in there.items()})
        settings = InitFrom(sources=[Source(folder="a")])
        with pytest.raises(UsageError) as caught:
            match(settings, [Opened(settings.sources[0], stored)], state, model=BaseModel())
        (line,) = [one for one in str(caught.value).splitlines() if one.startswith("The layers")]
        rule = ast.literal_eval(line.rpartition(": ")[2])
        settings = InitFrom(sources=[Source(folder="a", rules=[rule])])
        found = match(settings, [Opened(settings.sources[0], stored)], state, model=BaseModel())
        assert len(found.found) == len(here)
        return rule

    assert advised(unrolled, stacked) == (r"(.*)/layers_(\d+)/(.*)", r"\1/repeat/sub/\3[\2]")
    assert advised(stacked, unrolled) == (r"(.*)/repeat/sub/(.*)", r"\1/layers_{layer}/\2")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sources": []}, "begin: InitFrom.sources=[] must list Sources"),
        ({"sources": ["x"]}, "begin: InitFrom.sources=['x'] must list Sources"),
        ({"missing": "drwa"}, "begin: missing='drwa' must be one of error, draw"),
        ({"draw": "x"}, "begin: draw='x': expected a tuple of patterns"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any], message: str):
    settings = {"sources": [Source(folder="x")], "label": "begin", **fields}
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        InitFrom(**settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "init_from.Source.folder=None must name a folder"),
        ({"folder": ""}, "init_from.Source.folder='' must name a folder"),
        ({"folder": "x", "step": -1}, "init_from.Source.step=-1 must be at least 0, or None"),
        (
            {"folder": "x", "rules": [("a", "b")], "ignore": ("c",)},
            "x: ignore=('c',) goes with rules=None; where rules say what is taken, the rest of the"
            " source is left",
        ),
    ],
)
def test_sources_that_make_no_sense(fields: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        Source(**fields)


def test_a_run_has_one_step():
    sources = [Source(folder=name, load_step=True) for name in "ab"]
    with pytest.raises(UsageError, match=r"^begin: load_step is set for a and b; a run has one"):
        InitFrom(sources=sources, label="begin")


def match_compared(
    *, copied: bool, rules: Any = None, missing: str = "error", draw: Any = ()
) -> Matched:
    """Match a source that holds `head` alone against a model of `encoder` and `head`."""
    state = TrainState(
        step=spec(dtype=np.int32),
        params={"encoder": {"w": spec(3)}, "head": {"w": spec(3)}},
        non_trainable={},
        opt_state={},
    )
    source = Source(folder="a", rules=rules)
    settings = InitFrom(sources=[source], missing=missing, draw=draw)
    name = ("params", "head" if rules is None else "top", "w")
    stored = Names("a", {name: spec_of(spec(3))})
    return match(settings, [Opened(source, stored)], state, model=Compared(copied=copied))


@pytest.mark.parametrize("missing", ["error", "draw"])
@pytest.mark.parametrize("rules", [None, [(r"head/(.*)", r"top/\1")]], ids=["names", "rules"])
def test_match_copies_weight_that_source_lacks_if_model_declares_original(rules: Any, missing: str):
    found = match_compared(copied=True, rules=rules, missing=missing)
    assert found.copied == {("encoder", "w"): ("head", "w")}
    assert found.drawn == ()
    assert set(found.found) == {("params", "head", "w")}


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
