"""The forms of batches: lines for a terminal, and a page. Both read the parts of `read_input`."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from layerkit_runner.files.text import draw_table, printable
from layerkit_runner.tools.inspect.batch_rows import BatchView, Histogram, Row, Segment
from layerkit_runner.tools.pages.page import render_page
from layerkit_runner.tools.pages.tokens import Token

Part = str | BatchView | Histogram

_MOST_CHARACTERS = 160
_NUMBERS_SHOWN = 8
# Forms of labels with weight 0 and of others, without and with colors.
_FORMS = (("⟦{}⟧", "{}"), ("\x1b[2m{}\x1b[0m", "\x1b[32m{}\x1b[0m"))
_BARS = "▁▂▃▄▅▆▇█"
_PIXELS = 96
# Labels with and without a loss are drawn apart if so many stand together on average.
_TURN_TOKENS = 4


SPECIAL = "⟪{}⟫"
"""Mark of special ids, which distinguishes them from the same characters in the text."""


def text_lines(parts: Iterable[Part], *, is_colored: bool = False) -> Iterator[str]:
    """Yield the lines of an input and of its batches."""
    for number, part in enumerate(parts):
        if isinstance(part, BatchView):
            yield f"  {part.title}"
            rows = (line for row in part.rows for line in row_lines(row, is_colored=is_colored))
            head, *table = part.fields or [()]
            lines = (*draw_table(table, head=head), *rows, *part.notes)
            yield from (f"    {line}" for line in lines)
        elif isinstance(part, Histogram):
            counts, _ = np.histogram(part.values, len(_BARS))
            bars = "".join(_BARS[-(-7 * count // counts.max())] for count in counts)
            yield f"  {part.title}: {part.range_text()}  {bars}"
        else:
            yield f"  {part}" if number else part


def row_lines(row: Row, *, is_colored: bool = False) -> Iterator[str]:
    """Yield the text of each sequence of ids in a row, by segments, or else its numbers."""
    yield row.title
    for path, value in row.values.items():
        yield f"  {path}: {numbers_text(value)}"
    for segment in row.segments:
        suffix = "" if segment.number is None else f"[{segment.number}]"
        prefix = f"{segment.side}." if segment.side else ""
        for name, tokens in (("ids", segment.ids), ("labels", segment.labels)):
            if tokens is not None:
                yield f"  {prefix}{name}{suffix}: {_quoted(tokens, is_colored=is_colored)}"


def numbers_text(x: np.ndarray) -> str:
    """Return up to a few numbers, or else the shape and statistics of many."""
    if x.size <= _NUMBERS_SHOWN:
        return " ".join(f"{number:.6g}" for number in x.ravel().tolist())
    return f"{list(x.shape)}, mean {x.mean():.6g}, standard deviation {x.std():.6g}"


def _quoted(tokens: Iterable[Token], *, is_colored: bool) -> str:
    """Return tokens in quotes on one line, without the middle of a long text."""
    unweighted, weighted = _FORMS[is_colored]
    forms = {None: "{}", False: unweighted, True: weighted}
    line = [
        (None if token.weight is None else token.weight > 0, char)
        for token in tokens
        for c in (SPECIAL.format(token.text) if token.is_special else token.text)
        for char in printable(c)
    ]
    if len(line) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        line = [*line[:half], (None, " … "), *line[-half:]]
    pieces = (
        forms[kind].format("".join(char for _, char in chars))
        for kind, chars in itertools.groupby(line, key=lambda pair: pair[0])
    )
    return f"“{''.join(pieces)}”"


def batch_page(name: str, lead: str, inputs: Iterable[Iterable[Part]]) -> str:
    """Return the page of the inputs of an experiment."""
    return render_page(
        "inspect/batches.html.jinja",
        title=f"Batches of {name}",
        lead=lead,
        inputs=[list(parts) for parts in inputs],
        turns=turns,
        numbers=numbers_text,
        images=images_data,
    )


def turns(segment: Segment) -> Iterator[tuple[str, bool | None, list[Token]]]:
    """Yield the name of a sequence, whether its next tokens have a loss, and these tokens.

    Labels that are the ids of the next positions are one sequence with the first id. The loss is
    None, and the tokens are all, if it changes often or not at all.
    """
    ids, labels = segment.ids, segment.labels or []
    sequences = {"ids": ids, "labels": labels}
    if segment.labels is None or [t.id for t in ids[1:]] == [t.id for t in labels[:-1]]:
        sequences = {"": [*ids[:1], *labels] if labels else ids}
    for name, tokens in sequences.items():
        groups = [(k, [*g]) for k, g in itertools.groupby(tokens, lambda token: bool(token.weight))]
        has_first = bool(groups) and len(groups[0][1]) == 1  # The first id alone is no turn.
        is_cut = len(groups) > 1 + has_first and len(tokens) >= _TURN_TOKENS * len(groups)
        for has_loss, group in groups if is_cut else [(None, tokens)]:
            yield name, has_loss, group


def images_data(x: np.ndarray) -> list[str]:
    """Return `image_data` of an image, or of those of `[num_images, height, width, channels]`."""
    images = x if x.ndim == 4 else x[None]
    return [uri for uri in map(image_data, images) if uri]


def image_data(x: np.ndarray) -> str | None:
    """Return the data URI of a small PNG, or None for what is no image.

    Args:
      x: Pixels `[height, width, channels]` with 1, 3 or 4 channels: uint8, or floats in [0, 1].
        Floats in another range are scaled from their least to their greatest value.
    """
    if x.ndim != 3 or x.shape[2] not in (1, 3, 4) or min(x.shape[:2]) < 4:
        return None
    from PIL import Image

    if x.dtype != np.uint8:
        low, high = (0.0, 1.0) if x.min() >= 0 and x.max() <= 1 else (x.min(), x.max())
        x = np.rint(255 * (np.asarray(x, np.float64) - low) / (high - low or 1)).astype(np.uint8)
    image = Image.fromarray(x[..., 0] if x.shape[2] == 1 else x)
    image.thumbnail((_PIXELS, _PIXELS))
    png = io.BytesIO()
    image.save(png, "PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
