"""Tables from tensors of a folder to parts of layerkit weights.

A family has one table of rows, name ↔ path with a `Layout`. It is expanded over the layers (and
experts) of a model into pieces. Import and export use the same pieces.

Layers may be unrolled, repeated on a stacked axis, or repeated in blocks. `locate_layer` of the
stack returns the location of a layer's variables, so that tables do not depend on it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit.base.base_layer import NON_TRAINABLE, PARAMS, BaseLayer
from layerkit.base.weights import unbox
from layerkit.interop.hugging_face.folder import Ranges, SafetensorsFolder
from layerkit.interop.hugging_face.layouts import Layout

# From the collection's name down: ("params", "lm", "softmax", "w"), or ("non_trainable", …).
Path = tuple[str, ...]
Index = tuple[int, ...]

_LAYER = "{layer}"
EXPERT = "{expert}"
"""Placeholder of the number of an expert in the name of a tensor."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a family's table of tensors.

    Attributes:
      name: Name of the tensor, which may contain `{layer}` and `{expert}`.
      path: Path of the weight in the model. The part before `{layer}` is the path of the stack.
        Weights of experts have a leading axis of experts.
      layout: `Layout` without the axes of layers and experts.
      joined_axis: Axis of the tensor along which it concatenates the weights of several rows, in
        the order of the rows; None if the tensor holds one weight.
      joined_per: Name of the first axis of the layout's group at `joined_axis` if the tensor
        concatenates the weights for each of its indices, such as each head; None for whole weights.
      joined_like: Path of a weight of the same layout whose axis `joined_per` counts the stretches,
        such as keys of which each serves several heads; None for the weight of the row.
      beside: Path of a weight that must exist for the row to apply, such as a separate embedding.
      instead_of: Path of a weight that must not exist for the row to apply.
      behind: Path of another stack, whose layers come first in the numbers of `{layer}`.
      copied_for: Path of a stack. The tensor repeats a weight for each layer of it. Export writes
        it, and import compares it if the folder has it.
    """

    name: str
    path: str
    layout: str = "dims -> dims"
    joined_axis: int | None = None
    joined_per: str | None = None
    joined_like: str | None = None
    beside: str | None = None
    instead_of: str | None = None
    behind: str | None = None
    copied_for: str | None = None


def replace_rows(rows: Sequence[Row], others: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows, with others in place of those of the same weights."""
    paths = {row.path for row in others}
    return (*others, *(row for row in rows if row.path not in paths))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a weight that is stored in one tensor.

    Attributes:
      name: Name of the tensor.
      path: Path of the weight.
      index: Index of the part on the leading axes of layers and experts.
      shape: Shape of the part.
      layout: Layout of the part in the tensor.
      joined_axis: Axis of the tensor that concatenates several parts; None if there is one.
      offset: Start of the part on the joined axis, in each of its repeats.
      repeats: Number of equal stretches of the joined axis, each of which concatenates the parts.
      is_copy: True for a tensor that repeats the weight of another piece.
    """

    name: str
    path: Path
    index: Index
    shape: tuple[int, ...]
    layout: Layout
    joined_axis: int | None
    offset: int
    repeats: int = 1
    is_copy: bool = False

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of the part within the tensor."""
        return self.layout.their_shape(self.shape)

    def read(self, source: SafetensorsFolder, ranges: Ranges) -> np.ndarray:
        """Return a range of each axis of this part, reading little else of the tensor."""
        theirs, shape, inside = self.layout.locate(ranges, self.shape)
        axis = self.joined_axis
        if axis is None or self.repeats == 1:
            if axis is not None:
                theirs[axis] = (theirs[axis][0] + self.offset, theirs[axis][1] + self.offset)
            return self.layout.to_ours(source.read(self.name, theirs), shape)[inside]
        width = self.their_shape[axis] // self.repeats
        total = source.shape(self.name)[axis] // self.repeats
        start, stop = theirs[axis]
        first, last = start // width, -(-stop // width)
        if width == 1:  # The parts alternate, and those of others need not be decoded.
            theirs[axis] = (first * total + self.offset, last * total, total)
            return self.layout.to_ours(source.read(self.name, theirs), shape)[inside]
        theirs[axis] = (first * total, last * total)
        stretches = dataclasses.replace(self, repeats=last - first).split(
            source.read(self.name, theirs)
        )
        outer = (slice(None),) * (axis + 1)
        part = stretches[(*outer, slice(self.offset, self.offset + width))]
        part = part.reshape(*part.shape[:axis], -1, *part.shape[axis + 2 :])
        part = part[(*outer[:-1], slice(start - first * width, stop - first * width))]
        return self.layout.to_ours(part, shape)[inside]

    def split(self, tensor: np.ndarray) -> np.ndarray:
        """Split the joined axis of a tensor or part into [repeats, width]."""
        assert self.joined_axis is not None
        before, after = tensor.shape[: self.joined_axis], tensor.shape[self.joined_axis + 1 :]
        return tensor.reshape(*before, self.repeats, -1, *after)


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """The weights of a model and the locations of its layers.

    Attributes:
      weights: Shapes and dtypes of the weights by path.
      layers: Locations of the layers of each stack, by the path of the stack (`lm/stack`). A stack
        that the model lacks has none.
    """

    weights: dict[Path, jax.ShapeDtypeStruct]
    layers: dict[str, list[tuple[Path, Index]]]

    def drop(self, patterns: Sequence[str]) -> Anatomy:
        """Return the anatomy without weights whose paths (`lm/softmax/w`) match a pattern."""

        def stays(path: Path) -> bool:
            return not any(re.fullmatch(pattern, "/".join(path[1:])) for pattern in patterns)

        kept = {path: weight for path, weight in self.weights.items() if stays(path)}
        return dataclasses.replace(self, weights=kept)


