"""N-grammers equal Praxis, and packed rows and cached steps of a model equal whole rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit.decoding import SampleDecoder
from layerkit.errors import ConfigError
from layerkit.layers import MultiTokenPrediction, NGrammer
from layerkit.models.language_model import LanguageModel

HEADS, DIMS, BUCKETS = 2, 8, 11


def ours(weights):
    """Weights of Praxis, or their gradients, under our names."""
    heads = range(HEADS)
    norms = {
        name: {
            part: np.stack([weights[f"{theirs}_layer_norm_{head}"][part] for head in heads])
            for part in ("scale", "bias")
        }
        for name, theirs in {"norm": "emb", "bigram_norm": "ngram"}.items()
    }
    table = np.concatenate([weights[f"ngram_table_{head}"]["emb_var"] for head in heads])
    return {"embedding": {"w": table}, **norms}


@pytest.mark.parametrize(
    "name",
    [
        "ngrammer_clusters",
        pytest.param("ngrammer", marks=pytest.mark.slow),
        pytest.param("ngrammer_added", marks=pytest.mark.slow),
    ],
)
def test_layer_and_its_gradient_equal_praxis(praxis, name):
    case = praxis(name)
    config = NGrammer.HParams.config(input_dims=DIMS, num_heads=HEADS, num_buckets=BUCKETS)
    config.norm_tpl.scale_offset = 1.0
    config.bigram_dims = None if name == "ngrammer_added" else 3
    weights, gradient, state = case["weights"], case["gradient"], {}
    if name == "ngrammer_clusters":
        config.quantizer_tpl.num_classes = 5
        weights, gradient = weights["ngram_layer"], gradient["ngram_layer"]
        means = np.asarray(case["state"]["vq_layer"]["means"]).transpose(1, 0, 2)[None]
        # The means of Praxis are ratios of sums and numbers here, 1 and a constant of them.
        clusters = {"entries": means * (1 + 1e-5), "counts": np.ones(means.shape[:-1])}
        state = {"quantizer": jax.tree.map(jnp.float32, clusters)}
    else:
        config.set(quantizer_tpl=None, vocab_size=9)
    layer = config.set(train=False).Instantiate()
    # The documents of a row begin at position 0; the last one has padding behind it.
    documents = jnp.cumsum(jnp.asarray(case["segment_pos"]) == 0, axis=1)
    segments = jnp.where(jnp.asarray(case["paddings"]) == 0, documents, 0).astype(jnp.int32)

    def loss(params, x):
        variables = {"params": params, "non_trainable": state}
        outputs = layer.apply(variables, case["ids"].astype(np.int32), x, segments=segments)
        return jnp.sum(outputs * case["probe"]), outputs

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (of_weights, of_inputs), outputs = grad(ours(weights), jnp.asarray(case["x"]))
    np.testing.assert_allclose(outputs, case["outputs"], atol=1e-5)
    np.testing.assert_allclose(of_inputs, case["input_gradient"], atol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), of_weights, ours(gradient)
    )


def language_model(**fields):
    config = LanguageModel.HParams.config(
        decoder=SampleDecoder(max_decode_steps=4, temperature=0.0)
    )
    ngrammer = NGrammer.HParams.config(num_heads=HEADS, num_buckets=BUCKETS, bigram_dims=2)
    ngrammer.quantizer_tpl.num_classes = 5
    config.lm_tpl.set(
        vocab_size=9, model_dims=8, hidden_dims=8, num_heads=2, ngrammer_tpl=ngrammer, **fields
    )
    return config


IDS = np.random.default_rng(0).integers(1, 9, (3, 6)).astype(np.int32)


def test_packed_rows_and_decoded_rows_equal_whole_rows():
    model = language_model().Instantiate()
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    random = np.random.default_rng(1)
    variables = jax.tree.map(lambda x: jnp.asarray(random.normal(0, 0.5, x.shape)), shapes)
    variables["non_trainable"] = jax.tree.map(jnp.abs, variables["non_trainable"])
    logits = jax.jit(
        lambda ids, segments: model.bind(variables).lm.logits(ids, segment_ids=segments)
    )
    # A row of two documents, and each of them alone.
    ids, rows = np.zeros((3, 10), np.int32), np.zeros((3, 10), np.int32)
    ids[0, :5], ids[1, :3], ids[2, :2] = IDS[0, :5], IDS[0, :3], IDS[0, 3:5]
    rows[0, :3], rows[0, 3:5], rows[1, :3], rows[2, :2] = 1, 2, 1, 1
    packed, first, second = logits(ids, rows)
    np.testing.assert_allclose(packed[:3], first[:3], atol=1e-5)
    np.testing.assert_allclose(packed[3:5], second[:2], atol=1e-5)
    batch = NestedMap(ids=IDS, prompt_lengths=np.array([6, 2, 4]))
    outputs = jax.jit(lambda: model.apply(variables, batch, method="decode"))()
    log_probs = jax.nn.log_softmax(logits(outputs.ids, np.ones((3, 10), np.int32)))[:, :-1]
    chosen = jnp.take_along_axis(log_probs, outputs.ids[:, 1:, None], axis=-1)[..., 0]
    drawn = outputs.log_probs[:, 1:] != 0
    assert drawn.sum() == 12
    np.testing.assert_allclose(outputs.log_probs[:, 1:], jnp.where(drawn, chosen, 0), atol=1e-5)


def test_sizes_and_combinations_without_meaning_raise(raises):
    with raises(ConfigError, field="bigram_dims", value=5):
        layer = NGrammer(input_dims=DIMS, num_heads=HEADS, bigram_dims=5, num_buckets=BUCKETS)
        layer.init(jax.random.key(0))
    config = language_model(mtp_tpl=MultiTokenPrediction.HParams.config())
    with raises(ConfigError, field="ngrammer_tpl"):
        config.Instantiate().init(jax.random.key(0))
