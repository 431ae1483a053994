"""Models with weights in integers compute what they compute with the rounded weights in floats."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import PARAMS
from layerkit.errors import ConfigError
from layerkit.layers.basic.linears import Bias, Linear
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.quantization.lora import add_lora, merge_lora, remove_lora
from layerkit.layers.quantization.stored_weights import dequantize_model, quantize_model
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.models import TransformerLm

KEY = jax.random.key(0)
STACKS = StackedTransformer, StackedTransformerRepeated
# One format in the ordinary tests, beside the adapters of nf4:8 below.
CASES = [
    pytest.param(
        name, stack, marks=() if (name, stack) == ("int8", STACKS[1]) else pytest.mark.slow
    )
    for name in ("int8", "int4:4", "nf4:8")
    for stack in STACKS
]


def language_model(**fields):
    sizes = {"vocab_size": 24, "model_dims": 16, "hidden_dims": 32, "num_heads": 4}
    return TransformerLm.HParams.config(**sizes, **{"num_layers": 2, **fields})


def variables_of(config):
    return jax.jit(config.Instantiate().init)(KEY)


def logits(config, variables):
    ids = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    model = config.Instantiate()
    result: jax.Array = jax.jit(lambda v: model.apply(v, ids, method="logits"))(variables)
    return result


@pytest.mark.parametrize(("weight_format", "stack"), CASES)
def test_language_model_computes_the_same_with_restored_weights(weight_format, stack):
    config = language_model(stack_tpl=stack.HParams.config())
    exact = variables_of(config)
    stored, variables = quantize_model(config, exact, weight_format=weight_format)
    plain, restored = dequantize_model(stored, variables)
    assert plain == config
    ours, theirs = logits(stored, variables), logits(plain, restored)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    reference = np.asarray(logits(config, exact))
    error = np.sqrt(np.mean((ours - reference) ** 2) / np.mean(reference**2))
    assert 1e-3 < error < (0.02 if weight_format == "int8" else 0.2)
    kinds = {path[-1]: leaf.dtype for path, leaf in flatten_dict(variables[PARAMS]).items()}
    assert kinds["w"] == (jnp.int8 if weight_format == "int8" else jnp.uint8)
    assert kinds["w_scale"] == jnp.float32
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, variables_of(stored))


def test_weights_of_experts_are_stored_in_integers():
    config = MoeFeedForward.HParams.config(
        input_dims=8, hidden_dims=16, num_experts=4, capacity_factor=2.0
    )
    exact, x = variables_of(config), jax.random.normal(KEY, (2, 6, 8))
    stored, variables = quantize_model(config, exact, weight_format="int8")
    assert variables[PARAMS]["up_scale"].shape == (4, 1, 16)
    result = jax.jit(stored.Instantiate().apply)(variables, x)
    reference = jax.jit(config.Instantiate().apply)(exact, x)
    np.testing.assert_allclose(result, reference, atol=0.02 * np.abs(reference).max())


def test_random_weights_have_about_the_declared_distribution():
    config = Linear.HParams.config(input_dims=64, output_dims=64)
    exact = variables_of(config)[PARAMS]["w"]
    stored = config.clone().set(weight_format="int4:16")
    _, restored = dequantize_model(stored, variables_of(stored))
    np.testing.assert_allclose(np.std(restored[PARAMS]["w"]), np.std(exact), rtol=0.1)


def test_adapters_of_integers_train_and_merge():
    config = language_model(num_layers=1)
    stored, variables = quantize_model(config, variables_of(config), weight_format="nf4:8")
    adapted = add_lora(stored, rank=2)
    drawn = flatten_dict(variables_of(adapted)[PARAMS], sep="/")
    frozen = flatten_dict(variables[PARAMS], sep="/")
    rng = np.random.default_rng(0)
    trained = {
        path: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
        for path, leaf in drawn.items()
        if path not in frozen
    }

    def params(trained):
        return {PARAMS: unflatten_dict({**frozen, **trained}, sep="/")}

    def loss(trained):
        outputs = logits(adapted, params(trained))
        return jnp.sum(outputs**2), outputs

    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(trained)
    assert all(np.any(np.asarray(leaf)) for leaf in gradients.values())
    plain, merged = remove_lora(adapted, params(trained))
    assert plain == config
    np.testing.assert_allclose(logits(plain, merged), outputs, rtol=2e-4, atol=2e-4)


def test_models_that_cannot_be_merged_or_quantized_raise(raises):
    adapted = add_lora(Linear.HParams.config(input_dims=8, output_dims=4, weight_format="int8"))
    with raises(ConfigError, field="dtype", value="int8"):
        merge_lora(adapted, variables_of(adapted))
    quantized = language_model(weight_format="int8")
    shapes = jax.eval_shape(quantized.Instantiate().init, KEY)
    with raises(ConfigError, field="weight_format", value="int4"):
        quantize_model(quantized, shapes, weight_format="int4")
    without_products = Bias.HParams.config(dims=4)
    with raises(ConfigError, field="weight_format", value="int8"):
        quantize_model(without_products, variables_of(without_products), weight_format="int8")


def test_functions_are_read_one_by_one():
    config = language_model()
    variables, read = variables_of(config), []

    def reader(path, leaf):
        return lambda: read.append(path) or leaf

    readers = jax.tree_util.tree_map_with_path(reader, variables)
    expected = quantize_model(config, variables, weight_format="int8")[1]
    result = quantize_model(config, readers, weight_format="int8")[1]
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert len(read) == len(jax.tree.leaves(variables))
