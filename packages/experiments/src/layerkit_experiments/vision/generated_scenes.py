"""GeneratedScenes, an input of pictures of two shapes with captions that describe them.

A caption such as "red circle left-of blue square" follows from the picture: the first shape is the
one that is left or above. A fifth of the pairs of shapes with colors is held out, so that a
model has seen no picture of the captions of an evaluation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from layerkit.config import Configurable
from layerkit.config.checks import check_sizes
from layerkit.config.nested_map import NestedMap
from layerkit_inputs import lm_features, prompt_features
from layerkit_inputs.synthetic.generated_rows import GeneratedRows

COLORS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.7, 0.1),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.9, 0.9, 0.1),
    "purple": (0.6, 0.1, 0.7),
    "white": (0.9, 0.9, 0.9),
}
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": np.hypot,
    "square": lambda x, y: 1.1 * np.maximum(abs(x), abs(y)),
    "triangle": lambda x, y: np.maximum(1.2 * y, 2 * abs(x) - y),
    "diamond": lambda x, y: 0.8 * (abs(x) + abs(y)),
}
"""Functions from places right of and below the center to the radius that reaches them."""
RELATIONS = ("left-of", "above")
WORDS = ("<pad>", "<bos>", "<eos>", "<image>", *COLORS, *SHAPES, *RELATIONS)
IMAGE_ID = WORDS.index("<image>")
"""Id of the placeholders."""
IMAGE_SIZE = 32
CENTERS = (7.5, 23.5)
"""Rows and columns of pixels near which shapes lie."""
LENGTH_OF_CAPTION = 6
"""Number of words of a caption and its end."""


class WordTokenizer(Configurable):
    """A tokenizer of the words of captions, with four special ids."""

    vocab_size = len(WORDS)
    pad_id = 0
    bos_id = 1
    eos_id = 2
    start_id = 1

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of words, int32 `[length]`.

        Raises:
          ValueError: A word is none of captions.
        """
        words = text.decode() if isinstance(text, bytes) else text
        return np.array([WORDS.index(word) for word in words.split()], np.int32)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the words of ids `[length]`. Special and unknown ids are dropped."""
        return " ".join(WORDS[i] for i in np.asarray(ids).tolist() if IMAGE_ID < i < len(WORDS))

    def fingerprint(self) -> str:
        """Return the words."""
        return " ".join(WORDS)


class GeneratedScenes(GeneratedRows):
    """An input of scenes whose captions a language model writes after the placeholders of an image.

    Batches hold `images` float32 `[batch, 1, 32, 32, 3]` in [-1, 1], with the arrays of
    `lm_features` for `form="captions"`, and of `prompt_features` for `form="prompts"`. Evaluation
    batches also have `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    tokens_per_image: int = 16
    """Number of placeholders."""
    form: Literal["captions", "prompts"] = "captions"
    """`captions`: with labels; `prompts`: placeholders alone."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        check_sizes(self._label, tokens_per_image=self.tokens_per_image)
        self._tokenizer = WordTokenizer()

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of gray pictures without captions."""
        images = np.zeros((rows, 1, IMAGE_SIZE, IMAGE_SIZE, 3), np.float32)
        return NestedMap(_token_arrays([""] * rows, config), images=images)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        captions, pictures = zip(*self._scenes(rows), strict=True)
        return NestedMap(_token_arrays(captions, self), images=np.stack(pictures)[:, None])

    def _scenes(self, rows: np.ndarray) -> list[tuple[str, np.ndarray]]:
        return [
            draw_scene(draw, is_heldout=not self.is_training) for draw in self._generators(rows)
        ]

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether `prediction_metrics` reads decoded text: True."""
        return True

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Return the shares of right words of decoded captions; an empty dict without predictions.

        `color` and `shape` are shares of the shapes of all pictures, `relation` and `caption`, the
        whole text, of the pictures.
        """
        if not predictions:
            return {}
        rows = sorted(predictions)
        captions = [caption for caption, _ in self._scenes(np.array(rows))]
        pairs = [(caption, predictions[row]) for caption, row in zip(captions, rows, strict=True)]
        return {
            "color": _share(pairs, COLORS),
            "shape": _share(pairs, SHAPES),
            "relation": _share(pairs, RELATIONS),
            "caption": float(np.mean([caption == text for caption, text in pairs])),
        }

    def _fingerprint(self) -> dict[str, Any]:
        names = ("tokens_per_image", "form", "is_training")
        return {**{name: getattr(self, name) for name in names}, "seed": self._seed}


def _share(pairs: list[tuple[str, str]], words: Collection[str]) -> float:
    """Return the share of the `words` of captions that texts have at the same place among them."""
    right, total = 0, 0
    for caption, text in pairs:
        expected, actual = ([w for w in part.split() if w in words] for part in (caption, text))
        right += sum(a == b for a, b in zip(expected, actual, strict=False))
        total += len(expected)
    return right / total


def _token_arrays(captions: Any, fields: Any) -> NestedMap:
    """Return the arrays of captions behind placeholders, or of the placeholders alone."""
    tokenizer, size = WordTokenizer(), fields.tokens_per_image
    images = [np.full(size, IMAGE_ID, np.int32)] * len(captions)
    if fields.form == "prompts":
        return prompt_features(images, length=size + 1, bos_id=tokenizer.bos_id)
    return lm_features(
        images,
        [[*tokenizer.encode(text), tokenizer.eos_id] for text in captions],
        length=size + LENGTH_OF_CAPTION,
        bos_id=tokenizer.bos_id,
        weights_on_targets_only=True,
    )


def draw_scene(draw: np.random.Generator, *, is_heldout: bool) -> tuple[str, np.ndarray]:
    """Return a caption and its picture float32 `[32, 32, 3]` in [-1, 1].

    Args:
      draw: Generator of random numbers.
      is_heldout: Whether the pair of shapes is one of those that training never shows.
    """
    while True:
        colors, shapes = draw.choice(list(COLORS), 2), draw.choice(list(SHAPES), 2)
        first, second = (f"{color} {shape}" for color, shape in zip(colors, shapes, strict=True))
        if (zlib.crc32(f"{first} {second}".encode()) % 5 == 0) == is_heldout:
            break
    axis = int(draw.integers(2))
    picture = draw.uniform(0.0, 0.35) + draw.normal(0.0, 0.03, (IMAGE_SIZE, IMAGE_SIZE, 3))
    row_or_column = draw.choice(CENTERS)
    for place, color, shape in zip(CENTERS, colors, shapes, strict=True):
        center = row_or_column + draw.uniform(-1, 1, 2)  # x and y
        center[axis] += place - row_or_column
        down, right = np.mgrid[:IMAGE_SIZE, :IMAGE_SIZE] - center[::-1, None, None]
        is_inside = SHAPES[shape](right, down) < draw.uniform(6.0, 7.0)
        picture[is_inside] = draw.uniform(0.85, 1.1) * np.array(COLORS[color])
    caption = f"{first} {RELATIONS[axis]} {second}"
    return caption, (2 * picture.clip(0, 1) - 1).astype(np.float32)
