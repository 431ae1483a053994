"""Study files of rungs: sizes that no rung can have, and values that TOML can or cannot hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import parse_toml
from layerkit_runner.tools.scaling import ladder
from layerkit_runner.tools.scaling.ladder import Rung, Size, ladder_text, plan_rungs

RUNG = Size(10, 20.0, 30.0)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[Rung]]:
    """A ladder with 20 tokens per weight, of models with 100 weights per size.

    A step has one token, and six FLOPs per weight: D/N = FLOPs / 60,000 / size².
    """
    experiment = SimpleNamespace(size_fields=lambda size: {"SIZE": size})

    def resolve(overrides: Any) -> Any:
        size = int(overrides[0].text) if overrides else 0
        return SimpleNamespace(experiment=experiment, name="toy", size=size)

    monkeypatch.setattr(ladder, "last_step_path", lambda base: "STEPS")
    monkeypatch.setattr(ladder, "step_size", lambda x: Size(100 * x.size, 1.0, 600.0 * x.size))
    return lambda flops: plan_rungs([flops], (), resolve, ratio=20)


@pytest.mark.parametrize(("flops", "size"), [(7e5, 1), (1.2e8, 10), (6e11, 512)])
def test_rung_has_the_size_whose_ratio_is_nearest(plan, flops, size):
    ((planned, fields),) = plan(flops)
    assert fields == {"SIZE": size, "STEPS": planned.D}
    assert math.isclose(planned.C, flops, rel_tol=1e-2)


@pytest.mark.parametrize("flops", [5e5, 7e11])
def test_rung_beyond_the_sizes_is_an_error(plan, raises, flops):
    with raises(UsageError, field="--flops", value=flops):
        plan(flops)


@pytest.mark.parametrize("value", ["/d/😀", "é", "a\x7fb", 1e-5, 1e20, True, [1, 2], ["é"]])
@pytest.mark.parametrize("path", ["RATE", "Größe", "datasets.0.seed"])
def test_ladder_is_toml_of_the_same_values(path, value):
    text = ladder_text("h/l", [(RUNG, {path: value})], [(RUNG, {path: value})])
    assert parse_toml(text) == {
        "metric": "h/l",
        "trials": [{path: value}],
        "larger": {path: value},
    }


@pytest.mark.parametrize("value", [None, math.inf, [math.nan], {"a": 1}, object()])
def test_value_without_a_form_in_toml_is_an_error(raises, value):
    with raises(UsageError, field="RATE", value=value):
        ladder_text("h/l", [(RUNG, {"RATE": value})], [])
