"""ImageInput, the base class of readers of encoded images with labels.

A training image is cropped, flipped and changed by RandAugment at random, then normalized, and
mixed with a second image. Random numbers depend on the seed, the epoch and the row. So a resumed
run and another number of hosts give the same batches. Grain's `random_map` seeds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from layerkit.config.checks import check_positive, check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.errors import BadRecordError, require_extra
from layerkit_inputs.grain.map_input import GrainRows
from layerkit_inputs.images.augmentations import mix, random_resized_crop
from layerkit_inputs.images.decode_image import center_crop, decode_image, pillow
from layerkit_inputs.images.rand_augment import rand_augment

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class EncodedImage(NamedTuple):
    """An image that `decode_image` reads, its label, and its name in errors."""

    encoded: Any
    label: Any
    name: str


class ImageInput(GrainRows):
    """Base class of inputs of encoded images, such as JPEG files, with labels.

    Batches hold `inputs` float32 `[batch, height, width, channels]` and `labels` int32 `[batch]`.
    With mixup or CutMix, labels are probabilities float32 `[batch, num_classes]`. An evaluation
    takes the center of each image, and its batches also have `provenance` and
    `eval_sample_weights`, each `[batch]`. A damaged image raises an error with its name; with
    `on_bad_record="skip"` it is counted.
    """

    num_classes: int
    """Number of classes. Labels are 0 to `num_classes - 1`."""
    image_size: int = 224
    """Height and width in pixels."""
    channels: Literal[1, 3] = 3
    """3 for RGB or 1 for gray. Images of the other kind are converted."""
    mean: Sequence[float] = IMAGENET_MEAN
    """Mean of each channel, of values in [0, 1], which is subtracted."""
    std: Sequence[float] = IMAGENET_STD
    """Standard deviation of each channel, of values in [0, 1], by which values are divided."""
    crop_scale: Sequence[float] | None = (0.08, 1.0)
    """Smallest and largest area of a random crop, as a share of the image. None: the center."""
    crop_fraction: float = 0.875
    """Share of the shorter side that the center has. 1: the whole side."""
    flip: bool = True
    """Whether half of the training images are flipped left to right."""
    rand_augment: Sequence[float] | None = None
    """Number of operations of RandAugment and their magnitude, 0 to 10. None: no RandAugment."""
    mixup_alpha: float | None = None
    """Alpha of mixup of training images in pairs; papers use 0.2. None: no mixup."""
    cutmix_alpha: float | None = None
    """Alpha of CutMix, usually 1. With `mixup_alpha` too, half of the pairs have each."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        label, scale, operations = self._label, self.crop_scale, self.rand_augment
        check_sizes(label, image_size=self.image_size, num_classes=self.num_classes)
        check_positive(label, mixup_alpha=self.mixup_alpha, cutmix_alpha=self.cutmix_alpha)
        expected = f"{self.channels} numbers, one for each channel"
        require(len(self.mean) == self.channels, label, "mean", self.mean, expected)
        is_valid = len(self.std) == self.channels and min(self.std) > 0
        require(is_valid, label, "std", self.std, f"{expected}, above 0")
        is_valid = scale is None or (len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1)
        require(is_valid, label, "crop_scale", scale, "two shares above 0, at most 1, in order")
        is_valid = operations is None or (
            len(operations) == 2
            and operations[0] >= 1
            and operations[0] % 1 == 0
            and 0 <= operations[1] <= 10
        )
        expected = "a whole number of operations, and a magnitude from 0 to 10"
        require(is_valid, label, "rand_augment", operations, expected)
        is_valid = 0 < self.crop_fraction <= 1
        require(is_valid, label, "crop_fraction", self.crop_fraction, "above 0, at most 1")

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of images of zeros with the label 0."""
        images = np.zeros((rows, config.image_size, config.image_size, config.channels), np.float32)
        labels = np.zeros(rows, np.int32)
        is_mixed = config.is_training and _mixes(config)
        labels = _one_hot(labels, config.num_classes) if is_mixed else labels
        return NestedMap(inputs=images, labels=labels)

    def _num_images(self) -> int:
        """Return the number of images."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _num_images().")

    def _encoded(self, row: int) -> EncodedImage:
        """Return the image with a number; may be called by several threads."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _encoded().")

    def _make_dataset(self) -> Any:
        pillow()  # A missing extra is an error of the input, not of a row.
        grain = require_extra("grain", needed_by=type(self).__qualname__)
        rows = grain.MapDataset.range(self._num_images())
        return rows.random_map(self._decoded, seed=self._seed)

    def _decoded(self, row: int, random: np.random.Generator) -> NestedMap:
        """Return the row with a number: `inputs` `[height, width, channels]` and `labels` `[]`."""
        encoded, label, name = self._encoded(int(row))
        number = np.asarray(label)
        is_valid = not number.ndim and number.dtype.kind in "iu" and 0 <= number < self.num_classes
        expected = f"an integer from 0 to num_classes - 1 = {self.num_classes - 1}"
        require(is_valid, name, "label", label, expected, BadRecordError)
        image = decode_image(encoded, channels=self.channels, owner=name)
        if self.is_training and self.crop_scale is not None:
            image = random_resized_crop(image, random, size=self.image_size, scale=self.crop_scale)
        else:
            image = center_crop(image, size=self.image_size, fraction=self.crop_fraction)
        if self.is_training:
            image = self._augmented(image, random)
        pixels = np.asarray(image, np.float32).reshape(*image.size, self.channels)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return NestedMap(inputs=(pixels / 255 - mean) / std, labels=np.int32(label))

    def _augmented(self, image: Any, random: np.random.Generator) -> Any:
        if self.flip and random.random() < 0.5:
            image = image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)
        if self.rand_augment is not None:
            count, magnitude = self.rand_augment
            image = rand_augment(image, random, num_operations=int(count), magnitude=magnitude)
        return image

    def _read_at(self, positions: np.ndarray, num_rows: int | None) -> tuple[NestedMap, np.ndarray]:
        """Return the rows at positions of the stream; rows 2n and 2n + 1 of it are mixed."""
        if not (self.is_training and _mixes(self)):
            return super()._read_at(positions, num_rows)
        pairs, which = np.unique(positions // 2, return_inverse=True)
        batch, rows = super()._read_at((2 * pairs[:, None] + [0, 1]).reshape(-1), num_rows)
        labels = _one_hot(batch.labels, self.num_classes)
        for place, pair in enumerate(pairs.tolist()):
            both = slice(2 * place, 2 * place + 2)
            key = np.array([self._seed, _MIX], np.uint64)
            counter = np.array([0, pair, 0, 0], np.uint64)
            batch.inputs[both], labels[both] = mix(
                batch.inputs[both],
                labels[both],
                np.random.Generator(np.random.Philox(key=key, counter=counter)),
                mixup_alpha=self.mixup_alpha,
                cutmix_alpha=self.cutmix_alpha,
            )
        kept = 2 * which + positions % 2
        return NestedMap(inputs=batch.inputs[kept], labels=labels[kept]), rows[kept]


_MIX = 1 << 63
"""Stream of random numbers of mixup and CutMix."""


def _mixes(config: Any) -> bool:
    return config.mixup_alpha is not None or config.cutmix_alpha is not None


def _one_hot(labels: np.ndarray, num_classes: int) -> np.ndarray:
    return (labels[:, None] == np.arange(num_classes)).astype(np.float32)
