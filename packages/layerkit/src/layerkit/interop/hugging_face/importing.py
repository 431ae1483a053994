"""From a folder of Hugging Face to a model of ours: its config, and its weights.

Weights are made leaf by leaf. A host holds the slice of one weight that its devices need, and one
block of a tensor at a time; with 96 layers stacked in one weight, that block is of one layer.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from layerkit.base_layer import PARAMS, BaseLayer
from layerkit.config import Config, Configurable, assigned_fields, build, field_names
from layerkit.interop.hugging_face.families import family_of
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.folder import (
    SafetensorsFolder,
    TensorSource,
    read_json,
    same_tensor,
    tensor_count,
)
from layerkit.interop.hugging_face.layouts import Ranges
from layerkit.interop.hugging_face.tensors import (
    Anatomy,
    Index,
    Path,
    Piece,
    by_weight,
    dissect,
    flatten,
    pieces_of,
    their_shapes,
    unflatten,
)
from layerkit.layers.adapters import LORA_WEIGHTS
from layerkit.layers.residual_adapters import RESIDUAL_ADAPTER_WEIGHTS
from layerkit.layers.stacks import StackedTransformer
from layerkit.near_names import near_names
from layerkit.weights import canonical_dtype

# How many differences between a folder and a model are listed.
_MOST_PROBLEMS = 50


class TensorMismatchError(ValueError):
    """The tensors of a folder are not those of the model."""


def model_config(
    folder: str | os.PathLike[str],
    *,
    repeated: bool = True,
    dtype: Any = None,
    fprop_dtype: Any = None,
) -> Config:
    """The model that the config.json of a folder describes, ready to be trained or edited.

    Args:
      folder: A Hugging Face folder.
      repeated: Whether the layers are one scan over stacked weights; else one after the other.
      dtype: Of the weights; None leaves it to the model's owner.
      fprop_dtype: Of the computation; likewise.

    Raises:
      FileNotFoundError: no config.json.
      UnsupportedModelError: a family or an option that we do not have, or more layers than the
        folder has tensors for.
    """
    content = read_json(folder)
    family = family_of(content.get("model_type"))
    num_tensors = tensor_count(folder)
    if num_tensors is not None:
        family.check_counts(content, num_tensors=num_tensors)
    model = family.read_config(content)
    if not repeated:
        _unroll(getattr(model, family.network_field))
    return model.set(dtype=dtype, fprop_dtype=fprop_dtype)


def import_model(
    folder: str | os.PathLike[str],
    *,
    repeated: bool = True,
    dtype: Any = None,
    fprop_dtype: Any = None,
) -> tuple[Config, dict[str, Any]]:
    """The model of a folder and its variables: `(config, {'params': …})`.

    Args:
      folder: A Hugging Face folder.
      repeated: See `model_config`.
      dtype: To which the weights are cast; None leaves each as it is stored.
      fprop_dtype: Of the computation; None for the dtype of the weights.

    Raises:
      FileNotFoundError: files that are missing.
      UnsupportedModelError: a family or an option that we do not have.
      TensorMismatchError: tensors that do not fit the model.
    """
    if dtype is None:
        content = read_json(folder)
        stored = content.get("dtype") or content.get("torch_dtype") or "float32"
    else:
        stored = dtype
    config = model_config(
        folder, repeated=repeated, dtype=stored, fprop_dtype=fprop_dtype or stored
    )
    return config, load_weights(folder, build(config), dtype=dtype)


def load_weights(
    folder: str | os.PathLike[str],
    model: BaseLayer,
    *,
    dtype: Any = None,
    like: Any = None,
    fresh: Sequence[str] = (),
) -> dict[str, Any]:
    """The variables of `model` from the tensors of a folder: `{'params': …}`.

    Args:
      folder: A Hugging Face folder.
      model: Built from the folder's config, or one with the same weights.
      dtype: To which the weights are cast; None leaves each as it is stored.
      like: The same tree of `jax.ShapeDtypeStruct`, which then decide the dtypes and, where they
        have one, the shardings: a host then reads only what its devices hold. Weights that it
        leaves out are not read.
      fresh: Regular expressions of paths of weights that no tensor holds, such as `.*/lora_[ab]`;
        they are left out of what is returned.

    Raises:
      FileNotFoundError: files that are missing.
      TensorMismatchError: tensors that are missing, surplus, of another shape, or not of a floating
        dtype, or numbers among them that are not finite.
    """
    family = family_of(read_json(folder).get("model_type"))
    anatomy = dissect(model, family.rows)
    with SafetensorsFolder(folder) as source:
        return read_weights(source, family, anatomy, dtype=dtype, like=like, fresh=fresh)


def read_weights(
    source: TensorSource,
    family: Family,
    anatomy: Anatomy,
    *,
    dtype: Any = None,
    like: Any = None,
    fresh: Sequence[str] = (),
) -> dict[str, Any]:
    """Like `load_weights`, from any source of tensors."""
    anatomy = anatomy.without(fresh)
    pieces = _in_names_of(source, family, pieces_of(anatomy, family.rows))
    _check_tensors(source, family, anatomy, pieces)
    wanted = {} if like is None else flatten(like)
    weights = by_weight(pieces)
    made: dict[Path, jax.Array] = {}
    for path, weight in anatomy.weights.items():
        if like is not None and path not in wanted:
            continue
        target = wanted.get(path)
        reader = _WeightReader(source, path, weight.shape, weights[path], dtype)
        sharding = getattr(target, "sharding", None)
        made[path] = reader.make(dtype=getattr(target, "dtype", None), sharding=sharding)
    return unflatten(made)


def stored_dtypes(source: TensorSource, family: Family, anatomy: Anatomy) -> dict[Path, np.dtype]:
    """The dtype that each weight of a model is stored in, or the one that holds all of its tensors.

    Raises:
      TensorMismatchError: tensors that are missing, surplus, or of another shape: all of them.
    """
    pieces = _in_names_of(source, family, pieces_of(anatomy, family.rows))
    _check_tensors(source, family, anatomy, pieces)
    return {
        path: np.dtype(jax.numpy.result_type(*(source.dtype(one.name) for one in parts.values())))
        for path, parts in by_weight(pieces).items()
    }


class _WeightReader:
    """Reads blocks of one weight of ours from the tensors that it is made of."""

    def __init__(
        self,
        source: TensorSource,
        path: Path,
        shape: tuple[int, ...],
        pieces: Mapping[Index, Piece],
        dtype: Any,
    ):
        self._source, self._shape, self._pieces = source, shape, pieces
        self._name = "/".join(path)
        self._stacked = len(next(iter(pieces)))
        stored = {source.dtype(piece.name) for piece in pieces.values()}
        if dtype is None and len(stored) > 1:
            names = ", ".join(sorted(str(one) for one in stored))
            raise TensorMismatchError(
                f"the tensors of {self._name} are stored as {names}; say which by dtype="
            )
        self._dtype = stored.pop() if dtype is None else canonical_dtype(dtype)

    def make(self, *, dtype: Any, sharding: Any) -> jax.Array:
        """The weight as an array on devices."""
        self._dtype = self._dtype if dtype is None else canonical_dtype(dtype)
        if jax.dtypes.canonicalize_dtype(self._dtype) != self._dtype:
            raise TensorMismatchError(
                f"{self._name} would be {self._dtype}, which JAX holds only with jax_enable_x64;"
                " say another one by dtype="
            )
        if sharding is None:
            return jax.numpy.asarray(self.block(tuple((0, size) for size in self._shape)))
        block = functools.cache(self.block)  # devices that hold the same block share one reading

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            slices = zip(index or (), self._shape, strict=True)
            return block(tuple(part.indices(size)[:2] for part, size in slices))

        return jax.make_array_from_callback(self._shape, sharding, read)

    def block(self, ranges: Ranges) -> np.ndarray:
        """The block of the weight within `ranges`, one (start, stop) a dimension."""
        outer, inner = ranges[: self._stacked], ranges[self._stacked :]
        block = np.empty([stop - start for start, stop in ranges], self._dtype)
        starts = tuple(start for start, _ in outer)
        for place in np.ndindex(*(stop - start for start, stop in outer)):
            piece = self._pieces[tuple(a + b for a, b in zip(starts, place, strict=True))]
            block[place] = self._read(piece, inner)
        return block

    def _read(self, piece: Piece, ranges: Ranges) -> np.ndarray:
        def read_theirs(theirs: Ranges) -> np.ndarray:
            if piece.joined_axis is not None:
                axis, moved = piece.joined_axis, list(theirs)
                moved[axis] = (theirs[axis][0] + piece.offset, theirs[axis][1] + piece.offset)
                theirs = tuple(moved)
            return _finite(self._source.read(piece.name, theirs), piece.name)

        return piece.layout.read(read_theirs, piece.shape, ranges)


def _finite(block: np.ndarray, name: str) -> np.ndarray:
    """Return a block of a tensor, or raise TensorMismatchError if a number in it is not finite."""
    finite = np.isfinite(block)
    if not finite.all():
        raise TensorMismatchError(
            f"tensor {name} holds {block[~finite][0]}. Expected finite numbers; such a model gives"
            " NaN for every input."
        )
    return block


def _in_names_of(source: TensorSource, family: Family, pieces: list[Piece]) -> list[Piece]:
    """The pieces by the names of this folder, which may leave out the family's prefix."""
    prefix = family.prefix
    if not prefix or any(name.startswith(prefix) for name in source.names()):
        return pieces
    # Only the model without its head is saved without the prefix.
    return [piece.renamed(piece.name.removeprefix(prefix)) for piece in pieces]


