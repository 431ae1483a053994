"""GeneratedDigits, an input of images of digits that are generated on demand.

Each row is a digit in one of three styles of 5 × 7 pixels, which is rotated, slanted, scaled and
shifted, with added noise. MNIST has similar variation (LeCun et al., 1998) on the same grid of
28 × 28 pixels.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from layerkit.config.checks import check_non_negative
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.arrays.idx_images import blank_images
from layerkit_inputs.synthetic.generated_rows import GeneratedRows

IMAGE_SIZE = 28
NUM_CLASSES = 10

# Each block is a style, each column a digit.
_STYLES = (
    """
    .###. ..#.. .###. ####. ...#. ##### ..##. ##### .###. .###.
    #...# .##.. #...# ....# ..##. #.... .#... ....# #...# #...#
    #..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
    #.#.# ..#.. ...#. .###. #..#. ....# ####. ..#.. .###. .####
    ##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
    #...# ..#.. .#... ....# ...#. #...# #...# .#... #...# ...#.
    .###. .###. ##### ####. ...#. .###. .###. .#... .###. .##..
    """,
    """
    .##.. ..#.. .##.. ##### #..#. ####. .###. ##### .##.. .###.
    #..#. ..#.. #..#. ...#. #..#. #.... #.... #..#. #..#. #...#
    #..#. ..#.. ...#. ..#.. #..#. #.... #.... ...#. #..#. #...#
    #..#. ..#.. ...#. .###. ##### ###.. ####. .###. .##.. .####
    #..#. ..#.. ..#.. ....# ...#. ...#. #...# ..#.. #..#. ....#
    #..#. ..#.. .#... #...# ...#. ...#. #...# ..#.. #..#. ....#
    .##.. ..#.. ####. .###. ...#. ###.. .###. .#... .##.. .###.
    """,
    """
    ..##. ...#. .###. .##.. ...## .#### ...#. .#### .###. .###.
    .#..# ..##. #...# #..#. ..#.# .#... ..#.. #...# #...# #..#.
    #...# .#.#. ....# ...#. .#..# .#... .#... ....# .#.#. #..#.
    #...# ...#. ..##. ..#.. ##### .###. .###. ...#. ..#.. .###.
    #...# ...#. .#... ...#. ....# ....# #...# ..#.. .#.#. ...#.
    #..#. ...#. #.... #..#. ....# #...# #...# .#... #...# ..#..
    .##.. ...#. ##### .##.. ....# .###. .###. .#... .###. .#...
    """,
)
# Size of a glyph's pixel on the grid before scaling.
_PIXEL = 2.8
_MAX_TURN, _MAX_SLANT, _MAX_SHIFT = 0.3, 0.25, 3.0
_SCALES = (0.8, 1.15)
_CONTRASTS = (0.6, 1.0)


@functools.cache
def glyphs() -> np.ndarray:
    """Return the digits of all styles, float32 `[styles, digits, height, width]`, with a border."""
    styles = [
        [[list(digit) for digit in line.split()] for line in style.strip().splitlines()]
        for style in _STYLES
    ]
    # [styles, height, digits, width] → [styles, digits, height, width]
    drawn = (np.array(styles) == "#").transpose(0, 2, 1, 3).astype(np.float32)
    return np.pad(drawn, ((0, 0), (0, 0), (1, 1), (1, 1)))


class GeneratedDigits(GeneratedRows):
    """An input of `inputs` float32 `[batch, 28, 28, 1]` in [0, 1] and `labels` int32 `[batch]`.

    Evaluation batches also have `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    noise: float = 0.1
    """Standard deviation of the noise of each pixel."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_non_negative(self._label, noise=self.noise)

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of black images with the label 0."""
        return blank_images(rows, (IMAGE_SIZE, IMAGE_SIZE))

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        uniform = np.empty((len(rows), 8))
        pixels = np.empty((len(rows), IMAGE_SIZE, IMAGE_SIZE))
        for place, draw in enumerate(self._generators(rows)):
            uniform[place] = draw.random(8)
            pixels[place] = draw.standard_normal((IMAGE_SIZE, IMAGE_SIZE))
        labels, images = _drawn(uniform)
        images = np.clip(images + self.noise * pixels, 0.0, 1.0)
        return NestedMap(
            inputs=images[..., None].astype(np.float32), labels=labels.astype(np.int32)
        )

    def _fingerprint(self) -> dict[str, Any]:
        return {"noise": self.noise, "is_training": self.is_training, "seed": self._seed}


def _drawn(uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and images of random numbers `[rows, 8]` in [0, 1].

    Each point of the grid is mapped to a position in the glyph, and interpolated between pixels.

    Returns:
      (labels int64 `[rows]`, images float64 `[rows, 28, 28]`).
    """
    table = glyphs()
    digits = (uniform[:, 0] * NUM_CLASSES).astype(np.int64)
    styles = (uniform[:, 1] * len(table)).astype(np.int64)
    spread = 2.0 * uniform - 1.0  # [-1, 1]
    turn, slant = _MAX_TURN * spread[:, 2], _MAX_SLANT * spread[:, 3]
    scale = _PIXEL * _between(_SCALES, uniform[:, 4])
    cos, sin = np.cos(turn) / scale, np.sin(turn) / scale

    steps = np.arange(IMAGE_SIZE) - (IMAGE_SIZE - 1) / 2
    down, across = np.meshgrid(steps, steps, indexing="ij")
    # [rows, 28, 28]
    down = down - _MAX_SHIFT * spread[:, 5, None, None]
    across = across - _MAX_SHIFT * spread[:, 6, None, None]
    y = _per_row(cos) * down - _per_row(sin) * across
    x = _per_row(sin) * down + _per_row(cos) * across + _per_row(slant) * y
    height, width = table.shape[2:]
    images = _interpolated(table[styles, digits], y + (height - 1) / 2, x + (width - 1) / 2)
    return digits, images * _per_row(_between(_CONTRASTS, uniform[:, 7]))


def _between(ends: tuple[float, float], part: np.ndarray) -> np.ndarray:
    return ends[0] + (ends[1] - ends[0]) * part


def _per_row(values: np.ndarray) -> np.ndarray:
    """Reshape `[rows]` to `[rows, 1, 1]`."""
    return values[:, None, None]


def _interpolated(images: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Interpolate `[rows, height, width]` at `[rows, ...]`. Outside, use the nearest edge."""
    height, width = images.shape[1:]
    y, x = np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)
    top = np.minimum(y.astype(np.int64), height - 2)
    left = np.minimum(x.astype(np.int64), width - 2)
    rows = np.arange(len(images))[:, None, None]
    below, right = y - top, x - left
    upper = images[rows, top, left] * (1 - right) + images[rows, top, left + 1] * right
    lower = images[rows, top + 1, left] * (1 - right) + images[rows, top + 1, left + 1] * right
    return upper * (1 - below) + lower * below
