"""A small convolutional network or vision Transformer on synthetic digits or MNIST."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
from flax import linen as nn

from layerkit.config import Config
from layerkit.layers import FlaxModule, VisionTransformer
from layerkit.models import ClassificationModel
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_inputs import GeneratedDigits, IdxImages
from layerkit_runner.step.task import SingleTask

_IMAGE = (28, 28, 1)


class SmallConvNet(nn.Module):
    """Convolutions of stride 2 and a dense layer (after LeNet-5, LeCun et al., 1998).

    Attributes:
      channels: Number of channels of each convolution.
      features: Size of the dense layer.
    """

    channels: tuple[int, ...] = (16, 32)
    features: int = 128

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Map images float32 `[batch, height, width, 1]` to features `[batch, features]`."""
        x = images
        for channels in self.channels:
            x = nn.relu(nn.Conv(channels, (5, 5), strides=2)(x))
        return nn.relu(nn.Dense(self.features)(x.reshape(len(x), -1)))


class DigitClassifier(TrainedExperiment, abstract=True):
    """Base of classifiers of ten digits in images of 28 × 28 pixels."""

    tags: ClassVar[tuple[str, ...]] = ("vision",)

    DATA_FORMAT: Literal["generated", "idx"] = "generated"
    """`generated`: synthetic images; `idx`: files in the format of MNIST."""
    DATA_FOLDER: str = "mnist"
    """Folder of train-images-idx3-ubyte and the three other files, plain or `.gz`, for `idx`."""
    NUM_HELDOUT: int = 1000
    """Number of images of an evaluation, for `generated`."""
    CHANNELS: list[int] = [16, 32]
    """Number of channels of each convolution."""
    FEATURES: int = 128
    """Size of the dense layer."""
    PERCORE_BATCH_SIZE: float = 64.0

    LEARNING_RATE = 3e-3
    WEIGHT_DECAY = 1e-3
    WARMUP_STEPS = 50

    reduced_fields: ClassVar[Mapping[str, Any]] = {"DATA_FORMAT": "generated"}

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        is_generated = self.DATA_FORMAT == "generated"
        return "digits, synthetic" if is_generated else f"{self.DATA_FOLDER}/*-ubyte"

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        rows: dict[str, Any] = {"percore_batch_size": self.PERCORE_BATCH_SIZE}
        if self.DATA_FORMAT == "idx":
            rows["folder"] = self.DATA_FOLDER
            return [
                IdxImages.HParams.config(name="train", is_training=True, **rows),
                IdxImages.HParams.config(name="heldout", split="test", **rows),
            ]
        return [
            GeneratedDigits.HParams.config(name="train", is_training=True, **rows),
            GeneratedDigits.HParams.config(name="heldout", num_examples=self.NUM_HELDOUT, **rows),
        ]

    def network(self) -> Config:
        """Return the config of the network from images to features."""
        return FlaxModule.HParams.config(
            module_tpl=Config(SmallConvNet, channels=tuple(self.CHANNELS), features=self.FEATURES),
            example_shapes=((1, *_IMAGE),),
            kernels=(".*/kernel",),
        )

    def task(self) -> Config:
        """Return the config of the task."""
        model = ClassificationModel.HParams.config(network_tpl=self.network())
        model.softmax_tpl.set(input_dims=self.FEATURES, num_classes=10)
        return SingleTask.HParams.config(
            name="digits", model=model, train=train_config(self, self.learner())
        )


class Digits(DigitClassifier):
    """Synthetic digits, rotated, slanted and noisy; 99 % accuracy within a minute."""

    MAX_STEPS = 300
    EVAL_INTERVAL_STEPS = 100
    CHECKPOINT_EVERY_N_STEPS = 150


class DigitsViT(Digits):
    """Synthetic digits, by a vision Transformer of four layers over patches of 7 × 7 pixels."""

    FEATURES = 64
    MAX_STEPS = 1000
    LEARNING_RATE = 2e-3
    EVAL_INTERVAL_STEPS = 250
    CHECKPOINT_EVERY_N_STEPS = 500

    unused_fields = ("CHANNELS",)

    def network(self) -> Config:
        """Return the config of the network from images to features, averaged over patches."""
        network = VisionTransformer.HParams.config(num_layers=4, num_heads=4, position_grid=(4, 4))
        network.patch_tpl.set(patch_size=7, channels=1)
        return network.set(model_dims=self.FEATURES, hidden_dims=4 * self.FEATURES)


class Mnist(DigitClassifier):
    """MNIST, or another data set in its format, from the IDX files of a folder."""

    DATA_FORMAT = "idx"
    MAX_STEPS = 5000
    SUMMARY_INTERVAL_STEPS = 20
    EVAL_INTERVAL_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 1000
