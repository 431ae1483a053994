"""Models of images on meshes of eight devices have the loss and gradients of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from layerkit.base.base_layer import NON_TRAINABLE, PARAMS
from layerkit.base.sharding import DEFAULT_RULES, STANDARD_MESH_AXES, BoundSharding
from layerkit.base.weights import is_box
from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.layers import (
    AttentionPooling,
    ContrastiveLoss,
    ImageEmbedding,
    ResNet,
    RotaryPositionalEmbedding,
    StackedTransformerRepeated,
    VisionTransformer,
)
from layerkit.layers.vision.vision_transformer import VIT_LAYER
from layerkit.models import ClassificationModel, ContrastiveModel, LanguageModel

KEY = jax.random.key(0)
RANDOM = np.random.default_rng(0)
SIZES = {"model_dims": 8, "hidden_dims": 16, "num_heads": 4}
IMAGES = RANDOM.normal(size=(8, 16, 16, 3)).astype(np.float32)
BATCH = NestedMap(
    inputs=IMAGES,
    images=IMAGES,
    labels=RANDOM.integers(0, 4, 8).astype(np.int32),
    ids=RANDOM.integers(0, 12, (8, 4)).astype(np.int32),
)


def tower():
    stack = StackedTransformerRepeated.HParams.config(layer_tpl=VIT_LAYER.clone())
    config = VisionTransformer.HParams.config(position_grid=(4, 4), num_layers=2, **SIZES)
    config.set(stack_tpl=stack, pool_tpl=AttentionPooling.HParams.config())
    config.patch_tpl.patch_size = 4
    return config


def classifier(network, dims):
    config = ClassificationModel.HParams.config(network_tpl=network)
    config.softmax_tpl.set(input_dims=dims, num_classes=4)
    return config


def two_towers():
    config = ContrastiveModel.HParams.config(vision_tpl=tower(), embed_dims=4)
    config.text_tpl.set(vocab_size=12, **SIZES)
    config.loss_tpl = ContrastiveLoss.HParams.config(kind="sigmoid")
    return config


def image_lm():
    config = LanguageModel.HParams.config()
    stack = StackedTransformerRepeated.HParams.config()
    config.lm_tpl.set(vocab_size=12, num_layers=2, stack_tpl=stack, **SIZES)
    images = ImageEmbedding.HParams.config(token_id=5, tower_tpl=tower())
    images.set(sees_whole_image=True, has_grid_positions=True)
    images.projector_tpl.set(merged=2, merge="concatenate")
    # Windows of 3 rows and columns do not divide the grid of 4.
    images.tower_tpl.set(pool_tpl=None, has_grid_positions=True, window_size=3)
    images.tower_tpl.stack_tpl.layer_tpl.attention_tpl.set(rotary_tpl=rotary(0, 1, 0), chunk=9)
    stack.layer_tpl.attention_tpl.rotary_tpl = rotary(0, 0, 1)
    config.lm_tpl.images_tpl = images
    return config


def rotary(*sections):
    return RotaryPositionalEmbedding.HParams.config(sections=sections)


PLACEHOLDERS = np.where(np.arange(16) % 8 < 4, 5, RANDOM.integers(6, 12, (8, 16))).astype(np.int32)
OF_LM = NestedMap(
    ids=PLACEHOLDERS,
    labels=np.roll(PLACEHOLDERS, -1, axis=1),
    weights=np.ones((8, 16), np.float32),
    images=np.stack([IMAGES, IMAGES[::-1]], axis=1),
)
RESNET = ResNet.HParams.config(channels=(16,), blocks=(1,))
# data, fsdp, tensor, stage, expert, context
CASES = {
    "resnet": (classifier(RESNET, 16), (2, 2, 2, 1, 1, 1)),
    "vision_transformer": (classifier(tower(), 8), (1, 2, 2, 1, 1, 2)),
    "two_towers": (two_towers(), (2, 2, 1, 1, 1, 2)),
    "image_lm": (image_lm(), (1, 2, 2, 1, 1, 2)),
}


def loss_and_gradients(model, variables, batch):
    def loss(params):
        (metrics, _), state = model.apply(
            {**variables, PARAMS: params}, batch, mutable=NON_TRAINABLE
        )
        return metrics["loss"].value, state

    return jax.value_and_grad(loss, has_aux=True)(variables[PARAMS])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "vision_transformer"))
        for name in CASES
    ],
)
def test_loss_gradients_and_statistics_equal_those_of_one_device(name):
    config, sizes = CASES[name]
    whole = OF_LM if name == "image_lm" else BATCH
    model = build(config).clone(train=True)
    variables = jax.tree.map(lambda w: w + 0.01, jax.jit(model.init)(KEY))
    expected = jax.jit(lambda v, b: loss_and_gradients(model, v, b))(variables, whole)
    bound = BoundSharding(Mesh(np.reshape(jax.devices(), sizes), STANDARD_MESH_AXES), DEFAULT_RULES)
    boxed = jax.eval_shape(model.init_boxed, KEY)
    layouts = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    split = model.clone(sharding=bound)
    with jax.set_mesh(bound.mesh):
        rows = NamedSharding(bound.mesh, bound.spec(("batch",)))
        batch = jax.tree.map(lambda x: jax.device_put(x, rows), whole)
        step = jax.jit(lambda v, b: loss_and_gradients(split, v, b))
        result = step(jax.device_put(variables, layouts), batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(1, jnp.abs(b).max())),
        jax.device_get(result),
        jax.device_get(expected),
    )