def _check_tensors(
    source: TensorSource, family: Family, anatomy: Anatomy, pieces: Sequence[Piece]
) -> None:
    """Compares what the model needs with what the folder has.

    Raises:
      TensorMismatchError: naming every difference, up to a limit.
    """
    problems = []
    needed = their_shapes(pieces)
    present = set(source.names())
    covered = by_weight(pieces)
    for path in anatomy.weights:
        if path not in covered:
            problems.append(f"no tensor of {family.model_type} models is {'/'.join(path)}")
    surplus = sorted(present - set(needed))
    for name, shape in needed.items():
        if name not in present:
            # The search for near names takes as long as there are names.
            near = near_names(name, surplus) if len(problems) < _MOST_PROBLEMS else ""
            problems.append(f"missing {name} {list(shape)}{near.rstrip('.')}")
            continue
        if source.shape(name) != shape:
            found = list(source.shape(name))
            problems.append(f"{name} has the shape {found}, expected {list(shape)}")
        if not jax.numpy.issubdtype(source.dtype(name), jax.numpy.floating):
            problems.append(f"{name} is stored as {source.dtype(name)}, expected a floating dtype")
    for name in surplus:
        original = family.copies.get(name)
        if re.search(family.buffers, name):
            continue
        if original is None or original not in present:
            problems.append(f"unexpected {name} {list(source.shape(name))}")
        elif not same_tensor(source, name, original):
            problems.append(f"{name} should repeat {original}, but differs from it")
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        listed = problems[:_MOST_PROBLEMS] + ([f"… and {more} more"] if more > 0 else [])
        raise TensorMismatchError("the tensors do not fit the model:\n  " + "\n  ".join(listed))


