"""Random crops, mixup and CutMix.

The functions take a generator of random numbers, which readers seed by the seed, the epoch and the
row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit_inputs.images.decode_image import pillow

_TRIES = 10


def crop_box(
    size: tuple[int, int], random: np.random.Generator, *, scale: Sequence[float]
) -> tuple[int, int, int, int]:
    """Return a random box (left, top, right, bottom) in an image, as Inception crops it.

    Szegedy et al., 2014 (arXiv:1409.4842, section 6); the numbers are those of torchvision's
    RandomResizedCrop. If ten boxes do not fit, the box is the center of the image.

    Args:
      size: Width and height of the image in pixels.
      random: Generator of random numbers.
      scale: Smallest and largest area of the box, as a share of the image. The ratio of width to
        height is between 3/4 and 4/3.
    """
    (width, height), (smallest, largest) = size, scale
    for _ in range(_TRIES):
        area = width * height * random.uniform(smallest, largest)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = random.integers((width - across + 1, height - down + 1)).tolist()
            return left, top, left + across, top + down
    across = min(width, round(height * 4 / 3))
    down = min(height, round(width * 4 / 3))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def random_resized_crop(
    image: Any, random: np.random.Generator, *, size: int, scale: Sequence[float]
) -> Any:
    """Return the pixels in a random box (`crop_box`), resized to `size` × `size` pixels."""
    box = crop_box(image.size, random, scale=scale)
    return image.crop(box).resize((size, size), pillow().Resampling.BILINEAR)


def mix(
    images: np.ndarray,
    labels: np.ndarray,
    random: np.random.Generator,
    *,
    mixup_alpha: float | None,
    cutmix_alpha: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return two images that are mixed with one another, and their mixed labels.

    Mixup is that of Zhang et al., 2017 (arXiv:1710.09412), and CutMix that of Yun et al., 2019
    (arXiv:1905.04899). If both have an alpha, one of them is chosen at random.

    Args:
      images: float32 `[2, height, width, channels]`.
      labels: Class probabilities float32 `[2, classes]`.
      random: Generator of random numbers.
      mixup_alpha: Parameter of the beta distribution of the weight of an image. None: no mixup.
      cutmix_alpha: The same for the share of the pixels that an image keeps. None: no CutMix.
    """
    is_cut = cutmix_alpha is not None and (mixup_alpha is None or random.random() < 0.5)
    alpha = cutmix_alpha if is_cut else mixup_alpha
    assert alpha is not None
    share = np.float32(random.beta(alpha, alpha))
    if not is_cut:
        mixed = share * images + (1 - share) * images[::-1]
    else:
        height, width = images.shape[1:3]
        side = math.sqrt(1 - share)
        y, x = random.integers((height, width)).tolist()
        top, bottom = _clipped(y, height, side)
        left, right = _clipped(x, width, side)
        mixed = images.copy()
        mixed[:, top:bottom, left:right] = images[::-1, top:bottom, left:right]
        share = np.float32(1 - (bottom - top) * (right - left) / (height * width))
    return mixed, share * labels + (1 - share) * labels[::-1]


def _clipped(center: int, size: int, side: float) -> tuple[int, int]:
    """Return the ends of a box of `side * size` pixels around a center, inside the image."""
    half = int(size * side) // 2
    return max(center - half, 0), min(center + half, size)
