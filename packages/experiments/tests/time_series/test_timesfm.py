"""TimesFM's decoder computes what Google's code computes with the same weights.

`timesfm.npz` is recorded by `scripts/timesfm_reference.py` with the package timesfm on Praxis.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.interop.praxis import find_sources
from layerkit.layers.attention.base_attention import AttentionLayer
from layerkit.ops.attention.dot_product import describe_call
from layerkit_experiments.time_series.timesfm import TimesFM200M
from layerkit_runner.run.resolve import resolve

REFERENCE = np.load(Path(__file__).parent / "timesfm.npz")
SIZES = {
    "CONTEXT_LENGTH": 16,
    "HORIZON_LENGTH": 6,
    "PATCH_LENGTH": 4,
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 8,
    "NUM_HEADS": 2,
}
# Float32, through two layers and sums in another order.
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


def model_of(**fields: Any) -> Any:
    config = resolve(TimesFM200M(**SIZES)).task.model
    return build(config.clone(quantiles=(0.1, 0.5, 0.9), **fields))


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    params = jax.eval_shape(model.init, jax.random.key(0))["params"]
    return {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()}


def weights_of(model: Any) -> dict[str, Any]:
    """The recorded weights by the names of this library."""
    prefix = "params/"
    theirs = {name.removeprefix(prefix): REFERENCE[name] for name in REFERENCE if prefix in name}
    shapes = shapes_of(model)
    sources = find_sources(shapes, theirs)
    ours = {}
    for name, source in sources.items():
        view = source.view(lambda name: ts.array(theirs[name]), shapes[name])
        ours[name] = view.read().result()
    return {"params": unflatten_dict(ours, sep="/")}


def batch() -> NestedMap:
    return NestedMap({name: REFERENCE[name] for name in ("series", "paddings", "frequency")})


@pytest.mark.parametrize(("train", "name"), [(None, "evaluated"), (True, "trained")])
def test_predictions_equal_those_of_timesfm(train: bool | None, name: str):
    model = model_of(train=train)
    inputs = batch()
    predict = functools.partial(model.apply, method=lambda model, *inputs: model.predict(*inputs))
    values = jax.jit(predict)(weights_of(model), *inputs.values())
    # Outputs at patches that are padding mean nothing: the first of row 1, and of row 2.
    expected = REFERENCE[name]
    np.testing.assert_allclose(values[0], expected[0], **CLOSE)
    np.testing.assert_allclose(values[1:, 1:], expected[1:, 1:], **CLOSE)


def test_kernels_of_runs_are_not_selected_for_series_with_gaps(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def attend(layer: Any, query: Any, key: Any, value: Any, options: Any) -> Any:
        calls.append(describe_call(query, key, value, options))
        return value

    monkeypatch.setattr(AttentionLayer, "attend", attend)
    model = model_of()
    predict = functools.partial(model.apply, method=lambda model, *inputs: model.predict(*inputs))
    jax.eval_shape(predict, weights_of(model), *batch().values())
    assert calls
    assert not any(call.segments_are_runs for call in calls)


def test_forecast_equals_that_of_timesfm():
    model = model_of(forecast_length=10)
    decode = functools.partial(model.apply, method=model.decode)
    outputs = jax.jit(decode)(weights_of(model), batch())
    np.testing.assert_allclose(outputs.forecast, REFERENCE["forecast"], **CLOSE)


def test_loss_of_the_last_patch_is_that_of_fine_tuning_in_pax():
    model = model_of(loss_patches="last", train=True)
    series = np.concatenate([REFERENCE["series"], REFERENCE["future"]], axis=1)
    window = NestedMap(series=series, frequency=np.ones(3, np.int32))
    metrics, _ = jax.jit(model.apply)(weights_of(model), window)
    assert float(metrics["loss"].value) == pytest.approx(float(REFERENCE["loss"]), rel=1e-4)


def test_released_checkpoint_fits():
    released = dict(line.split() for line in REFERENCE["released"].tolist())
    theirs = {name: tuple(map(int, shape.split("x"))) for name, shape in released.items()}
    ours = shapes_of(build(resolve(TimesFM200M()).task.model))
    sources = find_sources(ours, theirs)
    for name, source in sources.items():
        (stored,) = {theirs[each] for each in source.names}
        order = source.weight.transpose or range(len(stored))
        assert tuple(stored[axis] for axis in order) == ours[name], name
    assert sum(map(math.prod, ours.values())) == sum(map(math.prod, theirs.values()))


def test_fine_tuned_checkpoints_have_the_names_of_paxs_model():
    ours = shapes_of(model_of())
    theirs = {f"core_layer/{name}" for source in sources_of_reference(ours) for name in source}
    assert find_sources(ours, theirs).keys() == ours.keys()


def sources_of_reference(ours: dict[str, Any]) -> list[tuple[str, ...]]:
    names = [name.removeprefix("params/") for name in REFERENCE if name.startswith("params/")]
    return [source.names for source in find_sources(ours, names).values()]
