"""QUANTIZATION selects the products of all layers but the embedding and the softmax."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_experiments.lm.nvidia import NVIDIA1_3B
from layerkit_experiments.lm.pile import GPT5B
from layerkit_experiments.lm.quickstart import LocalText
from layerkit_runner.config.experiment import FieldError
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve

SMALL: dict[str, Any] = {
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 32,
    "HIDDEN_DIMS": 64,
    "NUM_HEADS": 4,
    "DIMS_PER_HEAD": 8,
    "VOCAB_SIZE": 48,
    "MAX_SEQ_LEN": 16,
    "PERCORE_BATCH_SIZE": 1.0,
    "ICI_MESH_SHAPE": [1, 1, 1],
    "DCN_MESH_SHAPE": None,
}
# Products with a weight in a layer of GPT: query, key, value, output, up, down.
IN_LAYER = 6


def equations(program: Any) -> Iterator[Any]:
    for eqn in program.eqns:
        yield eqn
        for value in eqn.params.values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@functools.cache
def products(name: str | None) -> dict[str, Counter[tuple[str, str]]]:
    """Return the dtypes of the factors of GPT5B's products in layers and of those of its head."""
    partitioner, task = build_parts(resolve(GPT5B(**SMALL, QUANTIZATION=name)))
    partitioner.start(jax.devices()[:1])
    partitioner.bind(task)
    state = jax.eval_shape(lambda: task.init_state(jax.random.key(0)))
    batch = NestedMap(
        ids=jnp.zeros((2, 16), jnp.int32),
        labels=jnp.zeros((2, 16), jnp.int32),
        weights=jnp.ones((2, 16)),
    )
    program = jax.make_jaxpr(partitioner.train_step_fn(task))(state, batch)
    result = {"layers": Counter[tuple[str, str]](), "head": Counter[tuple[str, str]]()}
    for eqn in equations(program.jaxpr):
        factors = [v.aval for v in eqn.invars[:2]]
        if eqn.primitive.name != "dot_general" or any(len(each.shape) != 2 for each in factors):
            continue
        shapes = [size for each in (*factors, eqn.outvars[0].aval) for size in each.shape]
        where = "head" if SMALL["VOCAB_SIZE"] in shapes else "layers"
        result[where][factors[0].dtype.name, factors[1].dtype.name] += 1
    return result


def test_float_products_are_the_default():
    dtypes = products(None)["layers"]
    assert set(dtypes) == {("bfloat16", "bfloat16")}
    assert dtypes.total() >= 3 * IN_LAYER


@pytest.mark.parametrize(
    "name", ["fp8_delayed", pytest.param("fp8_current", marks=pytest.mark.slow)]
)
def test_all_products_of_layers_are_in_fp8_and_those_of_the_head_are_not(name):
    result = products(name)
    e4, e5 = "float8_e4m3fn", "float8_e5m2"
    assert set(result["layers"]) <= {(e4, e4), (e4, e5), (e5, e4)}
    assert result["layers"].total() == products(None)["layers"].total()
    assert result["head"] == products(None)["head"]


def test_weight_gradients_of_int8_products_are_in_floats():
    result = products("int8")
    expected = products(None)["layers"].total()
    assert result["layers"] == {
        ("int8", "int8"): expected - IN_LAYER,
        ("bfloat16", "bfloat16"): IN_LAYER,
    }
    assert result["head"] == products(None)["head"]


def test_use_fp8_is_the_name_of_pax_for_delayed_scaling(raises):
    fields = {"NUM_LAYERS": 1, "MODEL_DIMS": 8, "NUM_HEADS": 2, "DIMS_PER_HEAD": 4}
    assert NVIDIA1_3B(USE_FP8=True, **fields).task() == (
        NVIDIA1_3B(QUANTIZATION="fp8_delayed", **fields).task()
    )
    with raises(ConfigError, field="QUANTIZATION", value="int8"):
        NVIDIA1_3B(USE_FP8=True, QUANTIZATION="int8", **fields).task()


def test_unknown_name_is_an_error(raises):
    with raises(FieldError, field="QUANTIZATION", value="mxfp4"):
        LocalText(QUANTIZATION="mxfp4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "mxfp8", "nvfp4", "int8"])
def test_training_ends_near_that_in_floats(name):
    def losses(quantization: str | None) -> np.ndarray:
        small = {**SMALL, "VOCAB_SIZE": 32, "WARMUP_STEPS": 0, "FPROP_DTYPE": "float32"}
        experiment = NVIDIA1_3B(**small, QUANTIZATION=quantization, LEARNING_RATE=3e-3)
        partitioner, task = build_parts(resolve(experiment))
        partitioner.start(jax.devices()[:1])
        partitioner.bind(task)
        state, step = partitioner.init_fn(task)(), partitioner.train_step_fn(task)
        rng, result = np.random.default_rng(1), []
        for _ in range(150):
            # Each token is the one before it plus 1 or 2, so that 0.69 nats are the least.
            steps = rng.integers(1, 3, (8, 17))
            tokens = (np.cumsum(steps, axis=1) % 32).astype(np.int32)
            weights = np.ones((8, 16), np.float32)
            batch = NestedMap(ids=tokens[:, :-1], labels=tokens[:, 1:], weights=weights)
            state, (metrics, _) = step(state, partitioner.put_batch(batch))
            result.append(float(metrics["loss"].value))
        return np.array(result)

    exact, rounded = losses(None), losses(name)
    assert exact[-20:].mean() < 1.0 < exact[0]
    assert abs(rounded[-20:].mean() - exact[-20:].mean()) < 0.03
    assert not np.array_equal(rounded, exact)
