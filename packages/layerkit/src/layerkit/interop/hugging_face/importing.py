"""Import of a model's config and weights from a Hugging Face folder.

Weights are read one after the other. A host holds the slice of a weight that its devices need, and
one block of a tensor at a time. A block belongs to a single layer, even if the weight stacks many.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.base_layer import NON_TRAINABLE, PARAMS, BaseLayer
from layerkit.config import Config, build, field_names, walk_configs
from layerkit.errors import ConfigError
from layerkit.interop.hugging_face.compressed.tensors import KEY, compression_of, open_tensors
from layerkit.interop.hugging_face.families import family_in
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.folder import (
    CONFIG,
    Ranges,
    SafetensorsFolder,
    read_json,
    same_tensor,
    stored_dtype,
    tensor_names,
)
from layerkit.interop.hugging_face.keys import UnsupportedModelError
from layerkit.interop.hugging_face.tensors import (
    Anatomy,
    Index,
    Path,
    Piece,
    dissect,
    group_by_weight,
    pieces_of,
    their_shapes,
)
from layerkit.layers.transformer.stacks import unrolled_stack

# Largest number of differences between a folder and a model that an error lists.
_MOST_PROBLEMS = 50


class TensorMismatchError(ConfigError):
    """An error about tensors of a folder that do not fit the model."""


def model_config(
    folder: str | os.PathLike[str],
    *,
    repeated: bool = True,
    dtype: Any = None,
    fprop_dtype: Any = None,
) -> Config:
    """Return the config of the model in a folder, to be edited or trained.

    Args:
      folder: Hugging Face folder.
      repeated: Scan the layers over stacked weights; False unrolls them.
      dtype: Dtype of the weights; None inherits that of the model's owner.
      fprop_dtype: Dtype of the computation; None inherits that of the model's owner.

    Raises:
      FileNotFoundError: The folder has no config.json.
      UnsupportedModelError: The family or an option is not supported, or the config declares more
        layers or experts than the folder has tensors for.
    """
    content, names = read_json(folder), tensor_names(folder)
    try:
        family = family_in(content)
        if names is not None:
            family.check_layers(content, num_tensors=len(names))
            content = family.drop_absent_layers(content, names)
        compression_of(content)
        model = family.read_config({key: content[key] for key in content if key != KEY})
        if names is not None:
            family.check_experts(model, names)
    except UnsupportedModelError as error:
        error.owner = str(pathlib.Path(folder, error.owner or CONFIG))
        raise
    if not repeated:
        for network in list(walk_configs(model)):
            _unroll(network)
    return model.set(dtype=dtype, fprop_dtype=fprop_dtype)


def import_model(
    folder: str | os.PathLike[str],
    *,
    repeated: bool = True,
    dtype: Any = None,
    fprop_dtype: Any = None,
) -> tuple[Config, dict[str, Any]]:
    """Return the model of a folder and its variables: `(config, {'params': …})`.

    Args:
      folder: Hugging Face folder.
      repeated: Scan the layers over stacked weights; False unrolls them.
      dtype: Dtype to which weights are cast; None keeps their stored dtype.
      fprop_dtype: Dtype of the computation; None for the dtype of the weights.

    Raises:
      FileNotFoundError: A file is missing.
      UnsupportedModelError: The family or an option is not supported.
      TensorMismatchError: The tensors do not fit the model.
    """
    stored = stored_dtype(folder) if dtype is None else dtype
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
    """Load the variables of `model` from the tensors of a folder: `{'params': …}`.

    Models with state in their tensors, such as routers with biases, also have `non_trainable`.

    Args:
      folder: Hugging Face folder.
      model: Model whose weights fit the folder's config, such as one built from `model_config`.
      dtype: Dtype to which weights are cast; None keeps their stored dtype.
      like: Tree of `jax.ShapeDtypeStruct` with the dtypes and, optionally, the shardings of the
        result. A host then reads only the shards of its devices. Weights that are not in the tree
        are not read.
      fresh: Regular expressions of paths of weights that the folder does not have, such as
        `.*/lora_(a|b|magnitude)`. The result leaves them out.

    Raises:
      FileNotFoundError: A file is missing.
      TensorMismatchError: A tensor is missing or unexpected, has the wrong shape, has no floating
        dtype, or has numbers that are not finite.
    """
    family = family_in(read_json(folder))
    anatomy = dissect(model, family.rows)
    return read_weights(open_tensors(folder), family, anatomy, dtype=dtype, like=like, fresh=fresh)


def read_weights(
    source: SafetensorsFolder,
    family: Family,
    anatomy: Anatomy,
    *,
    dtype: Any = None,
    like: Any = None,
    fresh: Sequence[str] = (),
) -> dict[str, Any]:
    """Load variables from any source of tensors; see `load_weights`."""
    anatomy = anatomy.drop(fresh)
    pieces = _stored_pieces(source, family, anatomy)
    targets = {} if like is None else flatten_dict(like)
    weights = group_by_weight(pieces)
    made: dict[Path, jax.Array] = {}
    for path, parts in weights.items():
        if like is not None and path not in targets:
            continue
        target, weight = targets.get(path), anatomy.weights[path]
        # The choices of a router may change if its float32 bias is rounded.
        default = weight.dtype if path[0] == NON_TRAINABLE else dtype
        into = _dtype_of(source, path, parts, getattr(target, "dtype", None) or default)
        sharding = getattr(target, "sharding", None)
        made[path] = _make_weight(source, weight.shape, parts, into, sharding)
    return unflatten_dict(made)


def stored_dtypes(
    source: SafetensorsFolder, family: Family, anatomy: Anatomy
) -> dict[Path, np.dtype]:
    """Return the stored dtype of each weight, by path.

    A weight that is stored in tensors of several dtypes has their promoted dtype.

    Raises:
      TensorMismatchError: Tensors are missing, unexpected, or of the wrong shape.
    """
    pieces = _stored_pieces(source, family, anatomy)
    return {
        path: np.dtype(jax.numpy.result_type(*(source.dtype(one.name) for one in parts.values())))
        for path, parts in group_by_weight(pieces).items()
    }


def _make_weight(
    source: SafetensorsFolder,
    shape: tuple[int, ...],
    pieces: Mapping[Index, Piece],
    dtype: np.dtype,
    sharding: Any,
) -> jax.Array:
    """Return a weight as an array on devices, from the tensors that store it."""
    stacked = len(next(iter(pieces)))

    @functools.cache  # Replicas of a block are read once.
    def block(ranges: Ranges) -> np.ndarray:
        outer, inner = ranges[:stacked], ranges[stacked:]
        result = np.empty([stop - start for start, stop in ranges], dtype)
        starts = tuple(start for start, _ in outer)
        for place in np.ndindex(*(stop - start for start, stop in outer)):
            piece = pieces[tuple(a + b for a, b in zip(starts, place, strict=True))]
            with np.errstate(over="ignore"):
                result[place] = require_finite(piece.read(source, inner), piece.name)
            if dtype == np.float16:
                require_finite(result[place], f"{piece.name} in float16")
        return result

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        slices = zip(index or (), shape, strict=True)
        return block(tuple(part.indices(size)[:2] for part, size in slices))

    if sharding is None:
        return jax.numpy.asarray(block(tuple((0, size) for size in shape)))
    return jax.make_array_from_callback(shape, sharding, read)


def _dtype_of(
    source: SafetensorsFolder, path: Path, pieces: Mapping[Index, Piece], dtype: Any
) -> np.dtype:
    """Return the dtype of a weight that is cast to `dtype`; None keeps the stored dtype."""
    stored = {source.dtype(piece.name) for piece in pieces.values()}
    choices = stored if dtype is None else {jax.numpy.dtype(dtype)}
    result = next(iter(choices))
    if len(choices) > 1 or jax.dtypes.canonicalize_dtype(result) != result:
        raise TensorMismatchError(
            field=f"dtypes of {'/'.join(path)}",
            value=sorted(map(str, choices)),
            expected="one dtype, which JAX supports without jax_enable_x64",
            hint="Choose one by `dtype`.",
        )
    # bfloat16 holds all numbers of 8 bits; layers compute in no smaller dtype.
    is_small = dtype is None and result.itemsize == 1
    return jax.numpy.dtype("bfloat16") if is_small else result


def require_finite(block: np.ndarray, name: str) -> np.ndarray:
    """Return a block of a tensor, or raise `TensorMismatchError` if it is not finite."""
    finite = np.isfinite(block)
    if not finite.all():
        raise TensorMismatchError(
            field=f"tensor {name}", value=float(block[~finite][0]), expected="finite numbers"
        )
    return block


def _stored_pieces(source: SafetensorsFolder, family: Family, anatomy: Anatomy) -> list[Piece]:
    """Return the pieces of all weights, with the names of their tensors in this folder.

    Raises:
      TensorMismatchError: The tensors of the folder do not match the model.
    """
    present = set(source.names())
    both = pieces_of(anatomy, family.rows_for(present))
    pieces = [piece for piece in both if not piece.is_copy]
    named = {piece.path: piece.name for piece in pieces}
    repeated = {piece.name: named[piece.path] for piece in both if piece.is_copy}
    needed = {piece.name for piece in pieces}
    # A model that was saved without its head has no prefix.
    is_bare = not any(name.startswith(family.prefix) for name in present)

    def strip_prefix(name: str) -> str:
        return name.removeprefix(family.prefix) if is_bare else name

    copies = {strip_prefix(name): of for name, of in {**family.copies, **repeated}.items()}
    copies = {name: of for name, of in copies.items() if name in present - needed}

    def stored(name: str) -> str:
        plain = strip_prefix(name)
        for pattern, other in family.other_names.items():
            if plain not in present:
                plain = re.sub(pattern, other, plain)
        # A tied tensor may be stored under the name of any of its copies alone.
        others = [copy for copy, original in copies.items() if original == name]
        return plain if plain in present else [*others, family.stand_ins.get(name, plain)][0]

    pieces = [dataclasses.replace(piece, name=stored(piece.name)) for piece in pieces]
    originals = {name: stored(of) for name, of in copies.items() if stored(of) != name}
    problems = _differences(source, family, anatomy, pieces, copies=originals)
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        listed = problems[:_MOST_PROBLEMS] + ([f"… and {more} more"] if more > 0 else [])
        raise TensorMismatchError("tensors do not match the model:\n  " + "\n  ".join(listed))
    return pieces


def _differences(
    source: SafetensorsFolder,
    family: Family,
    anatomy: Anatomy,
    pieces: Sequence[Piece],
    *,
    copies: Mapping[str, str],
) -> list[str]:
    """Return the differences between the tensors of a model and those of a folder.

    `copies` are tensors that have to equal another one: copy → original.
    """
    problems = []
    needed = their_shapes(pieces)
    present = set(source.names())
    covered = group_by_weight(pieces)
    for path in anatomy.weights:
        if path[0] == PARAMS and path not in covered:
            problems.append(f"{'/'.join(path)}: {family.model_type} models have no such tensor")
    surplus = sorted(present - set(needed))
    for name, shape in needed.items():
        if name not in present:
            problems.append(f"{name}: missing tensor of shape {list(shape)}")
            continue
        if source.shape(name) != shape:
            stored = list(source.shape(name))
            problems.append(f"{name}: shape={stored}. Expected {list(shape)}.")
        if not jax.numpy.issubdtype(source.dtype(name), jax.numpy.floating):
            problems.append(f"{name}: dtype={source.dtype(name)}. Expected a floating dtype.")
    for name in surplus:
        if re.search(family.buffers, name) or _is_left_out(name, family, anatomy):
            continue
        starts = [name.removesuffix(end) for end in family.unread if name.endswith(end)]
        if starts and not any(starts[0] + end in needed for end in family.unread):
            continue
        # Compression libraries add biases to all layers.
        is_bias = name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in needed
        if (is_bias or re.search(family.zeros, name)) and not source.tensor(name).any():
            continue
        original = copies.get(name)
        if original is None or original not in present:
            problems.append(f"{name}: unexpected tensor of shape {list(source.shape(name))}")
        elif not same_tensor(source, name, original):
            problems.append(f"{name}: expected the same values as {original}")
    return problems


def _is_left_out(name: str, family: Family, anatomy: Anatomy) -> bool:
    """Return whether a tensor belongs to an extra layer, of which the model has none."""
    layer = re.match(rf"{re.escape(family.prefix)}layers\.(\d+)\.", name)
    count = len(anatomy.layers.get("lm/stack", ()))
    has_extra = bool(anatomy.layers.get("lm/mtp"))
    return bool(family.extra_layers and layer and int(layer[1]) >= count and not has_extra)


def _unroll(network: Config) -> None:
    """Replace each repeated stack by an unrolled one."""
    for field in field_names(network):
        stack = getattr(network, field)
        if field.endswith("stack_tpl") and stack is not None:
            setattr(network, field, unrolled_stack(stack))