@functools.lru_cache(maxsize=4)
def dissect(model: BaseLayer, rows: tuple[Row, ...]) -> Anatomy:
    """Return the anatomy of a model by tracing, without computing its weights.

    Tracing a deep model takes seconds, so the last results are cached.
    """
    stacks = {row.path.partition(f"/{_LAYER}")[0] for row in rows if _LAYER in row.path}
    layers: dict[str, list[tuple[Path, Index]]] = {}

    def look(model: BaseLayer) -> None:
        for path in stacks:
            stack: Any = model
            for name in path.split("/"):
                stack = getattr(stack, name, None)
            size = 0 if stack is None else stack.num_layers
            layers[path] = [stack.locate_layer(i) for i in range(size)]

    boxed = jax.eval_shape(lambda: model.init_boxed(jax.random.key(0), method=look))
    variables = unbox(boxed)
    kept = {name: variables[name] for name in (PARAMS, NON_TRAINABLE) if name in variables}
    return Anatomy(flatten_dict(kept), layers)


def pieces_of(anatomy: Anatomy, rows: Sequence[Row]) -> list[Piece]:
    """Expand the table of a family for a model.

    Rows of weights that the model does not have, such as biases, are skipped.
    """
    offsets: dict[str, int] = {}
    pieces = []
    for row in rows:
        for name, path, index, shape, like in _expand(row, anatomy):
            layout = Layout.parse(row.layout)
            offset, repeats = 0, 1
            if row.joined_per is not None:
                repeats = like[layout.ours.index(row.joined_per)]
            if row.joined_axis is not None:
                offset = offsets.get(name, 0)
                offsets[name] = offset + layout.their_shape(shape)[row.joined_axis] // repeats
            joined = row.joined_axis, offset, repeats
            pieces.append(Piece(name, path, index, shape, layout, *joined, bool(row.copied_for)))
    return pieces


def join_parts(pieces: Sequence[Piece], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the tensor that several pieces, or one, have their parts in."""
    axis = pieces[0].joined_axis
    if axis is None:
        return parts[0]
    split = [piece.split(part) for piece, part in zip(pieces, parts, strict=True)]
    joined = np.concatenate(split, axis + 1)
    return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])


def their_shapes(pieces: Sequence[Piece]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the pieces, in the order of the table."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        shape = list(piece.their_shape)
        if piece.joined_axis is not None and piece.name in shapes:
            shape[piece.joined_axis] += shapes[piece.name][piece.joined_axis]
        shapes[piece.name] = tuple(shape)
    return shapes


def _expand(
    row: Row, anatomy: Anatomy
) -> Iterator[tuple[str, Path, Index, tuple[int, ...], tuple[int, ...]]]:
    """Yield (tensor, weight, index on its leading axes, shape, that of `joined_like`) of parts."""
    stack, has_layers, _ = row.path.partition(f"/{_LAYER}")
    places: list[tuple[Path, Index]] = anatomy.layers[stack] if has_layers else [((), ())]
    if row.copied_for is not None:
        places *= len(anatomy.layers[row.copied_for])
    start = len(anatomy.layers[row.behind]) if row.behind is not None else 0
    for layer, (place, index) in enumerate(places, start):

        def absolute(path: str, place: Path = place) -> Path:
            names = path.replace(_LAYER, "/".join(place)).split("/")
            state = (NON_TRAINABLE, *names)
            return state if state in anatomy.weights else (PARAMS, *names)

        path = absolute(row.path)
        if path not in anatomy.weights:
            continue
        if row.beside is not None and absolute(row.beside) not in anatomy.weights:
            continue
        if row.instead_of is not None and absolute(row.instead_of) in anatomy.weights:
            continue
        shape = anatomy.weights[path].shape[len(index) :]
        like = anatomy.weights[absolute(row.joined_like or row.path)].shape[len(index) :]
        name = row.name.replace(_LAYER, str(layer))
        if EXPERT not in name:
            yield name, path, index, shape, like
            continue
        for expert in range(shape[0]):
            yield name.replace(EXPERT, str(expert)), path, (*index, expert), shape[1:], like[1:]


def group_by_tensor(pieces: Sequence[Piece]) -> dict[str, list[Piece]]:
    """Return the pieces by the name of their tensor, in the order of the table."""
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.name, []).append(piece)
    return groups


def group_by_weight(pieces: Sequence[Piece]) -> dict[Path, dict[Index, Piece]]:
    """Return the pieces by weight and index in the weight."""
    weights: dict[Path, dict[Index, Piece]] = {}
    for piece in pieces:
        weights.setdefault(piece.path, {})[piece.index] = piece
    return weights
