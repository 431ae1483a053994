"""Tests of embeddings for each layer, and of keys and values that layers share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
from layerkit.config import Config, build
from layerkit.errors import ConfigError
from layerkit.layers.transformer.stacks import unrolled_stack
from layerkit.models.transformer_lm import TransformerLm
from layerkit.ops.attention.masks import AttentionMask, row_positions

BATCH, LENGTH = 2, 6
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 12, (BATCH, LENGTH)))
POSITIONS = row_positions(BATCH, LENGTH)
MASK = AttentionMask.causal_mask(BATCH, LENGTH)
X = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, 8))


def layer(**attention: Any) -> Any:
    template: Any = Config(L.Transformer, layer_input_tpl=Config(L.GatedInput, dims=6))
    template.attention_tpl.set(rotary_tpl=Config(L.RotaryPositionalEmbedding), **attention)
    return template


def network(num_layers: int = 7, **stack: Any) -> Any:
    """Return two layers with keys and values, and a pattern that reads these."""
    sizes = {"vocab_size": 12, "model_dims": 8, "hidden_dims": 12, "num_heads": 2}
    stack_tpl = Config(
        L.StackedTransformerRepeated,
        first_tpls=(layer(window=3), layer()),
        block_tpls=(layer(window=3, kv_layer=1), layer(kv_layer=2)),
    )
    stack_tpl.set(**stack)
    return Config(
        TransformerLm,
        **sizes,
        num_layers=num_layers,
        stack_tpl=stack_tpl,
        layer_inputs_tpl=Config(L.LayerInputs, dims=6),
    )


def draw(model: Any) -> Any:
    """Return random weights, none of them zero, without compiling `init`."""
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 0.3, w.shape).astype(w.dtype), shapes)


def run_steps(model: Any, steps: list[int]) -> jax.Array:
    model.init_cache(BATCH, LENGTH)
    starts = np.cumsum([0, *steps[:-1]])
    parts = [
        model.extend_step(IDS[:, start : start + step], time_step=jnp.int32(start))
        for start, step in zip(starts, steps, strict=True)
    ]
    return jnp.concatenate(parts, axis=1)


@pytest.mark.parametrize(
    "num_layers",
    [
        pytest.param(4, id="whole periods"),
        pytest.param(7, id="with a remainder", marks=pytest.mark.slow),
    ],
)
def test_cached_steps_equal_whole_rows(num_layers):
    model = build(network(num_layers))
    variables = draw(model)
    whole = jax.jit(lambda v: model.apply(v, IDS, method="logits"))(variables)

    @jax.jit
    def run(variables):
        return model.apply(
            variables, [3, 1, 2], method=lambda m, steps: run_steps(m, steps), mutable=["cache"]
        )

    cached, state = run(variables)
    np.testing.assert_allclose(cached, whole, atol=1e-5)
    # Layers that read those of others cache nothing.
    assert len(jax.tree.leaves(state)) == 4


@pytest.mark.parametrize(
    "fields", [{"remat": "full"}, pytest.param({"unroll": 2}, marks=pytest.mark.slow)], ids=repr
)
def test_gradients_do_not_depend_on_how_a_stack_runs(fields):
    params = draw(build(network()))["params"]

    def gradients(**fields):
        model = build(network(**fields))

        def loss(params):
            return jnp.mean(model.apply({"params": params}, IDS, method="logits") ** 2)

        return jax.jit(jax.grad(loss))(params)

    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5),
        gradients(**fields),
        gradients(unroll=1),
    )


def test_a_pipeline_shares_keys_and_values():
    def make_plain_layer(**attention):
        return layer(**attention).set(layer_input_tpl=None)

    def run(stack_class, **fields):
        stack = Config(
            stack_class,
            input_dims=8,
            hidden_dims=12,
            num_heads=2,
            num_layers=5,
            first_tpls=(make_plain_layer(),),
            layer_tpl=make_plain_layer(kv_layer=1),
            **fields,
        )
        model = build(stack)
        return model, draw(model)

    repeated, variables = run(L.StackedTransformerRepeated)
    pipelined, like = run(L.PipelinedTransformer, num_stages=2, num_microbatches=2)
    leaves = [
        leaf.reshape(other.shape)
        for leaf, other in zip(jax.tree.leaves(variables), jax.tree.leaves(like), strict=True)
    ]
    moved = jax.tree.unflatten(jax.tree.structure(like), leaves)
    arguments = {"mask": MASK, "positions": POSITIONS}
    np.testing.assert_allclose(
        jax.jit(lambda v: pipelined.apply(v, X, **arguments))(moved),
        jax.jit(lambda v: repeated.apply(v, X, **arguments))(variables),
        atol=1e-5,
    )


def test_attention_to_the_keys_and_values_of_an_equal_layer_is_its_output():
    fields = {"input_dims": 8, "num_heads": 4, "num_kv_heads": 2, "qk_norm_tpl": Config(L.RmsNorm)}
    layer = build(Config(L.MultiHeadAttention, **fields))
    reader = build(Config(L.MultiHeadAttention, **fields, kv_layer=3))
    params = layer.init(jax.random.key(0))["params"]
    kept: Any = {}
    expected = layer.apply({"params": params}, X, mask=MASK, positions=POSITIONS, kv=kept)
    shared = {name: params[name] for name in ("query", "output", "query_norm")}
    assert set(shared) == set(reader.init(jax.random.key(0))["params"])

    def read(**kv):
        return reader.apply({"params": shared}, X, mask=MASK, positions=POSITIONS, **kv)

    np.testing.assert_allclose(read(kv={3: kept[None]}), expected, atol=1e-6)
    with pytest.raises(ConfigError, match="kv_layer"):
        read(kv={2: kept[None]})
    with pytest.raises(ConfigError, match="sizes of heads"):
        read(kv={3: (kept[None][0][:, :, :1],) * 2})


def score(config: Any) -> Any:
    model = build(config)

    def run(key: jax.Array) -> jax.Array:
        return model.apply(model.init(key), IDS, method="logits")

    return jax.eval_shape(run, jax.random.key(0))


def test_first_layer_may_read_another_that_the_pattern_does_not_read():
    def logits(variables=None, **stack):
        config = network(4, **stack)
        config.stack_tpl = unrolled_stack(config.stack_tpl)
        model = build(config)
        variables = variables or draw(model)
        return jax.jit(lambda v: model.apply(v, IDS, method="logits"))(variables), variables

    near, far = layer(window=3, kv_layer=1), layer(kv_layer=2)
    expected, variables = logits(block_tpls=(far.clone(), near))
    layers = variables["params"]["stack"]
    layers["first_2"], layers["layers_0"] = layers.pop("layers_0"), layers.pop("layers_1")
    first = (layer(window=3), layer(), far)
    outputs, _ = logits(variables, first_tpls=first, block_tpls=(near.clone(),))
    np.testing.assert_allclose(outputs, expected, atol=1e-6)


def test_layers_without_their_inputs_are_errors():
    with pytest.raises(ConfigError, match="layer_input"):
        score(network().set(layer_inputs_tpl=None))
    with pytest.raises(ConfigError, match="kv_layer"):
        score(network(4, first_tpls=None))
    unrolled = network()
    unrolled.stack_tpl = unrolled_stack(unrolled.stack_tpl)
    assert score(unrolled).shape == (BATCH, LENGTH, 12)
