"""The matrices of weights, by the dimensions that the weights declare.

A weight of a product is one matrix `[in, out]`, or a batch of them. Its contracted dimensions are
merged to `in`, such as heads and their size, and its output dimensions to `out`. All others are
batch: stacked layers, stages and experts. A combined projection is one matrix for each product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from layerkit.base.weights import WeightBox
from layerkit.errors import ConfigError, first_names
from layerkit_runner.optim.weight_selection import Path, declaration, mask_of

_HEADS = frozenset({"heads", "kv_heads"})
# Names in a line of the report, before the others are counted.
_MAX_NAMES = 6


@dataclasses.dataclass(frozen=True)
class MatrixDims:
    """The dimensions of the matrices of a weight, counted from the end.

    Attributes:
      ins: Contracted dimensions.
      outs: Dimensions of the output. All that are neither are batch.
      parts: (dimension, sizes along it) of combined products; None for one product.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    parts: tuple[int, tuple[int, ...]] | None = None


def matrix_dims(params: Any, *, split_heads: bool = False) -> Any:
    """Return a tree of the `MatrixDims` of each weight, or None for a weight that is no matrix.

    Weights of products are matrices, adapters included. Embeddings and heads (axis `vocab`),
    products with one input or output, routers, norms, biases and positions are not.

    Args:
      params: Boxed weights, as `init_boxed` returns them, or, inside a learner, its plain weights.
      split_heads: True for a matrix for each attention head; False merges heads with their size.

    Raises:
      ConfigError: A weight has no declaration.
    """
    return mask_of(params, lambda box: _dims_of(box, split_heads=split_heads))


def all_but_matrices(params: Any) -> Any:
    """Return a tree of booleans: True for the weights that are no matrices; see `matrix_dims`.

    It selects the weights of an `AuxiliaryOptimizer` beside a main optimizer of matrices.
    """
    return mask_of(params, lambda box: _dims_of(box, split_heads=False) is None)


def require_matrices(params: Any, *, owner: str, split_heads: bool = False) -> Any:
    """Return `matrix_dims` of weights that all have to be matrices.

    Args:
      params: Weights, updates or gradients.
      owner: Name of the optimizer, for the error.
      split_heads: See `matrix_dims`.

    Raises:
      ConfigError: A weight is no matrix, or `Learner.per_layer` is True.
    """
    num_axes = mask_of(params, lambda box: len(box.axes))
    if any(x.ndim < num for x, num in zip(*map(jax.tree.leaves, (params, num_axes)), strict=True)):
        expected = f"None or False, because {owner} takes the layers of a stack as a batch"
        raise ConfigError(owner="Learner", field="per_layer", value=True, expected=expected)
    dims = matrix_dims(params, split_heads=split_heads)
    others = ["/".join(path) for path, leaf in flatten_dict(dims).items() if leaf is None]
    if others:
        raise ConfigError(
            f"{owner} updates matrices, and these weights are none: {first_names(others, limit=3)}",
            owner="Learner",
            field="auxiliary_optimizers",
            expected="AuxiliaryOptimizer(name='adamw', weights=all_but_matrices, …)",
        )
    return dims


def as_matrices(x: jax.Array, dims: MatrixDims) -> list[jax.Array]:
    """Return the matrices of a weight `[...]`: an array `[*batch, in, out]` for each product."""
    num_batch = x.ndim - len(dims.ins) - len(dims.outs)
    matrices = []
    for part in _split(x, dims):
        part = part.transpose(_order(x.ndim, dims))
        batch, sizes = part.shape[:num_batch], part.shape[num_batch:]
        num_in, num_out = math.prod(sizes[: len(dims.ins)]), math.prod(sizes[len(dims.ins) :])
        matrices.append(part.reshape(*batch, num_in, num_out))
    return matrices


def from_matrices(
    matrices: Sequence[jax.Array], dims: MatrixDims, *, like: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array:
    """Return the array `[...]` of the matrices of `as_matrices`, for a weight shaped `like`."""
    order, split = _order(len(like.shape), dims), jax.eval_shape(partial(_split, dims=dims), like)
    parts = [
        matrix.reshape([part.shape[dim] for dim in order]).transpose(np.argsort(order))
        for matrix, part in zip(matrices, split, strict=True)
    ]
    return jnp.concatenate(parts, axis=dims.parts[0]) if dims.parts else parts[0]


def matrix_lines(weights: Mapping[Path, Any], *, split_heads: bool = False) -> list[str]:
    """Return a line for each kind of matrices of weights, or none if a weight is no matrix.

    Such as `layers 2 × [embed 128 → heads 4 · head_dim 32]: query/w`.

    Args:
      weights: Weights, or their shapes, by path. Their declarations are bound.
      split_heads: See `matrix_dims`.
    """
    names: dict[str, set[str]] = {}
    for path, leaf in weights.items():
        box = declaration(path)
        if box is None or (dims := _dims_of(box, split_heads=split_heads)) is None:
            return []
        names.setdefault(_text(box.axes, leaf.shape, dims), set()).add("/".join(path[-2:]))
    return [f"{text}: {first_names(sorted(names[text]), limit=_MAX_NAMES)}" for text in names]


def _text(axes: tuple[str | None, ...], shape: tuple[int, ...], dims: MatrixDims) -> str:
    sizes: list[Any] = list(shape)
    if dims.parts is not None:
        sizes[dims.parts[0]] = dims.parts[1]
    names = [" ".join(map(str, filter(None, pair))) for pair in zip(axes, sizes, strict=True)]
    ins, outs = (" · ".join(names[dim] for dim in side) for side in (dims.ins, dims.outs))
    batch = _order(len(shape), dims)[: len(shape) - len(dims.ins) - len(dims.outs)]
    return " × ".join([*(names[dim] for dim in batch), f"[{ins} → {outs}]"])


def _order(rank: int, dims: MatrixDims) -> list[int]:
    """Return the dimensions of a weight in the order batch, in, out."""
    matrix = [dim + rank for dim in (*dims.ins, *dims.outs)]
    return [dim for dim in range(rank) if dim not in matrix] + matrix


def _split(x: Any, dims: MatrixDims) -> list[Any]:
    """Return the products that a weight combines, or the only one."""
    if dims.parts is None:
        return [x]
    axis, sizes = dims.parts
    # The learner traces optimizers with weights of one entry, which only the first part has.
    parts = jnp.split(x, np.minimum(np.cumsum(sizes[:-1]), x.shape[axis]), axis)
    return [part for part in parts if part.shape[axis]]


def _dims_of(box: WeightBox, *, split_heads: bool) -> MatrixDims | None:
    is_matrix = box.is_factor and "vocab" not in box.axes and min(box.fans or (1,)) > 1
    if not is_matrix:
        return None
    if not split_heads or _HEADS.isdisjoint(box.axes):
        return MatrixDims(box.fan_in_dims, box.fan_out_dims, box.parts)
    # The heads of queries, keys and values of a combined projection are batch, as others.
    heads = {-index for index, axis in enumerate(reversed(box.axes), 1) if axis in _HEADS}
    batch = heads | ({box.parts[0]} if box.parts else set())
    ins, outs = (
        tuple(dim for dim in dims if dim not in batch)
        for dims in (box.fan_in_dims, box.fan_out_dims)
    )
    return MatrixDims(ins, outs)
