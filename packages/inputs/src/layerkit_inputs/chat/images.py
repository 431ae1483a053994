"""ChatImages: the images of conversations as pixels, and as placeholders in their tokens.

A chat template writes a marker for an image. The marker becomes a stretch of placeholder tokens, at
whose positions a model reads the vectors of the image. Images are files beside the conversations,
or part of them as `data:` URIs. No URL is fetched.
"""

from __future__ import annotations

import base64
import bisect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from layerkit.config import Configurable
from layerkit.config.checks import check_sizes, require
from layerkit.config.hparams import check_fields
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.chat.conversations import IMAGE_MARKER
from layerkit_inputs.chat.template import Rendering
from layerkit_inputs.images.decode_image import decode_image, pillow


class ImageSource(NamedTuple):
    """An image of a conversation, which is not decoded."""

    content: Path | bytes
    """Path of a file, or the bytes of one."""
    name: str
    """File and row of the conversation, and the path, for messages."""


class ChatImages(Configurable):
    """The form of images of conversations: pixels for the tower, and placeholders in the tokens.

    Pixels are resized to `height` × `width` without their aspect ratio, scaled to [0, 1], and
    normalized as `(pixels - mean) / std`.
    """

    height: int
    """Height in pixels."""
    width: int
    """Width in pixels."""
    tokens_per_image: int
    """Number of placeholders of an image."""
    placeholder: str = IMAGE_MARKER
    """Special token of the positions that read an image, such as `<image_soft_token>`."""
    marker: str = IMAGE_MARKER
    """Text that the chat template writes for an image, such as `<start_of_image>`."""
    before: str = ""
    """Text before the placeholders, in the place of the marker."""
    after: str = ""
    """Text after the placeholders."""
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    """Mean of each channel."""
    std: Sequence[float] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel."""
    resampling: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    """Filter of Pillow that resizes images."""
    max_images: int | None = None
    """Maximum number of images of a row. None: as many as its tokens allow."""
    folder: str | None = None
    """Folder of the files of images. None: that of the file of the conversation."""

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self, owner=type(self).__qualname__)
        sizes = {name: getattr(self, name) for name in ("height", "width", "tokens_per_image")}
        check_sizes(type(self).__qualname__, **sizes, max_images=self.max_images)

    def num_images(self, length: int) -> int:
        """Return the number of images of a row of `length` tokens, at least 1."""
        most = max(1, length // self.tokens_per_image)
        return most if self.max_images is None else min(most, self.max_images)

    def placeholder_id(self, tokenizer: Tokenizer) -> int:
        """Return the id of the placeholder.

        Raises:
          ConfigError: The placeholder is no special token of the tokenizer.
        """
        names = getattr(tokenizer, "special_tokens", {})
        ids = [token_id for token_id, name in names.items() if name == self.placeholder]
        expected = "a special token of the tokenizer"
        require(ids, type(self).__qualname__, "placeholder", self.placeholder, expected)
        return int(ids[0])

    def expand(
        self, rendering: Rendering, spans: Sequence[tuple[int, int]], num_images: int
    ) -> tuple[Rendering, list[tuple[int, int]]]:
        """Return a rendering with placeholders in the place of markers, and its spans.

        A marker that a message spells out is no marker, if `rendering` splits it.

        Args:
          rendering: The text of a conversation.
          spans: Stretches of the text.
          num_images: Number of images of the conversation.

        Raises:
          BadRecordError: There are more than `max_images`, or the template writes another number of
            markers.
        """
        is_valid = self.max_images is None or num_images <= self.max_images
        expected = f"at most max_images={self.max_images}"
        require(is_valid, None, "images of a row", num_images, expected, BadRecordError)
        starts = (match.start() for match in re.finditer(re.escape(self.marker), rendering.text))
        places = [place for place in starts if place + 1 not in rendering.splits]
        expected = f"{num_images}, the images of the messages"
        field = f"number of {self.marker!r} in the rendered messages"
        require(len(places) == num_images, None, field, len(places), expected, BadRecordError)
        stretch = f"{self.before}{self.placeholder * self.tokens_per_image}{self.after}"
        growth = len(stretch) - len(self.marker)

        def move(place: int) -> int:
            return place + growth * bisect.bisect_left(places, place)

        pieces, begin = [], 0
        for place in places:
            pieces += [rendering.text[begin:place], stretch]
            begin = place + len(self.marker)
        text = "".join([*pieces, rendering.text[begin:]])
        moved = Rendering(text, rendering.generated, [*map(move, rendering.splits)])
        return moved, [(move(begin), move(end)) for begin, end in spans]

    def locate(self, name: str, *, beside: Path, where: str) -> ImageSource:
        """Return the image of a path or `data:` URI.

        Args:
          name: The path, relative to the folder of images, or the URI.
          beside: Folder of the file of the conversation.
          where: File and row of the conversation.

        Raises:
          BadRecordError: There is no such file in the folder, or the URI has no Base64.
        """
        if name.startswith("data:"):
            head, encoding, data = name.partition(";base64,")
            require(encoding, None, "image", head[:80], "a URI data:…;base64,…", BadRecordError)
            try:
                return ImageSource(base64.b64decode(data, validate=True), f"{where}, {head}")
            except ValueError as error:
                raise BadRecordError(f"no Base64: {error}", field="image", value=head) from None
        folder = (Path(self.folder) if self.folder else beside).resolve()
        path = (folder / name).resolve()
        is_inside = path.is_relative_to(folder) and path.is_file()
        require(is_inside, None, "image", name, f"a file in the folder {folder}", BadRecordError)
        return ImageSource(path, f"{where}, {name}")

    def read(self, rows: Sequence[Sequence[ImageSource]], *, length: int) -> np.ndarray:
        """Return the normalized pixels of the images of rows.

        Args:
          rows: Images of each row, in order.
          length: Tokens of a row, as in `num_images`.

        Returns:
          float32 `[rows, num_images, height, width, 3]`, zeros where a row has fewer images.

        Raises:
          BadRecordError: An image cannot be decoded.
        """
        shape = (len(rows), self.num_images(length), self.height, self.width, 3)
        pixels = np.zeros(shape, np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        for row, sources in enumerate(rows):
            for place, source in enumerate(sources):
                decoded = self._decode(source).astype(np.float32) / 255
                pixels[row, place] = (decoded - mean) / std
        return pixels

    def _decode(self, source: ImageSource) -> np.ndarray:
        """Return the pixels of an image, uint8 `[height, width, 3]`."""
        filter_ = pillow().Resampling[self.resampling.upper()]
        content = source.content if isinstance(source.content, bytes) else {"path": source.content}
        image = decode_image(content, channels=3, owner=source.name)
        return np.asarray(image.resize((self.width, self.height), filter_))
