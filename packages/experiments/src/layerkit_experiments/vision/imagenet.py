"""ResNet-50 and vision Transformers at the size and with the schedules of ImageNet.

Their data are generated images of 1000 classes unless DATA_FORMAT names the files of ImageNet.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import optax

from layerkit.config import Config, Partial
from layerkit.config.checks import require
from layerkit.layers import (
    PositionalEmbedding2D,
    ResNet,
    StackedTransformerRepeated,
    VisionTransformer,
)
from layerkit.layers.vision.vision_transformer import VIT_LAYER
from layerkit_experiments.recipes.schedule_choices import ScheduleChoice, number_of_steps
from layerkit_experiments.vision.image_classifier import ImageClassifier
from layerkit_runner.optim import schedules
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import lp_regularized

# Whole batches of 512 images of ImageNet's 1,281,167.
STEPS_PER_EPOCH = 2502


class ResNet50Pjit(ImageClassifier):
    """ResNet-50 of Pax in 90 epochs of 512 images a step, on 8 GPUs (a100x8), data parallel."""

    CHANNELS: list[int] = [256, 512, 1024, 2048]
    """Number of channels of each stage."""
    BLOCKS: list[int] = [3, 4, 6, 3]
    """Number of residual blocks of each stage."""
    MOMENTUM: float = 0.9
    L2_WEIGHT: float = 1e-4
    """Weight of the penalty of matrices and kernels; vectors have none."""
    STEP_BOUNDARIES: list[int] = [30 * STEPS_PER_EPOCH, 60 * STEPS_PER_EPOCH, 80 * STEPS_PER_EPOCH]
    """Steps at which the rate is divided by ten."""

    LEARNING_RATE = 0.2
    WARMUP_STEPS = 5 * STEPS_PER_EPOCH
    MAX_STEPS = 90 * STEPS_PER_EPOCH
    SUMMARY_INTERVAL_STEPS = 1000
    EVAL_INTERVAL_STEPS = STEPS_PER_EPOCH
    CHECKPOINT_EVERY_N_STEPS = 5000
    CHECKPOINT_MAX_TO_KEEP = 1000
    ICI_MESH_SHAPE = [1, 8, 1]

    unused_fields = (
        *("OPTIMIZER", "ADAM_BETA1", "ADAM_BETA2", "ADAM_EPSILON", "WEIGHT_DECAY"),
        *("LEARNING_RATE_SCHEDULE", "DECAYED_WEIGHTS", "CLIP_GRADIENT_NORM"),
        *("DECAY_START", "DECAY_END", "MIN_LEARNING_RATE_RATIO"),
    )
    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "CHANNELS": [32, 64],
        "BLOCKS": [1, 1],
        "LEARNING_RATE": 0.2,
        "WARMUP_STEPS": 5,
        "STEP_BOUNDARIES": [150],
    }

    def model(self) -> Config:
        """Return the config of the ClassificationModel."""
        network = ResNet.HParams.config(channels=tuple(self.CHANNELS), blocks=tuple(self.BLOCKS))
        network.block_tpl.zero_init_residual = True
        network.conv_tpl.weight_axes = (None, "mlp")  # data parallel
        return self.classify(network, self.CHANNELS[-1])

    def learner(self) -> Config:
        """Return the config of the learner: SGD with Nesterov's momentum and steps of the rate."""
        sgd = Partial(optax.sgd, momentum=self.MOMENTUM, nesterov=True)
        return Learner.HParams.config(
            optimizer=Partial(
                lp_regularized,
                optimizer=sgd,
                l2_regularizer_weight=self.L2_WEIGHT,
                mask=is_no_vector,
            ),
            learning_rate=ScheduleChoice.join_stages(self)
            or Config(
                warmup_then_tenths,
                self.LEARNING_RATE,
                warmup_steps=number_of_steps(self, "WARMUP_STEPS"),
                boundaries=self.STEP_BOUNDARIES,
            ),
        )


