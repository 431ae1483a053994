"""ResNet-50 and ViT-B/16 at the size and with the schedules of ImageNet.

Their data are generated images of 1000 classes, since this package has no reader of ImageNet. To
train on ImageNet, override `datasets()`: batches have `inputs` and `labels`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import optax

from layerkit.base.weights import WeightInit
from layerkit.config import Config, Partial
from layerkit.config.checks import require
from layerkit.layers import ResNet, StackedTransformerRepeated, VisionTransformer
from layerkit.layers.vision.vision_transformer import VIT_LAYER
from layerkit.models import ClassificationModel
from layerkit_experiments.recipes.schedule_choices import ScheduleChoice, number_of_steps
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_experiments.vision.generated_images import GeneratedImages
from layerkit_runner.optim import schedules
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import lp_regularized
from layerkit_runner.step.task import SingleTask

# Whole batches of 512 images of ImageNet's 1,281,167.
STEPS_PER_EPOCH = 2502


class ImageNetExperiment(TrainedExperiment, abstract=True):
    """Base of classifiers of images of 1000 classes; a subclass defines `model()`."""

    tags: ClassVar[tuple[str, ...]] = ("vision",)

    IMAGE_SIZE: int = 224
    NUM_CLASSES: int = 1000
    NUM_HELDOUT: int = 50_000
    """Number of images of an evaluation."""
    PERCORE_BATCH_SIZE: float = 64.0
    """Images per device."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "IMAGE_SIZE": 32,
        "NUM_CLASSES": 10,
        "NUM_HELDOUT": 64,
        "PERCORE_BATCH_SIZE": 8.0,
    }

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return "generated images"

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        common: dict[str, Any] = {
            "percore_batch_size": self.PERCORE_BATCH_SIZE,
            "image_size": self.IMAGE_SIZE,
            "num_classes": self.NUM_CLASSES,
        }
        return [
            GeneratedImages.HParams.config(name="train", is_training=True, **common),
            GeneratedImages.HParams.config(name="heldout", num_examples=self.NUM_HELDOUT, **common),
        ]

    def model(self) -> Config:
        """Return the config of the ClassificationModel."""
        raise NotImplementedError

    def classify(self, network: Config, features: int) -> Config:
        """Return the config of the ClassificationModel of a network with `features` outputs."""
        model = ClassificationModel.HParams.config(network_tpl=network, top_k=5)
        model.softmax_tpl.set(
            input_dims=features,
            num_classes=self.NUM_CLASSES,
            weight_init=WeightInit.Gaussian(0.01),
        )
        return model

    def task(self) -> Config:
        """Return the config of the task."""
        return SingleTask.HParams.config(
            name="imagenet", model=self.model(), train=train_config(self, self.learner())
        )


class ResNet50Pjit(ImageNetExperiment):
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


class ViTB16(ImageNetExperiment):
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
