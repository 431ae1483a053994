"""Tests of multi-token prediction: its training loss."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import AUX_LOSS
from layerkit.config import Config, build
from layerkit.config.nested_map import NestedMap
from layerkit.decoding import SampleDecoder, SpeculativeDecoder
from layerkit.layers import (
    AttentionMask,
    Embedding,
    FullSoftmax,
    MoeFeedForward,
    MultiHeadLatentAttention,
    MultiTokenPrediction,
    RmsNorm,
    RotaryPositionalEmbedding,
    StackedTransformerRepeated,
    Transformer,
)
from layerkit.models import LanguageModel, TransformerLm

VOCAB, LENGTH, DEPTH, WEIGHT = 11, 9, 2, 0.3
IDS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH + 1)), jnp.int32)


def network(**fields):
    layer = Config(Transformer, **fields)
    layer.attention_tpl.rotary_tpl = Config(RotaryPositionalEmbedding)
    return Config(
        TransformerLm,
        vocab_size=VOCAB,
        model_dims=8,
        hidden_dims=6,
        num_layers=2,
        num_heads=2,
        stack_tpl=Config(StackedTransformerRepeated, layer_tpl=layer),
        mtp_tpl=Config(MultiTokenPrediction, depth=DEPTH, loss_weight=WEIGHT),
    )


@functools.cache
def make(*, has_experts=False):
    fields = {"feed_forward_tpl": Config(MoeFeedForward, num_experts=3)} if has_experts else {}
    model = build(network(**fields).set(train=True))
    random = np.random.default_rng(2)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, jax.tree.map(lambda x: random.normal(0, 0.5, x.shape).astype(np.float32), shapes)


@functools.partial(jax.jit, static_argnums=0)
def losses(model, variables, ids, labels, weights=None, **packing):
    weights = jnp.ones(ids.shape) if weights is None else weights
    outputs, updates = model.apply(
        variables, ids, labels=labels, weights=weights, **packing, mutable=[AUX_LOSS]
    )
    sown = updates[AUX_LOSS]["mtp"]
    return outputs, [sown[f"loss_{depth}"][0] for depth in (1, 2)]


def test_losses_are_those_of_tokens_further_ahead():
    model, variables = make()
    ids, labels = IDS[:, :-1], IDS[:, 1:]
    weights = jnp.asarray(np.random.default_rng(1).uniform(size=ids.shape), jnp.float32)
    terms = losses(model, variables, ids, labels, weights)[1]

    def logits_of(model):
        hidden, logits = model.hidden(ids), []
        for depth, module in enumerate(model.mtp.layers, start=1):
            short = ids[:, : LENGTH - depth]
            hidden = module(
                hidden[:, : LENGTH - depth],
                model.softmax.embed(ids[:, depth:]),
                mask=AttentionMask.causal_mask(*short.shape),
                positions=jnp.broadcast_to(jnp.arange(LENGTH - depth), short.shape),
            )
            logits.append(model.softmax.logits(hidden))
        return logits

    run = jax.jit(lambda v: model.apply(v, method=logits_of))
    for depth, logits in enumerate(run(variables), start=1):
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        total, weight = 0.0, 0.0
        for row, place in np.ndindex(2, LENGTH - depth):
            # The label of the position `depth` ahead, which is the token depth + 1 ahead.
            total -= weights[row, place + depth] * log_probs[row, place, labels[row, place + depth]]
            weight += weights[row, place + depth]
        np.testing.assert_allclose(terms[depth - 1], WEIGHT / DEPTH * total / weight, rtol=1e-5)


@pytest.mark.parametrize(
    "has_experts", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["dense", "experts"]
)
def test_packed_rows_have_the_losses_of_separate_rows(has_experts):
    model, variables = make(has_experts=has_experts)
    lengths = (5, 4)
    separate = []
    for row, size in enumerate(lengths):
        ids, labels = IDS[row : row + 1, :size], IDS[row : row + 1, 1 : size + 1]
        separate.append(losses(model, variables, ids, labels)[1])
    packed_ids = jnp.concatenate([IDS[row, :size] for row, size in enumerate(lengths)])[None]
    labels = jnp.concatenate([IDS[row, 1 : size + 1] for row, size in enumerate(lengths)])[None]
    packing = {
        "segment_ids": jnp.repeat(jnp.array([1, 2]), jnp.array(lengths))[None],
        "segment_pos": jnp.concatenate([jnp.arange(size) for size in lengths])[None],
    }
    packed = losses(model, variables, packed_ids, labels, **packing)[1]
    for depth in (1, 2):
        sizes = [size - depth for size in lengths]
        mean = np.average([one[depth - 1] for one in separate], weights=sizes)
        np.testing.assert_allclose(packed[depth - 1], mean, rtol=1e-5)


def test_evaluation_has_no_further_losses():
    model, variables = make()
    ids, labels = IDS[:, :-1], IDS[:, 1:]
    weights = jnp.ones(ids.shape)
    evaluate = jax.jit(model.clone(train=False).apply)
    plain = evaluate(variables, ids, labels=labels, weights=weights)
    trained = losses(model, variables, ids, labels, weights)[0]
    np.testing.assert_allclose(plain.xent, trained.xent, rtol=1e-6)


@pytest.mark.parametrize(
    ("noise", "has_latents", "eos"),
    [
        (0.5, False, 8),
        pytest.param(0.8, True, None, marks=pytest.mark.slow),
        pytest.param(0.0, True, None, marks=pytest.mark.slow),
        pytest.param(0.0, False, 8, marks=pytest.mark.slow),
        pytest.param(30.0, False, None, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(noise, has_latents, eos):
    lm = network()
    lm.set(embedding_tpl=Config(Embedding), softmax_tpl=Config(FullSoftmax))
    lm.final_norm_tpl = Config(RmsNorm)
    if has_latents:
        sizes = {"plain_dim_per_head": 4, "rotary_dim_per_head": 2, "value_dim_per_head": 3}
        lm.stack_tpl.layer_tpl.attention_tpl = Config(
            MultiHeadLatentAttention, latent_dims=6, **sizes
        )
    fields = {"max_decode_steps": 12, "eos_id": eos}
    plain, drafting = (
        build(Config(LanguageModel, lm_tpl=lm, decoder=Config(decoder, temperature=0.0, **fields)))
        for decoder in (SampleDecoder, SpeculativeDecoder)
    )
    variables = jax.jit(plain.init)(jax.random.key(0))
    # Without noise a token depends on the one before alone, and all drafts are right.
    drawn = variables["params"]["lm"]
    for part in (drawn["stack"], drawn["mtp"]):
        part |= jax.tree.map(lambda leaf: noise * leaf, part)
    for module in drawn["mtp"].values():
        same = jnp.concatenate([jnp.eye(8), jnp.zeros((8, 8))])
        module["projection"]["w"] = same + module["projection"]["w"]
        for name in ("embedding_norm", "hidden_norm", "norm"):
            module[name]["scale"] = jnp.ones(8)
    batch = NestedMap(ids=IDS[:, :5], prompt_lengths=jnp.array([5, 2]))
    steps: list[int] = []

    def decode(model):
        prompts = model._prompts(batch)

        def counted(cache, ids, time_step, method="extend_step"):
            if method == "extend_step":
                jax.debug.callback(lambda: steps.append(1))
            return prompts.extend(cache, ids, time_step, method)

        return prompts._replace(extend=counted).decode()

    results, counts = [], []
    for model in (plain, drafting):
        steps.clear()
        results.append(jax.jit(lambda v, m=model: m.apply(v, method=decode))(variables))
        jax.effects_barrier()
        counts.append(len(steps))
    np.testing.assert_array_equal(results[1].ids, results[0].ids)
    np.testing.assert_array_equal(results[1].lengths, results[0].lengths)
    np.testing.assert_allclose(results[1].log_probs, results[0].log_probs, rtol=1e-4, atol=1e-5)
    if noise == 0.0 and eos is None:  # The prompts, and a step for each column or for two.
        assert counts == [1 + 15, 1 + 8]