def _unroll(network: Config) -> None:
    """Puts a stack of layers one after the other in place of every repeated one."""
    for field in field_names(network):
        stack = getattr(network, field)
        if field.endswith("stack_tpl") and stack is not None:
            kept = set(field_names(StackedTransformer))
            fields = {k: v for k, v in assigned_fields(stack).items() if k in kept}
            setattr(network, field, StackedTransformer.HParams.config(**fields))


class HuggingFaceWeights(Configurable):
    """The first weights of a training run, from a Hugging Face folder.

    Attributes:
      folder: Of the same family and the same sizes as the model.
      fresh: Regular expressions of paths of weights that the folder does not hold, and that are
        drawn; by default those of adapters.
    """

    folder: str | None = None
    fresh: Sequence[str] = (LORA_WEIGHTS, RESIDUAL_ADAPTER_WEIGHTS)

    def load(self, model: BaseLayer, like: Any) -> Any:
        """The weights of `model`, by layer path.

        Args:
          model: The network.
          like: Shapes, dtypes and shardings of the weights.

        Raises:
          ValueError: no folder, or one that does not fit.
        """
        if self.folder is None:
            raise ValueError("HuggingFaceWeights.folder is not set")
        return load_weights(self.folder, model, like={PARAMS: like}, fresh=self.fresh)[PARAMS]
