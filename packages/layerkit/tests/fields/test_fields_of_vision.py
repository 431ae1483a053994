"""Every field of convolutions, pooling, residual networks and vision Transformers has an effect."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.testing import Change, Example, dead_fields, ignored_fields

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 16)), jnp.float32)
IS_TOKEN = jnp.arange(8) < jnp.array([8, 5, 2, 0])[:, None]
SIZES = {"input_dims": 4, "output_dims": 4}
WIDE = {"input_dims": 8, "output_dims": 8}
IMAGE_AXES = ("batch", None, None, "act_mlp")
GAUSSIAN = WeightInit.Gaussian()
CONV = {"kernel_size": (2, 2), "weight_axes": (None, "mlp"), "activation_axes": IMAGE_AXES}
CONV |= {"weight_init": GAUSSIAN, "strides": 2, "padding": "VALID"}


def of(layer_class, fields, run, **changes):
    return Example(Config(layer_class, **fields), run, changes)


def on_images(name="input_dims"):
    return lambda layer: layer(IMAGES[..., : getattr(layer, name)])


def pool(layer):
    return layer(IMAGES, is_token=IS_TOKEN), layer(IMAGES)


NORM, PLAIN = Config(L.LayerNorm, dtype="bfloat16"), Config(L.ConvBNAct, dtype="bfloat16")
BLOCK = {"conv_tpl": PLAIN, "activation_tpl": Config(L.GELU), "droppath_rate": 0.5}
VIT = {"model_dims": 8, "hidden_dims": 8, "num_heads": 4, "position_grid": (2, 2)}
PATCHES = Config(L.PatchEmbedding, patch_size=4)
TOWER = Config(L.VisionTransformer, **VIT, patch_tpl=PATCHES)

ROTARY = Config(L.RotaryPositionalEmbedding, sections=(0, 0, 1), section_order="axial")
STACK = Config(L.StackedTransformer)
STACK.layer_tpl.attention_tpl.set(rotary_tpl=ROTARY)


def place(layer):
    ids = jnp.arange(10).reshape(2, 5)
    placed = layer.place(ids, IMAGES[:2, None, ..., :3], positions=ids)
    return placed.put(jnp.ones((2, 5, 4))), placed.ends(ids), placed.positions(ids)


EXAMPLES = [
    of(L.Conv, SIZES, on_images(), **CONV, dilations=2),
    of(
        L.ConvTranspose,
        SIZES,
        on_images(),
        **CONV,
        dilations=2,
        num_groups=Change(2, refusal="no effect"),
    ),
    of(L.ConvBNAct, SIZES, on_images(), **CONV, batch_norm_tpl=None, activation_tpl=Config(L.GELU)),
    of(L.Pooling, {"window": (3, 3)}, pool, window=(2, 2), strides=1, kind="mean", padding="VALID"),
    of(L.GlobalPooling, {}, lambda layer: layer(IMAGES[:, 0], is_token=IS_TOKEN), kind="max"),
    of(L.ResNetBlock, WIDE, on_images(), **BLOCK),
    of(L.ResNetBasicBlock, WIDE, on_images(), **BLOCK),
    of(
        L.ResNet,
        {"channels": (8,), "blocks": (1,)},
        on_images("image_channels"),
        channels=(16,),
        blocks=(2,),
        block_tpl=Config(L.ResNetBasicBlock),
        conv_tpl=PLAIN,
        entry_pool_tpl=Config(L.Pooling, window=(2, 2)),
    ),
    of(
        L.PatchEmbedding,
        {"output_dims": 4, "patch_size": 2},
        on_images("channels"),
        remainder=2,
        weight_axes=(None,) * 4,
        dot_tpl=Config(Fp8Dot),
        num_frames=2,
    ),
    of(
        L.AttentionPooling,
        {"input_dims": 4, "hidden_dims": 4, "num_heads": 2},
        lambda layer: layer(IMAGES[:, 0, :, : layer.input_dims]),
    ),
    of(
        L.ContrastiveLoss,
        {},
        lambda layer: layer(IMAGES[:, 0, 0], IMAGES[:, 1, 0]),
        kind="sigmoid",
        initial_scale=2.0,
        max_scale=0.1,
    ),
    of(
        L.VisionTransformer,
        {**VIT, "position_grid": (3, 2), "patch_tpl": PATCHES},
        lambda layer: layer(IMAGES[..., :3]),
        patch_tpl=Config(L.PatchEmbedding, patch_size=2),
        position_tpl=Config(L.TrainablePositionalEmbedding, dtype="bfloat16"),
        position_grid=(2, 2),
        has_grid_positions=Change(value=True, others={"stack_tpl": STACK}),
        window_size=Change(
            1, others={"has_grid_positions": True, "stack_tpl": STACK}, refusal="chunk of layers"
        ),
        num_registers=2,
        embedding_norm_tpl=NORM,
        has_class_token=Change(value=True, others={"num_registers": 1}),
        output=Change("class_token", others={"has_class_token": True, "num_registers": 1}),
        pool_tpl=Config(L.GlobalPooling),
        dropout_rate=0.5,
    ),
    of(
        L.ImageProjector,
        SIZES,
        lambda layer: layer(IMAGES[:, 0, :, : layer.input_dims], grid=(2, 4)),
        norm_tpl=NORM,
        hidden_dims=(),
        merge=Change("concatenate", others={"merged": 2}),
    ),
    of(L.ImageEmbedding, {"token_id": 2, "output_dims": 4, "tower_tpl": TOWER}, place),
]


def test_changing_a_field_has_an_effect(example, sharding):
    assert dead_fields(example, sharding=sharding) == []


@pytest.mark.slow
def test_ignored_field_raises(example, sharding):
    assert ignored_fields(example, sharding=sharding) == []


def test_every_layer_has_an_example(layers_in):
    here = {layer for layer in layers_in(L) if ".vision." in layer.__module__}
    assert here == {example.layer_class for example in EXAMPLES}
