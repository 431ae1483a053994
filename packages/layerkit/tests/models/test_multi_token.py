"""Tests of multi-token prediction: its training loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.base.base_layer import AUX_LOSS
from layerkit.config import Config, build
from layerkit.layers import (
    AttentionMask,
    MoeFeedForward,
    MultiTokenPrediction,
    RotaryPositionalEmbedding,
    StackedTransformerRepeated,
    Transformer,
)
from layerkit.models import TransformerLm

VOCAB, LENGTH, DEPTH, WEIGHT = 11, 9, 2, 0.3
IDS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH + 1)), jnp.int32)


def make(**fields):
    layer = Config(Transformer, **fields)
    layer.attention_tpl.rotary_tpl = Config(RotaryPositionalEmbedding)
    network = Config(
        TransformerLm,
        vocab_size=VOCAB,
        model_dims=8,
        hidden_dims=6,
        num_layers=2,
        num_heads=2,
        stack_tpl=Config(StackedTransformerRepeated, layer_tpl=layer),
        mtp_tpl=Config(MultiTokenPrediction, depth=DEPTH, loss_weight=WEIGHT),
        train=True,
    )
    model = build(network)
    return model, model.init(jax.random.key(0))


def losses(model, variables, ids, labels, weights=None, **packing):
    weights = jnp.ones(ids.shape) if weights is None else weights
    outputs, updates = model.apply(
        variables, ids, labels=labels, weights=weights, **packing, mutable=[AUX_LOSS]
    )
    sown = updates[AUX_LOSS]["mtp"]
    return outputs, [float(sown[f"loss_{depth}"][0]) for depth in (1, 2)]


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

    for depth, logits in enumerate(model.apply(variables, method=logits_of), start=1):
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        total, weight = 0.0, 0.0
        for row, place in np.ndindex(2, LENGTH - depth):
            # The label of the position `depth` ahead, which is the token depth + 1 ahead.
            total -= weights[row, place + depth] * log_probs[row, place, labels[row, place + depth]]
            weight += weights[row, place + depth]
        np.testing.assert_allclose(terms[depth - 1], WEIGHT / DEPTH * total / weight, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [{}, {"feed_forward_tpl": Config(MoeFeedForward, num_experts=3)}],
    ids=["dense", "experts"],
)
def test_packed_rows_have_the_losses_of_separate_rows(fields):
    model, variables = make(**fields)
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
    plain = model.clone(train=False).apply(
        variables, ids, labels=labels, weights=jnp.ones(ids.shape)
    )
    trained = losses(model, variables, ids, labels)[0]
    np.testing.assert_allclose(plain.xent, trained.xent, rtol=1e-6)
