"""A small ResNet on the image files of a folder, which trains within minutes on one core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.layers import resnet
from layerkit_experiments.vision.image_classifier import ImageClassifier


class SmallImages(ImageClassifier):
    """ResNet of three stages on small images, such as digits, of a folder for each class."""

    CHANNELS: list[int] = [16, 32, 64]
    """Number of channels of each stage."""

    DATA_FORMAT = "folder"
    DATA_FOLDER = "images"
    IMAGE_SIZE = 28
    NUM_CLASSES = 10
    PERCORE_BATCH_SIZE = 64.0
    CROP_SCALE = [0.6, 1.0]
    CROP_FRACTION = 1.0
    FLIP = False
    NUM_DECODING_THREADS = 1

    LEARNING_RATE = 4e-3
    WEIGHT_DECAY = 0.05
    WARMUP_STEPS = 50
    MAX_STEPS = 400
    EVAL_INTERVAL_STEPS = 200
    CHECKPOINT_EVERY_N_STEPS = 200

    reduced_fields: ClassVar[Mapping[str, Any]] = {"CHANNELS": [16, 32]}

    def model(self) -> Config:
        """Return the config of the ClassificationModel."""
        network = resnet(18).set(
            channels=tuple(self.CHANNELS),
            blocks=(1,) * len(self.CHANNELS),
            entry_kernel=3,
            entry_pool_tpl=None,
        )
        return self.classify(network, self.CHANNELS[-1])
