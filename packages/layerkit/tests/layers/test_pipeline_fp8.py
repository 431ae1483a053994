"""Tests of fp8 products in a pipeline: scales cover all microbatches and no bubbles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base_layer import OVERWRITE_WITH_GRADIENT, PARAMS, BaseLayer
from layerkit.layers.linears import Linear
from layerkit.layers.pipeline import Pipeline
from layerkit.layers.quantization.fp8 import Fp8Dot, accumulate_by_max
from layerkit.layers.repeat import Repeat

KEY = jax.random.key(0)
DIMS = 4


class Unit(BaseLayer):
    """x/|x| · w in 8 bits: in a bubble its largest input is not a number."""

    def setup(self):
        dot = Fp8Dot.HParams.config(amax_history_length=2)
        linear = Linear.HParams.config(input_dims=DIMS, output_dims=DIMS, dot_tpl=dot)
        self.create_child("linear", linear)

    def fprop(self, x):
        return self.linear(x / jnp.linalg.norm(x, axis=-1, keepdims=True))


@pytest.mark.parametrize("repeats", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fp8_state_of_a_pipeline_equals_that_of_a_stack(repeats):
    fields = {"num_stages": 2, "num_microbatches": 4, "circular_repeats": repeats}
    layer = Pipeline.HParams.config(stage_tpl=Unit.HParams.config(), **fields).Instantiate()
    shape = (2, 2) if repeats == 2 else 2
    row = Repeat.HParams.config(sub_tpl=Unit.HParams.config(), num_repeats=shape).Instantiate()
    random = np.random.default_rng(3)
    variables = jax.tree.map(
        lambda leaf: random.uniform(0.5, 1.5, leaf.shape).astype(np.float32),
        jax.eval_shape(layer.init, KEY),
    )
    of_row = {kind: {"sub": tree["stage"]} for kind, tree in variables.items()}
    x = random.normal(size=(8, DIMS)).astype(np.float32)

    def gradients(layer):
        def loss(variables):
            state = accumulate_by_max(variables[OVERWRITE_WITH_GRADIENT])
            return jnp.sum(jnp.sin(layer.apply({**variables, OVERWRITE_WITH_GRADIENT: state}, x)))

        return jax.jit(jax.grad(loss))

    found, expected = gradients(layer)(variables), gradients(row)(of_row)
    for kind in (PARAMS, OVERWRITE_WITH_GRADIENT):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
            found[kind]["stage"],
            expected[kind]["sub"],
        )