class ViTB16(ImageClassifier):
    """ViT-B/16 in 300 epochs of 4096 images a step, on 8 GPUs (h100x8), data parallel.

    The values are those of the paper for ImageNet (arXiv:2010.11929, tables 1 and 3).
    """

    MODEL_DIMS: int = 768
    HIDDEN_DIMS: int = 3072
    NUM_LAYERS: int = 12
    NUM_HEADS: int = 12
    PATCH_SIZE: int = 16
    """Height and width of a patch in pixels."""
    DROPOUT_RATE: float = 0.1
    """Dropout rate of patches with positions and of the outputs of layers."""

    PERCORE_BATCH_SIZE = 512.0
    LEARNING_RATE = 3e-3
    WEIGHT_DECAY = 0.3
    ADAM_BETA2 = 0.999
    WARMUP_STEPS = 10_000
    MIN_LEARNING_RATE_RATIO = 0.0
    MAX_STEPS = 300 * 1_281_167 // 4096
    EVAL_INTERVAL_STEPS = 312
    ICI_MESH_SHAPE = [1, 8, 1]

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "MODEL_DIMS": 32,
        "HIDDEN_DIMS": 64,
        "NUM_LAYERS": 2,
        "NUM_HEADS": 2,
        "PATCH_SIZE": 8,
    }

    def model(self) -> Config:
        """Return the config of the ClassificationModel."""
        rows = self.IMAGE_SIZE // self.PATCH_SIZE
        stack = StackedTransformerRepeated.HParams.config(layer_tpl=VIT_LAYER.clone())
        stack.layer_tpl.dropout_rate = self.DROPOUT_RATE
        network = VisionTransformer.HParams.config(
            model_dims=self.MODEL_DIMS,
            hidden_dims=self.HIDDEN_DIMS,
            num_layers=self.NUM_LAYERS,
            num_heads=self.NUM_HEADS,
            position_grid=(rows, rows),
            has_class_token=True,
            output="class_token",
            stack_tpl=stack,
            dropout_rate=self.DROPOUT_RATE,
        )
        network.patch_tpl.patch_size = self.PATCH_SIZE
        return self.classify(network, self.MODEL_DIMS).set(fprop_dtype="bfloat16")


class PlainViTS16(ViTB16):
    """ViT-S/16 with better plain baselines: 90 epochs of 1024 images a step, on 8 GPUs (h100x8).

    Beyer, Zhai and Kolesnikov, 2022 (arXiv:2205.01580): mean of the patches, sinusoidal positions,
    no dropout, light RandAugment and mixup. They report 76.5 % accuracy. WEIGHT_DECAY is their
    1e-4 divided by the rate, by which Optax multiplies it.
    """

    MODEL_DIMS = 384
    HIDDEN_DIMS = 1536
    NUM_HEADS = 6
    DROPOUT_RATE = 0.0
    RAND_AUGMENT = [2, 10]
    MIXUP_ALPHA = 0.2

    PERCORE_BATCH_SIZE = 128.0
    LEARNING_RATE = 1e-3
    WEIGHT_DECAY = 0.1
    MAX_STEPS = 90 * 1_281_167 // 1024
    EVAL_INTERVAL_STEPS = 1251

    def model(self) -> Config:
        """Return the config of the ClassificationModel, which averages the patches."""
        model = super().model()
        model.network_tpl.set(
            has_class_token=False,
            output="patches",
            position_grid=None,
            position_tpl=PositionalEmbedding2D.HParams.config(),
        )
        return model


class PlainViTB16(PlainViTS16):
    """ViT-B/16 with the values of PlainViTS16."""

    MODEL_DIMS = 768
    HIDDEN_DIMS = 3072
    NUM_HEADS = 12


def warmup_then_tenths(
    peak: float, *, warmup_steps: int, boundaries: Sequence[int]
) -> optax.Schedule:
    """Return a linear warmup to `peak`, then a rate that falls to a tenth at each boundary.

    Args:
      peak: Highest rate.
      warmup_steps: Step at which the peak is reached.
      boundaries: Steps after the warmup, each larger than the one before.

    Raises:
      ConfigError: The boundaries are not increasing steps after the warmup.
    """
    steps = [warmup_steps, *boundaries]
    is_valid = all(before < after for before, after in itertools.pairwise(steps))
    expected = f"increasing steps after the warmup of {warmup_steps}"
    require(is_valid, "warmup_then_tenths", "boundaries", list(boundaries), expected)
    constant = schedules.piecewise_constant(
        boundaries=[step - warmup_steps for step in boundaries],
        values=[peak * 0.1**number for number in range(len(boundaries) + 1)],
    )
    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    return optax.join_schedules([warmup, constant], [warmup_steps])


def is_no_vector(params: Any) -> Any:
    """Return a mask of the weights: True for those with two axes or more."""
    return jax.tree.map(lambda weight: weight.ndim > 1, params)
