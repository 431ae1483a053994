"""The TPU compiler multiplies int8 by scales inside of the product, and restores 4-bit weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from layerkit.layers.basic.linears import Linear

DIMS = 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight_format", "most"), [("int8", 0.1), ("int4", 2.1), ("int4:64", 2.1)]
)
def test_memory_of_a_restored_weight_on_tpus(absent_devices, weight_format, most):
    layer = Linear(
        input_dims=DIMS, output_dims=DIMS, fprop_dtype="bfloat16", weight_format=weight_format
    )
    device = SingleDeviceSharding(np.array(absent_devices("tpu")).flat[0])

    def on_device(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    variables = jax.tree.map(on_device, jax.eval_shape(layer.init, jax.random.key(0)))
    x = on_device(jax.ShapeDtypeStruct((8, DIMS), jnp.bfloat16))
    stats = jax.jit(layer.apply).lower(variables, x).compile().memory_analysis()
    in_bfloat16 = 2 * DIMS * DIMS
    assert stats.temp_size_in_bytes < most * in_bfloat16
