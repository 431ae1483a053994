"""Tests that each field has an effect, for layers without a separate test file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config
from layerkit.config.checks import require
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.dots import Dot
from layerkit.layers.basic.embeddings import ClassSoftmax
from layerkit.layers.quantization.block_scaling import BlockScaledDot
from layerkit.layers.quantization.current_scaling import CurrentScalingDot, Fp8CurrentDot, Int8Dot
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.layers.quantization.lora import LoraDot
from layerkit.layers.quantization.mxfp8 import MxFp8Dot
from layerkit.layers.quantization.nvfp4 import NvFp4Dot
from layerkit.ops.rotary_scaling import LinearScaling
from layerkit.testing import Change, Example, dead_fields, ignored_fields

# Modules whose layers have their examples in another file.
ELSEWHERE = {
    "test_fields_of_attention.py": {"attention"},
    "test_fields_of_recurrent.py": {"recurrent"},
    "test_fields_of_stacks.py": {"moe", "transformer"},
    "test_fields_of_speech.py": {"speech"},
    "test_fields_of_vision.py": {"vision"},
}

BATCH, LENGTH, DIMS = 4, 8, 8
RANDOM = np.random.default_rng(0)
# Wide enough for every change of a size.
NUMBERS = jnp.asarray(RANDOM.normal(size=(BATCH, LENGTH, 64)), jnp.float32)
IDS = jnp.asarray(RANDOM.integers(0, 16, (BATCH, LENGTH)), jnp.int32)
IS_TOKEN = jnp.arange(LENGTH) < jnp.array([8, 5, 2, 0])[:, None]


def of(layer_class, fields, run, **changes):
    return Example(Config(layer_class, **fields), run, changes)


def inputs(dims):
    return NUMBERS[..., :dims]


def on_inputs(name="input_dims"):
    return lambda layer: layer(inputs(getattr(layer, name)))


def softmax(layer):
    hidden = inputs(layer.input_dims)
    outputs = [layer(hidden, labels=IDS, weights=jnp.ones(IDS.shape)), layer.logits(hidden)]
    return [*outputs, layer.embed(IDS)] if hasattr(layer, "embed") else outputs


def sigmoid_cross_entropy(layer):
    features = inputs(layer.input_dims)
    labels = NUMBERS[..., : layer.num_classes] > 0
    return layer(features, labels, jnp.ones(IDS.shape))


class FlaxBlock(nn.Module):
    features: int = DIMS

    @nn.compact
    def __call__(self, x, *, train=False, deterministic=True):
        x = nn.Dense(self.features)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dropout(0.5, deterministic=deterministic)(x)


DENSE = {"input_dims": DIMS, "output_dims": DIMS}
CLASSES = {"input_dims": DIMS, "num_classes": 16}
GAUSSIAN = WeightInit.Gaussian()
FP8 = Config(Fp8Dot)
SOFTMAX_CHANGES = {
    "logit_scale": 0.5,
    "logit_soft_cap": 3.0,
    "chunk_size": 2,
    "label_smoothing": 0.1,
    "z_loss_weight": 0.1,
    "entropy_loss_weight": 0.1,
    "bias_axes": Change((None,), others={"use_bias": True}),
    "activation_axes": ("batch", None, None),
    "weight_init": GAUSSIAN,
}
ACTIVATIONS = (
    *(L.Identity, L.ReLU, L.ReLU6, L.CubedReLU, L.SquaredReLU, L.SineOfReLU),
    *(L.LeakyReLU, L.ELU, L.GELU, L.SiLU, L.Exp, L.Sigmoid, L.Softplus, L.Tanh),
)


def rotate(layer):
    positions = IDS if layer.sections is None else jnp.stack([IDS, 2 * IDS], axis=-1)
    return layer(NUMBERS[..., None, : layer.dims], positions)


EXAMPLES = [
    *(of(layer, {}, lambda layer: layer(NUMBERS)) for layer in ACTIVATIONS),
    of(
        L.Linear,
        DENSE,
        on_inputs(),
        activation_axes=("batch", "length", None),
        weight_init=GAUSSIAN,
        dot_tpl=FP8,
    ),
    of(L.Bias, {"dims": DIMS}, on_inputs("dims"), axes=("embed",)),
    of(L.FeedForward, DENSE, on_inputs(), activation_tpl=Config(L.GELU)),
    of(
        L.NormalizedFeedForward,
        DENSE,
        on_inputs(),
        activation_tpl=Config(L.GELU),
        norm_tpl=Config(L.RmsNorm),
    ),
    of(
        L.Einsum,
        {
            "equation": "bld,dhk->blhk",
            "weight_shape": (DIMS, 2, 4),
            "weight_axes": ("embed", "heads", None),
        },
        lambda layer: layer(inputs(DIMS)),
        equation="bld,dhk->blkh",
        weight_shape=(DIMS, 4, 4),
        activation_axes=("batch", "length", None, None),
        weight_init=GAUSSIAN,
    ),
    of(
        LoraDot,
        {"weight": WeightHParams((DIMS, DIMS), axes=("embed", "mlp"))},
        lambda layer: layer(inputs(layer.weight.shape[0]), jnp.ones(layer.weight.shape)),
        weight=WeightHParams((DIMS, 2 * DIMS), axes=("embed", "mlp")),
        dot_tpl=FP8,
    ),
    *(
        of(dot, {}, lambda layer: layer(inputs(DIMS), jnp.ones((DIMS, DIMS))))
        for dot in (Dot, Fp8Dot, Fp8CurrentDot, Int8Dot, MxFp8Dot, NvFp4Dot)
    ),
    of(L.RmsNorm, {"dims": DIMS}, on_inputs("dims")),
    of(L.RmsNormNoScale, {}, lambda layer: layer(inputs(DIMS))),
    of(L.IdentityNorm, {"dims": DIMS}, on_inputs("dims")),
    of(L.LayerNorm, {"dims": DIMS}, on_inputs("dims")),
    of(
        L.LayerNormPerHead,
        {"dims": DIMS, "num_heads": 1},
        lambda layer: layer(inputs(layer.dims)[:, :, None].repeat(layer.num_heads, 2)),
    ),
    of(
        L.BatchNorm,
        {"dims": DIMS},
        lambda layer: layer(inputs(layer.dims), is_token=IS_TOKEN),
        decay=0.9,
    ),
    of(
        L.GroupNorm,
        {"dims": DIMS, "num_groups": 2},
        lambda layer: layer(inputs(layer.dims), is_token=IS_TOKEN),
    ),
    of(L.Dropout, {"rate": 0.25}, lambda layer: layer(NUMBERS), broadcast_dims=(-2,)),
    of(L.StochasticResidual, {"rate": 0.25}, lambda layer: layer(NUMBERS, NUMBERS)),
    of(
        L.Embedding,
        CLASSES,
        lambda layer: layer(IDS),
        activation_axes=("batch", None, None),
        weight_init=GAUSSIAN,
    ),
    of(L.FullSoftmax, CLASSES, softmax, **SOFTMAX_CHANGES),
    of(
        L.SharedEmbeddingSoftmax,
        CLASSES,
        softmax,
        embedding_axes=("batch", None, None),
        **SOFTMAX_CHANGES,
    ),
    of(
        L.SigmoidCrossEntropy,
        {"input_dims": DIMS, "num_classes": 4},
        sigmoid_cross_entropy,
        initial_probability=0.1,
    ),
    of(L.PositionalEmbedding, {"dims": DIMS}, lambda layer: layer(IDS)),
    of(L.PositionalEmbedding2D, {"dims": DIMS}, lambda layer: layer(IDS, IDS)),
    of(
        L.TrainablePositionalEmbedding,
        {"dims": DIMS, "max_length": LENGTH},
        lambda layer: layer(IDS),
        weight_init=GAUSSIAN,
    ),
    of(
        L.RotaryPositionalEmbedding,
        {"dims": DIMS},
        rotate,
        fraction=0.5,
        pairing="neighbors",
        sections=(1, DIMS // 2 - 1),
        section_order=Change("axial", others={"sections": (1, DIMS // 2 - 1)}),
        scaling=LinearScaling(factor=2.0),
    ),
    of(
        L.MaskedLmAugmenter,
        {"vocab_size": 16, "mask_token_id": 1},
        lambda layer: layer(IDS, can_mask=IS_TOKEN),
        replace_prob=0.5,
    ),
    of(L.RandomVectorQuantizer, CLASSES, on_inputs()),
    of(L.VectorQuantizer, CLASSES, on_inputs(), decay=0.9),
    of(
        L.Sequential,
        {"layer_tpls": (Config(L.ReLU),)},
        lambda layer: layer(NUMBERS),
        layer_tpls=(Config(L.Tanh),),
    ),
    of(
        L.MLPBlock,
        {"input_dims": DIMS, "hidden_dims": (4,), "output_dims": DIMS},
        on_inputs(),
        hidden_dims=(4, 4),
        activation_tpl=Config(L.GELU),
    ),
    of(
        L.StackingOverTime,
        {"left": 1, "right": 1},
        lambda layer: (layer(NUMBERS), layer.stack_paddings(NUMBERS[..., 0])),
        stride=2,
        padding_reduce_option="reduce_max",
    ),
    of(
        L.FlaxModule,
        {"module_tpl": Config(FlaxBlock), "example_shapes": ((2, DIMS),)},
        lambda layer: layer(inputs(layer.example_shapes[0][-1])),
        module_tpl=Config(FlaxBlock, features=4),
        example_shapes=((2, 4),),
        example_dtypes=Change(("float32", "int32"), refusal="zip"),
        train_argument="train",
        evaluation_argument="deterministic",
        random_streams=Change(("noise", "dropout"), others={"train_argument": "train"}),
        undecayed=("Dense_0/kernel",),
        kernels=("Dense_0/kernel",),
    ),
]

# What other layers are made from, and never used as it is.
BASES = {
    L.BaseActivation,
    L.BaseNormalization,
    L.BaseVectorQuantizer,
    BlockScaledDot,
    ClassSoftmax,
    CurrentScalingDot,
}


def test_changing_a_field_has_an_effect(example, sharding):
    assert dead_fields(example, sharding=sharding) == []


# Ignored for a reason.
TOLERATED = {
    # A model that was trained is frozen by one field, without editing how it was trained.
    "decay while force_evaluation=True",
    "use_moving_averages_in_training while force_evaluation=True",
    # A module may draw random numbers without being told that it trains; this one does not.
    "random_streams while train_argument=None",
}


# Tracing a change of each of their many fields takes the longest.
_SLOW = {L.FullSoftmax, L.SharedEmbeddingSoftmax}


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            example,
            marks=[pytest.mark.slow] * (example.layer_class in _SLOW),
            id=example.layer_class.__name__,
        )
        for example in EXAMPLES
    ],
)
def test_ignored_field_raises(example, sharding):
    assert set(ignored_fields(example, sharding=sharding)) <= TOLERATED


def test_every_layer_has_an_example(layers_in):
    elsewhere = set.union(*ELSEWHERE.values())
    here = {layer for layer in layers_in(L) if layer.__module__.split(".")[2] not in elsewhere}
    assert here <= {example.layer_class for example in EXAMPLES} | BASES
    assert all((Path(__file__).parent / file).exists() for file in ELSEWHERE)


def test_check_finds_an_unused_field():
    class Doubled(BaseLayer):
        times: float = 2.0
        nobody_reads: float = 1.0

        def fprop(self, x):
            unused = x * self.nobody_reads
            del unused
            return x * self.times

    example = of(Doubled, {}, lambda layer: layer(NUMBERS))
    assert dead_fields(example) == ["nobody_reads"]


def test_error_of_a_changed_field_names_the_field():
    class Scaled(BaseLayer):
        rate: float = 0.5

        def setup(self):
            require(self.rate == 0.5, self, "rate", self.rate, "0.5")

    with pytest.raises(ValueError) as raised:
        dead_fields(of(Scaled, {}, lambda layer: NUMBERS))
    assert "Scaled.rate was set to 0.25" in raised.value.__notes__[-1]


def test_check_finds_an_ignored_field_unless_it_raises():
    class Doubled(BaseLayer):
        times: float = 2.0
        use_times: bool = True
        offset: float = 1.0
        use_offset: bool = False

        def fprop(self, x):
            x = x * self.times if self.use_times else x
            return x + self.offset if self.use_offset else x

    class Refusing(Doubled):
        used_only_if: ClassVar[Conditions] = {"times": "use_times", "offset": "use_offset"}

    offset = Change(3.0, others={"use_offset": True})
    example = of(Doubled, {}, lambda layer: layer(NUMBERS), offset=offset)
    expected = ["offset while use_offset=False", "times while use_times=False"]
    assert ignored_fields(example) == expected
    example = of(Refusing, {}, lambda layer: layer(NUMBERS), offset=offset)
    assert ignored_fields(example) == []


def test_check_requires_existing_fields_and_errors():
    example = of(L.RmsNorm, {"dims": DIMS}, on_inputs("dims"), epsilom=1.0)
    with pytest.raises(ValueError, match=r"RmsNorm has no fields \['epsilom'\]"):
        dead_fields(example)
    example = of(L.RmsNorm, {"dims": DIMS}, on_inputs("dims"), epsilon=Change(1.0, refusal="no"))
    assert dead_fields(example) == ["epsilon"]
