"""GeneratedImages, an input of colored images that are generated on demand.

The images of a class share a pattern of 8 × 8 colors, to which each image adds noise. They serve to
measure speed and to test that a network learns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from layerkit.config.checks import check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.indexed_input import IndexedInput

_PATTERN_SIZE = 8
_TRAINING_ROWS, _EVAL_ROWS, _PATTERNS = range(3)


class GeneratedImages(IndexedInput):
    """An input of `inputs` float32 `[batch, size, size, 3]` and `labels` int32 `[batch]`.

    Pixels have about mean 0 and variance 1. Evaluation batches also have `provenance` and
    `eval_sample_weights`, each `[batch]`.
    """

    image_size: int = 224
    """Height and width of an image, a multiple of 8."""
    num_classes: int = 1000
    num_examples: int | None = None
    """Rows of an epoch. None: endless. An evaluation of one epoch needs a number."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_sizes(self._label, image_size=self.image_size, num_classes=self.num_classes)
        is_valid, expected = self.image_size % _PATTERN_SIZE == 0, f"a multiple of {_PATTERN_SIZE}"
        require(is_valid, self._label, "image_size", self.image_size, expected)
        is_valid = self.num_examples is not None or self.endless
        require(is_valid, self._label, "num_examples", None, "the number of rows of an epoch")
        self._check_at_least(1, "num_examples")

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of images of zeros with the label 0."""
        images = np.zeros((rows, config.image_size, config.image_size, 3), np.float32)
        return NestedMap(inputs=images, labels=np.zeros(rows, np.int32))

    def _num_rows(self) -> int | None:
        return self.num_examples

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        stream = _TRAINING_ROWS if self.is_training else _EVAL_ROWS
        repeat = self.image_size // _PATTERN_SIZE
        labels, images = [], []
        for row in rows.tolist():
            draw = self._generator(stream, row)
            label = int(draw.integers(self.num_classes))
            shape = (_PATTERN_SIZE, _PATTERN_SIZE, 3)
            pattern = self._generator(_PATTERNS, label).standard_normal(shape, np.float32)
            image = pattern.repeat(repeat, axis=0).repeat(repeat, axis=1)
            noise = draw.standard_normal(image.shape, np.float32)
            labels.append(label)
            images.append((image + noise) * np.float32(0.5**0.5))
        return NestedMap(inputs=np.stack(images), labels=np.array(labels, np.int32))

    def _generator(self, stream: int, number: int) -> np.random.Generator:
        seed = 0 if stream == _PATTERNS else self._seed  # All data sets share the patterns.
        key = np.array([seed, stream], np.uint64)
        counter = np.array([0, number, 0, 0], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "image_size": self.image_size,
            "num_classes": self.num_classes,
            "is_training": self.is_training,
            "seed": self._seed,
        }
