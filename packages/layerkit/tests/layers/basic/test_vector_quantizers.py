"""Vector quantizers equal those of Praxis; averages and residuals equal their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import AUX_LOSS, NON_TRAINABLE, PARAMS, SUMMARIES
from layerkit.layers import RandomVectorQuantizer, VectorQuantizer
from layerkit.layers.basic.vector_quantizers import codebook_usage

SIZES = {"input_dims": 4, "num_classes": 5}
PLAIN = {"normalize_latents": False, "normalize_codebook": False}
UNIT = {"normalize_latents": True, "normalize_codebook": True}
CASES = {
    "random": RandomVectorQuantizer(**SIZES, projection_dims=6),
    "random_groups": RandomVectorQuantizer(**SIZES, projection_dims=6, num_groups=2, **UNIT),
    "trained": VectorQuantizer(**SIZES, train=True),
    "trained_groups": VectorQuantizer(
        **SIZES, num_groups=2, commitment_weight=0.5, **PLAIN, train=True
    ),
}
MUTABLE = [AUX_LOSS, SUMMARIES]
X = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
IS_TOKEN = np.arange(6) < np.array([6, 4])[:, None]


@pytest.mark.parametrize("name", CASES)
def test_outputs_losses_and_gradients_equal_praxis(praxis, name):
    case, layer = praxis(f"quantizer_{name}"), CASES[name]
    weights, is_token = case["weights"], case["paddings"] == 0
    if name.startswith("random"):
        names = {"entries": "random_codebook", "w": "random_proj", "b": "random_bias"}
        frozen = {ours: weights[theirs] for ours, theirs in names.items()}
        params, state = {}, {NON_TRAINABLE: frozen | {"entries": frozen["entries"][None]}}
    else:
        params, state = {"entries": weights["w"][None]}, {}

    @jax.jit
    def loss(params, x):
        (vectors, codes), reports = layer.apply(
            {PARAMS: params, **state}, x, is_token=is_token, mutable=MUTABLE
        )
        aux = sum(leaf.sum() for leaf in jax.tree.leaves(reports.get(AUX_LOSS, {})))
        return jnp.sum(vectors * case["cotangent"]) + aux, (vectors, codes, aux, reports)

    (_, result), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, case["x"])
    vectors, codes, aux, reports = result
    mask = is_token[..., None]
    np.testing.assert_allclose(vectors, case["outputs"] * mask, atol=1e-6)
    np.testing.assert_array_equal(codes, case["z_codes"] * mask)
    np.testing.assert_allclose(aux, case.get("loss", 0.0), rtol=1e-6)
    np.testing.assert_allclose(grads[1], case["gradient_of_x"], atol=1e-6)
    if params:
        np.testing.assert_allclose(grads[0]["entries"][0], case["gradients"]["w"], atol=1e-6)
    perplexity, coverage = codebook_usage(codes, 5, is_token=is_token)
    np.testing.assert_allclose(perplexity, case["pplx"], rtol=1e-6)
    np.testing.assert_allclose(coverage, case["codebook_coverage"], rtol=1e-6)
    assert len(jax.tree.leaves(reports[SUMMARIES])) >= 2


def test_averages_of_an_entry_move_to_the_mean_of_its_latents():
    layer = VectorQuantizer(**SIZES, **PLAIN, decay=0.75, train=True)
    variables = layer.init(jax.random.key(0))
    before = variables[NON_TRAINABLE]["entries"][0, :, 0]
    run = jax.jit(lambda v: layer.apply(v, X, is_token=IS_TOKEN, mutable=[NON_TRAINABLE, AUX_LOSS]))
    (_, codes), updated = run(variables)
    for entry in range(5):
        chosen = X[IS_TOKEN & (codes[..., 0] == entry)]
        count = 0.75 + 0.25 * len(chosen)
        expected = (0.75 * before[entry] + 0.25 * chosen.sum(axis=0)) / (count + 1e-5)
        ours = updated[NON_TRAINABLE]["entries"][0, entry, 0]
        ours = ours / (updated[NON_TRAINABLE]["counts"][0, entry, 0] + 1e-5)
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_residual_quantizers_read_what_those_before_leave():
    layer = VectorQuantizer(**SIZES, **PLAIN, num_groups=2, num_quantizers=2)
    variables = layer.init(jax.random.key(0))
    vectors, codes = jax.jit(layer.apply)(variables, X)
    single, residual = VectorQuantizer(**SIZES, **PLAIN, num_groups=2), X
    for stage in range(2):
        params = {"entries": variables[PARAMS]["entries"][stage : stage + 1]}
        part, part_codes = jax.jit(single.apply)({PARAMS: params}, residual)
        np.testing.assert_array_equal(codes[..., 2 * stage : 2 * stage + 2], part_codes)
        residual = residual - part
    np.testing.assert_allclose(vectors, X - residual, atol=1e-6)
    np.testing.assert_allclose(layer.apply(variables, codes, method="look_up"), vectors, atol=1e-6)
