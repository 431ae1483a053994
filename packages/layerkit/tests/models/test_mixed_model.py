"""A model that combines many options of stacks trains all of its weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base_layer import AUX_LOSS, PARAMS, RANDOM
from layerkit.layers.attention.biases import RelativeBias
from layerkit.layers.moe.feed_forward import MoeFeedForward
from layerkit.layers.stacks import StackedTransformerRepeated
from layerkit.layers.transformer import Transformer
from layerkit.models.language_model import LanguageModel
from layerkit.nested_map import NestedMap

VOCAB, BATCH, LENGTH = 16, 4, 12
NUM_STEPS = 40


def mixed_model():
    """Local dense layers and global mixtures of experts by turns, the last layer left over."""
    local, routed = Transformer.HParams.config(), Transformer.HParams.config()
    local.attention_tpl.window = 3
    routed.feed_forward_tpl = MoeFeedForward.HParams.config(num_experts=4)
    config = LanguageModel.HParams.config()
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=16, hidden_dims=24, num_heads=2, num_layers=5)
    config.lm_tpl.stack_tpl = StackedTransformerRepeated.HParams.config(
        block_tpls=(local, routed),
        relative_bias_tpl=RelativeBias.HParams.config(num_buckets=8, max_distance=16),
        droppath_rate=0.2,
        remat="projections",
    )
    return config.Instantiate()


def packed_batch():
    """Two documents in each row, and padding."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    segments = np.tile(np.repeat([1, 2, 0], [6, 5, 1]).astype(np.int32), (BATCH, 1))
    positions = np.tile(np.array([*range(6), *range(5), 0], np.int32), (BATCH, 1))
    return NestedMap(
        ids=ids[:, :-1],
        labels=ids[:, 1:],
        weights=(segments != 0).astype(np.float32),
        segment_ids=segments,
        segment_pos=positions,
    )


@pytest.mark.slow  # BertModel learns in the ordinary run; what is mixed here has tests of its own
def test_training_changes_every_weight_and_reduces_the_loss():
    model, batch = mixed_model(), packed_batch()
    optimizer = optax.adam(3e-3)

    @jax.jit
    def begin(key):
        params = model.init(key)[PARAMS]
        return params, optimizer.init(params)

    def loss(params, step):
        rngs = {RANDOM: jax.random.key(step)}
        (metrics, _), updates = model.clone(train=True).apply(
            {PARAMS: params}, batch, rngs=rngs, mutable=[AUX_LOSS]
        )
        aux = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates[AUX_LOSS]))
        return metrics["loss"].value + aux, (metrics["loss"].value, aux)

    @jax.jit
    def train(params, state, step):
        (_, losses), gradients = jax.value_and_grad(loss, has_aux=True)(params, step)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, losses

    start, state = begin(jax.random.key(0))
    trained, reports = start, []
    for step in range(NUM_STEPS):
        trained, state, report = train(trained, state, step)
        reports.append(report)
    losses, aux = np.array(reports).T
    assert np.all(np.isfinite(losses)) and np.all(aux > 0.0)
    before, after = losses[0], np.mean(losses[-5:])
    assert abs(before - np.log(VOCAB)) < 1.0 and after < 0.6 * before, (before, after)
    still = [
        jax.tree_util.keystr(path)
        for path, moved in jax.tree.leaves_with_path(
            jax.tree.map(lambda a, b: np.any(a != b, axis=None), start, trained)
        )
        if not moved
    ]
    assert still == []
