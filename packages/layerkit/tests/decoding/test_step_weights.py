"""Steps with unrolled layers and cast weights equal those of the given network."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.sharding import BoundSharding
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import BeamSearch, SampleDecoder
from layerkit.decoding.cached_network import step_weights
from layerkit.layers import (
    LayerNorm,
    RelativeBias,
    RmsNorm,
    StackedTransformerRepeated,
    Transformer,
)
from layerkit.models import LanguageModel, TransformerLm

ONE_CPU = BoundSharding(jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("data",)))
LAYER = Transformer.HParams.config()
STACKS = {
    "alike": {"num_layers": 3},
    "pattern with a remainder": {
        "num_layers": 5,
        "block_tpls": (LAYER, LAYER.clone().set(norm_tpl=RmsNorm.HParams.config())),
    },
    "first layers": {"num_layers": 3, "first_tpls": (LAYER.clone(norm_policy="post"),)},
    "two axes": {"num_layers": 4, "stacked_shape": (2, 2)},
    "weights of the stack itself": {
        "num_layers": 3,
        "relative_bias_tpl": RelativeBias.HParams.config(),
    },
    "weights that are shared in each layer": {
        "num_layers": 3,
        "layer_tpl": LAYER.clone().set(norm_tpl=RmsNorm.HParams.config(shared_weight_id="norm")),
    },
}


def language_model(decoder, *, unroll, num_layers, **stack):
    lm = TransformerLm.HParams.config(
        vocab_size=16,
        model_dims=16,
        hidden_dims=32,
        num_heads=2,
        num_layers=num_layers,
        final_norm_tpl=LayerNorm.HParams.config(),
        stack_tpl=StackedTransformerRepeated.HParams.config(unroll=unroll, **stack),
    )
    model = LanguageModel.HParams.config(lm_tpl=lm, decoder=decoder, sharding=ONE_CPU)
    return model.Instantiate()


GREEDY = SampleDecoder.HParams.config(max_decode_steps=4, temperature=0.0)
BEAMS = BeamSearch.HParams.config(max_decode_steps=4, beam_size=2, eos_id=1)


@pytest.mark.parametrize(
    ("decoder", "stack"),
    [
        (BEAMS, "alike"),
        *(pytest.param(GREEDY, stack, marks=pytest.mark.slow) for stack in STACKS),
    ],
)
def test_tokens_equal_those_of_repeated_layers(decoder, stack):
    models = [language_model(decoder, unroll=unroll, **STACKS[stack]) for unroll in (None, 1)]
    random = np.random.default_rng(0)
    variables = jax.tree.map(
        lambda x: x + 0.3 * random.normal(size=x.shape).astype(x.dtype),
        jax.jit(models[0].init)(jax.random.key(0)),
    )
    batch = NestedMap(ids=jnp.array([[3, 4, 5], [6, 7, 0]]), prompt_lengths=jnp.array([3, 2]))
    unrolled, repeated = (
        jax.jit(lambda v, model=model: model.apply(v, batch, method="decode"))(variables)
        for model in models
    )
    np.testing.assert_array_equal(unrolled.ids, repeated.ids)
    np.testing.assert_allclose(unrolled.log_probs, repeated.log_probs, rtol=1e-5, atol=1e-6)


def test_each_layer_has_weights_of_its_own():
    def layers_of(model):
        def call(bound):
            return step_weights(bound.lm)[1]["params"]["stack"]

        return jax.eval_shape(lambda v: model.apply(v, method=call), variables)

    model = language_model(GREEDY, unroll=None, num_layers=3)
    variables = jax.eval_shape(model.init, jax.random.key(0))
    layers = layers_of(model)
    assert sorted(layers) == ["layers_0", "layers_1", "layers_2"]
    assert layers["layers_0"]["feed_forward"]["up"]["w"].shape == (16, 32)
    # A number in the field is kept.
    assert sorted(layers_of(language_model(GREEDY, unroll=1, num_layers=3))) == ["repeat"]


def test_weights_are_cast_to_the_dtypes_in_which_layers_compute():
    norm = LayerNorm.HParams.config(fprop_dtype="float32")
    model = language_model(GREEDY, unroll=1, num_layers=3).clone(fprop_dtype="bfloat16")
    model = model.clone(lm_tpl=model.lm_tpl.clone().set(final_norm_tpl=norm))
    variables = jax.jit(model.init)(jax.random.key(0))
    ids = jnp.array([[3, 4, 5], [6, 7, 8]])

    def call(bound):
        network, given = step_weights(bound.lm)
        plain, own = bound.lm.unbind()

        def logits(network, given):
            def step(lm):
                lm.init_cache(2, 4)
                return lm.extend_step(ids, time_step=0)

            return network.apply(given, method=step, mutable=["cache"])[0]

        return given["params"], logits(network, given), logits(plain, own)

    given, result, expected = jax.jit(lambda v: model.apply(v, method=call))(variables)
    dtypes = {str(path[0].key): x.dtype for path, x in jax.tree_util.tree_leaves_with_path(given)}
    assert dtypes == {"softmax": jnp.bfloat16, "stack": jnp.bfloat16, "final_norm": jnp.float32}
    np.testing.assert_array_equal(result, expected)
