"""A language model on eight devices computes the results of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import is_box
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax
from layerkit.layers.basic.positions import TrainablePositionalEmbedding
from layerkit.layers.transformer.stacks import (
    StackedTransformer,
)
from layerkit.models.language_model import LanguageModel

KEY = jax.random.key(0)
VOCAB, BATCH, LENGTH = 16, 8, 6


def make_model(stack, **fields):
    config = LanguageModel.HParams.config()
    config.lm_tpl.set(vocab_size=VOCAB, model_dims=8, hidden_dims=12, num_layers=2, num_heads=4)
    config.lm_tpl.stack_tpl = stack.HParams.config(**fields)
    return config


def biased_in_a_row():
    config = make_model(StackedTransformer)
    config.lm_tpl.set(
        num_layers=1,
        position_tpl=TrainablePositionalEmbedding.HParams.config(max_length=16),
        embedding_tpl=Embedding.HParams.config(),
        softmax_tpl=FullSoftmax.HParams.config(use_bias=True, chunk_size=3),
    )
    layer = config.lm_tpl.stack_tpl.layer_tpl
    layer.attention_tpl.use_bias = True
    layer.feed_forward_tpl.has_bias = True
    return config.Instantiate()


@pytest.fixture(scope="module")
def bound():
    return BoundSharding(Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", "fsdp", "tensor")))


def random_weights(model):
    random = np.random.default_rng(7)
    shapes = jax.eval_shape(model.init, KEY)
    return jax.tree.map(lambda x: random.normal(0.0, 0.5, x.shape).astype(np.float32), shapes)


def layouts(model, bound):
    """Where the weights of a model lie, by their logical axes."""
    boxed = jax.eval_shape(model.init_boxed, KEY)
    return jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )


def rows(bound):
    return NamedSharding(bound.mesh, PartitionSpec(("data", "fsdp")))


def packed_batch():
    """Two documents in each row, with unequal weights; two devices have none at all."""
    random = np.random.default_rng(5)
    ids = random.integers(1, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    weights = random.uniform(0.0, 2.0, (BATCH, LENGTH)).astype(np.float32)
    weights[:2] = 0.0
    return NestedMap(
        ids=ids,
        labels=np.roll(ids, -1, axis=1),
        weights=weights,
        segment_ids=np.tile(np.array([1, 1, 1, 1, 2, 2], np.int32), (BATCH, 1)),
        segment_pos=np.tile(np.array([0, 1, 2, 3, 0, 1], np.int32), (BATCH, 1)),
    )


def loss_and_gradients(model):
    def loss(variables, batch):
        metrics, per_example = model.apply(variables, batch)
        return metrics["loss"].value, (metrics, per_example)

    return jax.value_and_grad(loss, has_aux=True)


# test_all_meshes.py has repeated layers with rotary positions.
def test_losses_and_gradients_equal_those_of_one_device(bound):
    model, batch = biased_in_a_row(), packed_batch()
    variables = random_weights(model)
    expected = jax.jit(loss_and_gradients(model))(variables, batch)

    places = layouts(model, bound)
    sharded = jax.jit(
        loss_and_gradients(model.clone(sharding=bound)),
        in_shardings=(places, rows(bound)),
        out_shardings=((None, None), places),
    )
    compiled = sharded.lower(variables, batch).compile()
    result = compiled(jax.device_put(variables, places), jax.device_put(batch, rows(bound)))

    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=0.0, atol=1e-5 * max(1.0, np.max(np.abs(b))))

    jax.tree.map(check, result, expected)
    # Each device really holds a part: a quarter of what is large, all of norms and some biases.
    sizes = [
        (leaf.size, leaf.addressable_shards[0].data.size) for leaf in jax.tree.leaves(result[1])
    ]
    assert sum(part for _, part in sizes) < 0.4 * sum(whole for whole, _ in sizes)
    text = compiled.as_text()
    assert "all-reduce" in text and "all-gather" in text
