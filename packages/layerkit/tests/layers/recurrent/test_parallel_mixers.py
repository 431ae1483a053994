"""ParallelMixers against its two mixers alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layerkit.base.base_layer import PARAMS
from layerkit.layers import Mamba2, MultiHeadAttention, ParallelMixers
from layerkit.ops.attention.masks import AttentionMask, row_positions

DIMS, FACTORS = 8, (0.5, 2.0, 3.0, 0.25)
X = np.random.default_rng(0).normal(size=(2, 5, DIMS)).astype(np.float32)


@pytest.mark.slow
def test_outputs_are_the_sum_of_both_mixers_with_their_factors():
    mamba = Mamba2.HParams.config(
        num_key_heads=1, num_value_heads=2, key_dim_per_head=4, value_dim_per_head=4
    )
    names = (f"{mixer}_{end}put" for mixer in ("attention", "recurrent") for end in ("in", "out"))
    factors = {f"{name}_multiplier": factor for name, factor in zip(names, FACTORS, strict=True)}
    layer = ParallelMixers.HParams.config(
        input_dims=DIMS, num_heads=2, num_kv_heads=1, recurrent_tpl=mamba, **factors
    ).Instantiate()
    params = layer.init(jax.random.key(0))[PARAMS]
    sizes = {"input_dims": DIMS, "num_heads": 2, "num_kv_heads": 1}
    attention = MultiHeadAttention.HParams.config(**sizes).Instantiate()
    recurrent = mamba.clone(input_dims=DIMS).Instantiate()
    inputs = {"mask": AttentionMask.causal_mask(2, 5), "positions": row_positions(2, 5)}
    attended = attention.apply({PARAMS: params["attention"]}, FACTORS[0] * X, **inputs)
    mixed = recurrent.apply({PARAMS: params["recurrent"]}, FACTORS[2] * X, **inputs)
    result = layer.apply({PARAMS: params}, X, **inputs)
    np.testing.assert_allclose(result, FACTORS[1] * attended + FACTORS[3] * mixed, atol=1e-5)
