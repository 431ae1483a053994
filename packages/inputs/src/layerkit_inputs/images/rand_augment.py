"""RandAugment, a few random operations on an image (Cubuk et al., 2019, arXiv:1909.13719).

The operations are those of Pillow, with the strengths of the paper and of torchvision's
RandAugment, whose magnitudes from 0 to 30 are three times those here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from layerkit_inputs.images.decode_image import pillow

_STRONGEST = 10.0
_FARTHEST = 150 / 331  # of the size of the image


def rand_augment(
    image: Any, random: np.random.Generator, *, num_operations: int, magnitude: float
) -> Any:
    """Return an image after `num_operations` random operations.

    Args:
      image: Pillow image, RGB or gray.
      random: Generator of random numbers.
      num_operations: Number of operations, drawn with replacement.
      magnitude: Strength of the operations, 0 to 10. At 10, rotations are by 30 degrees, shears by
        0.3, translations by 45 % of the size of the image, and colors change by 90 %.
    """
    names = list(OPERATIONS)
    for _ in range(num_operations):
        name = names[random.integers(len(names))]
        sign = 1 if random.random() < 0.5 else -1
        image = OPERATIONS[name](image, magnitude / _STRONGEST, sign)
    return image


def _affine(image: Any, *matrix: float) -> Any:
    """Return an image whose pixel (x, y) is pixel (a x + b y + c, d x + e y + f) of `image`."""
    kind = pillow().Transform.AFFINE
    return image.transform(image.size, kind, matrix, fillcolor=_gray(image))


def _gray(image: Any) -> tuple[int, ...]:
    return (128,) * len(image.getbands())


def _enhance(kind: str) -> Callable[[Any, float, int], Any]:
    def enhance(image: Any, strength: float, sign: int) -> Any:
        return getattr(pillow("ImageEnhance"), kind)(image).enhance(1 + 0.9 * strength * sign)

    return enhance


OPERATIONS: dict[str, Callable[[Any, float, int], Any]] = {
    "identity": lambda image, strength, sign: image,
    "auto_contrast": lambda image, strength, sign: pillow("ImageOps").autocontrast(image),
    "equalize": lambda image, strength, sign: pillow("ImageOps").equalize(image),
    "rotate": lambda image, strength, sign: image.rotate(
        30 * strength * sign, fillcolor=_gray(image)
    ),
    "solarize": lambda image, strength, sign: pillow("ImageOps").solarize(
        image, 255 * (1 - strength)
    ),
    "posterize": lambda image, strength, sign: pillow("ImageOps").posterize(
        image, 8 - round(4 * strength)
    ),
    "color": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "brightness": _enhance("Brightness"),
    "sharpness": _enhance("Sharpness"),
    "shear_x": lambda image, strength, sign: _affine(image, 1, 0.3 * strength * sign, 0, 0, 1, 0),
    "shear_y": lambda image, strength, sign: _affine(image, 1, 0, 0, 0.3 * strength * sign, 1, 0),
    "translate_x": lambda image, strength, sign: _affine(
        image, 1, 0, _FARTHEST * image.width * strength * sign, 0, 1, 0
    ),
    "translate_y": lambda image, strength, sign: _affine(
        image, 1, 0, 0, 0, 1, _FARTHEST * image.height * strength * sign
    ),
}
"""Operations by name: functions of an image, a strength from 0 to 1 and a sign, 1 or -1."""
