"""Functions of whole matrices, spread over the devices that share the weights.

Newton–Schulz iterations and decompositions need whole matrices, which a mesh splits. The matrices
of all layers are taken in chunks of one matrix for each device: an all-to-all makes each of them
whole on its device, and another returns the results to the layout of the weight. No exchange is
larger than the gather of one layer, and a device holds one whole matrix at a time. Experts and
stages stay on their devices. Moonlight spreads matrices over data-parallel devices in this manner
(Liu et al., 2025, arXiv:2502.16982).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from layerkit.base.sharding import model_device
from layerkit_runner.optim.matrix.matrices import MatrixDims, as_matrices, from_matrices
from layerkit_runner.optim.weight_selection import Layout, bound_layout, mask_of, mesh_axes

MatrixFunction = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, Any]]
"""Function (matrices `[in, out]`, states) -> (matrices `[in, out]`, states)."""


def is_on_cpu() -> bool:
    """Return whether the weights are on CPU devices."""
    layout = bound_layout()
    device = layout((), (), None).mesh.devices.flat[0] if layout else model_device(None)
    return bool(device.platform == "cpu")


def map_matrices(
    function: MatrixFunction, weights: Sequence[Any], states: Sequence[Any] = (), *, dims: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Apply a function of whole matrices to each matrix of each weight.

    Weights of equal matrices are taken together. Their number is padded with zeros, whose results
    are dropped: the function must end for a matrix of zeros. The bound layout (`declared`) spreads
    the work; without one, each device does all.

    Args:
      function: Function of a tuple of matrices `[in, out]` and a tuple of states `[...]` of one
        matrix. It returns any number of matrices, and as many states of equal shapes. None in
        place of a state leaves it unchanged.
      weights: Trees of arrays in the layout of the weights, such as gradients and moments.
      states: Trees with the same paths, of lists of arrays `[*batch, ...]`: one for each matrix
        that `as_matrices` returns, with its batch.
      dims: Tree of `MatrixDims`; see `require_matrices`.

    Returns:
      (trees of the matrices in the layout of the weights, trees of the states).
    """
    layout, flat_dims = bound_layout(), flatten_dict(dims)
    flat = [[flatten_dict(tree) for tree in trees] for trees in (weights, states)]
    arrays = {path: [tuple(tree[path] for tree in trees) for trees in flat] for path in flat_dims}
    if layout is None or layout((), (), None).mesh.size == 1:
        results = _map_whole(function, arrays, flat_dims)
    else:
        axes = flatten_dict(mask_of(weights[0], lambda box: box.axes))
        groups: dict[Any, dict[Any, _Stack]] = {}
        for path, one in flat_dims.items():
            like_weight, of_matrices = arrays[path]
            stack = _Stack.of(like_weight, of_matrices, one, axes=axes[path], layout=layout)
            groups.setdefault(stack.kind, {})[path] = stack
        results = {}
        for group in groups.values():
            results |= zip(group, _map_group(function, [*group.values()]), strict=True)

    kept = {
        path: jax.tree.map(lambda old, new: old if new is None else new, arrays[path][1], result)
        for path, (_, result) in results.items()
    }
    results = {path: (matrices, kept[path]) for path, (matrices, _) in results.items()}

    def as_trees(index: int) -> tuple[Any, ...]:
        columns = zip(*(result[index] for result in results.values()), strict=True)
        return tuple(unflatten_dict(dict(zip(results, c, strict=True))) for c in columns)

    return as_trees(0), as_trees(1)


def _map_whole(function: MatrixFunction, arrays: Any, dims: Any) -> dict[Any, Any]:
    """Return the results (shaped like the weight, states) by path of arrays that are whole here."""
    groups: dict[Any, dict[Any, Any]] = {}
    for path, (weights, states) in arrays.items():
        views = zip(*(as_matrices(x, dims[path]) for x in weights), strict=True)
        for index, matrices in enumerate(views):
            one = matrices, tuple(state[index] for state in states)
            kind = tuple((x.shape[matrices[0].ndim - 2 :], x.dtype) for x in jax.tree.leaves(one))
            groups.setdefault(kind, {})[path, index] = one
    parts: dict[Any, Any] = {}
    for group in groups.values():
        batches = [one[0][0].shape[:-2] for one in group.values()]
        done = _map_joined(jax.vmap(lambda x: function(*x)), [*group.values()], batches)
        parts |= zip(group, done, strict=True)
    results = {}
    for path, (weights, _) in arrays.items():
        # Groups mix the matrices of weights, so that a later one of a weight may come first.
        indices = sorted(index for other, index in parts if other == path)
        outs, states = zip(*(parts[path, index] for index in indices), strict=True)
        columns = zip(*outs, strict=True)
        merged = tuple(from_matrices(one, dims[path], like=weights[0]) for one in columns)
        results[path] = merged, tuple(map(list, zip(*states, strict=True)))
    return results


def _map_joined(function: Any, trees: Sequence[Any], batches: Sequence[Any]) -> list[Any]:
    """Apply a function of arrays `[items, ...]` to trees of arrays `[*batch, ...]` at once."""
    counts = [*map(math.prod, batches)]
    flat = [
        jax.tree.map(lambda x, b=b, n=n: x.reshape(n, *x.shape[len(b) :]), tree)
        for tree, b, n in zip(trees, batches, counts, strict=True)
    ]
    done = function(jax.tree.map(lambda *parts: jnp.concatenate(parts), *flat))
    ends = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return [
        jax.tree.map(lambda x, b=b, e=end: x[slice(*e)].reshape(*b, *x.shape[1:]), done)
        for b, end in zip(batches, ends, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Item:
    """One item of an array `[*batch, ...]`, such as the weight of one layer.

    Attributes:
      sizes: Its global sizes.
      axes: Mesh axes that split each of its dimensions, the major one first.
    """

    sizes: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]

    @property
    def used(self) -> tuple[str, ...]:
        """Mesh axes that split the item."""
        return sum(self.axes, ())

    def order(self, used: Sequence[str]) -> list[int]:
        """Return the order in which the dimensions of parts `[*used, ...]` form the item."""
        dims = enumerate(self.axes, len(used))
        return [one for dim, names in dims for one in (*map(used.index, names), dim)]


@dataclasses.dataclass(frozen=True)
class _Stack:
    """The items of a weight, in trees (shaped like the weight, states).

    Attributes:
      arrays: Arrays `[*batch, ...]`.
      items: The `_Item` of the weight, and those of the states.
      batch: Mesh axes of each dimension of the batch, whose items stay on their devices.
      dims: Dimensions of the matrices of an item.
      order: Dimensions of the weight in the order of its array.
      mesh: Mesh of the devices.
    """

    arrays: Any
    items: Any
    batch: tuple[tuple[str, ...], ...]
    dims: MatrixDims
    order: tuple[int, ...]
    mesh: Mesh | AbstractMesh

    @classmethod
    def of(
        cls, weights: Any, states: Any, dims: MatrixDims, *, axes: Any, layout: Layout
    ) -> _Stack:
        """Return the stack of a weight with these logical axes."""
        shape = weights[0].shape
        rank = len(shape)
        inside = sorted(dim + rank for dim in (*dims.ins, *dims.outs))
        batch = [dim for dim in range(rank) if dim not in inside]
        sharding = layout(axes, shape, None)
        over = mesh_axes(sharding.spec, rank)
        kept = tuple(over[dim] for dim in batch)

        def item_of(x: jax.Array) -> _Item:
            names = [axes[dim] for dim in batch] + [None] * (x.ndim - len(batch))
            state = mesh_axes(layout(names, x.shape, (axes, shape)).spec, x.ndim)
            free = [tuple(name for name in names if name not in sum(kept, ())) for names in state]
            return _Item(x.shape[len(batch) :], tuple(free[len(batch) :]))

        weight = _Item(tuple(shape[dim] for dim in inside), tuple(over[dim] for dim in inside))
        order = (*batch, *inside)
        moved = {dim - rank: index for index, dim in enumerate(order, -rank)}
        ins, outs = (tuple(moved[dim] for dim in group) for group in (dims.ins, dims.outs))
        parts = dims.parts and (moved[dims.parts[0]], dims.parts[1])
        return cls(
            (tuple(x.transpose(order) for x in weights), states),
            (weight, jax.tree.map(item_of, states)),
            kept,
            MatrixDims(ins, outs, parts),
            order,
            sharding.mesh,
        )

    @property
    def kind(self) -> Any:
        """What the stacks have in common whose matrices are taken together."""
        dtypes = tuple(x.dtype for x in jax.tree.leaves(self.arrays))
        kept = frozenset(sum(self.batch, ()))
        return self.dims, kept, tuple(jax.tree.leaves(self.items)), dtypes

    def map(self, function: Callable[[_Item, Any], Any], tree: Any) -> Any:
        """Return the tree (shaped like the weight, states) of `function(item, array)`."""
        items = (self.items[0],) * len(tree[0]), self.items[1]
        return jax.tree.map(lambda i, x: None if x is None else function(i, x), items, tree)

    def spec(self, item: _Item) -> PartitionSpec:
        """Return the layout of an array."""
        return PartitionSpec(*(names or None for names in (*self.batch, *item.axes)))

    def pad(self, item: _Item, x: jax.Array) -> jax.Array:
        """Return `x` with zeros at the end of the dimensions that the mesh does not divide."""
        return _pad(x, [_size(self.mesh, names) for names in (*self.batch, *item.axes)])

    def cut(self, item: _Item, x: jax.Array) -> jax.Array:
        """Return `x` without the zeros of `pad`."""
        batch = self.arrays[0][0].shape[: len(self.batch)]
        return jax.lax.slice(x, (0,) * x.ndim, (*batch, *item.sizes))


def _map_group(function: MatrixFunction, stacks: Sequence[_Stack]) -> list[Any]:
    """Return the results (shaped like the weight, states) of each of the stacks of one kind."""
    first = stacks[0]

    def map_item(arrays: Any) -> Any:
        return _map_whole(function, {(): arrays}, {(): first.dims})[()]

    def map_here(*trees: Any) -> list[Any]:
        batches = [x[0][0].shape[: len(s.batch)] for s, x in zip(stacks, trees, strict=True)]
        run = functools.partial(_map_chunks, map_item, stack=first)
        return _map_joined(run, trees, batches)

    specs = tuple((s.spec(s.items[0]), jax.tree.map(s.spec, s.items[1])) for s in stacks)
    padded = [stack.map(stack.pad, stack.arrays) for stack in stacks]
    # The compiler, left to itself, would gather a whole chunk on each device.
    spread = jax.shard_map(
        map_here, mesh=first.mesh, in_specs=specs, out_specs=[*specs], check_vma=False
    )
    wholes = [stack.map(stack.cut, x) for stack, x in zip(stacks, spread(*padded), strict=True)]
    return [
        (tuple(x.transpose(np.argsort(stack.order)) for x in weights), states)
        for stack, (weights, states) in zip(stacks, wholes, strict=True)
    ]


def _map_chunks(map_item: Callable[[Any], Any], arrays: Any, *, stack: _Stack) -> Any:
    """Return the results for `[batch, ...]` on this device, with one whole item at a time."""
    mesh, count = stack.mesh, jax.tree.leaves(arrays)[0].shape[0]
    names = set(sum((item.used for item in jax.tree.leaves(stack.items)), ()))
    # Replicas share the work, unless most of them would be idle. Slow networks come first.
    for name, size in reversed(mesh.shape.items()):
        is_busy = 1 < size <= 2 * count / _size(mesh, names)
        if name not in sum(stack.batch, ()) and is_busy:
            names.add(name)
    num = _size(mesh, names)
    devices = {name: size for name, size in mesh.shape.items() if name in names}

    def step(_: None, chunk: Any) -> tuple[None, Any]:
        whole = stack.map(functools.partial(_make_whole, devices), chunk)
        return None, stack.map(functools.partial(_return_parts, devices), map_item(whole))

    padded = jax.tree.map(lambda x: _pad(x, [num] + [1] * (x.ndim - 1)), arrays)
    chunks = jax.tree.map(lambda x: x.reshape(-1, num, *x.shape[1:]), padded)
    _, results = jax.lax.scan(step, None, chunks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], results)


def _make_whole(devices: dict[str, int], item: _Item, x: jax.Array) -> jax.Array:
    """Return the item `[...]` of this device from the parts of as many items as devices.

    Args:
      devices: Sizes of the mesh axes over which items are spread, the major one first.
      item: Item to make.
      x: Parts `[items, ...]` of all items that this device has.
    """
    part = x.shape[1:]
    x = x.reshape(*devices.values(), *part)
    for dim, name in enumerate(devices):
        if name not in item.used:
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(name), 1, dim)
    used = tuple(name for name in devices if name in item.used)
    x = x.reshape(-1, *part)
    if used:
        x = jax.lax.all_to_all(x, used, 0, 0, tiled=True)
    x = x.reshape(*map(devices.get, used), *part).transpose(item.order(used))
    sizes = [_size(devices, names) * size for names, size in zip(item.axes, part, strict=True)]
    return jax.lax.slice(x.reshape(sizes), (0,) * len(part), item.sizes)


def _return_parts(devices: dict[str, int], item: _Item, x: jax.Array) -> jax.Array:
    """Return the inverse of `_make_whole`."""
    used = tuple(name for name in devices if name in item.used)
    rest = tuple(name for name in devices if name not in item.used)
    nums = [_size(devices, names) for names in item.axes]
    x = _pad(x, nums)
    part = [size // num for size, num in zip(x.shape, nums, strict=True)]
    sizes = [(*map(devices.get, n), size) for n, size in zip(item.axes, part, strict=True)]
    x = x.reshape(sum(sizes, ())).transpose(np.argsort(item.order(used))).reshape(-1, *part)
    if used:
        x = jax.lax.all_to_all(x, used, 0, 0, tiled=True)
    if rest:
        x = jax.lax.all_gather(x, rest)
    x = x.reshape(*map(devices.get, (*rest, *used)), *part)
    order = [*map((*rest, *used).index, devices), *range(len(devices), x.ndim)]
    return x.transpose(order).reshape(-1, *part)


def _pad(x: jax.Array, multiples: Sequence[int]) -> jax.Array:
    sizes = zip(x.shape, multiples, strict=True)
    # Unlike jnp.pad, this takes scalars.
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, -n % multiple, 0) for n, multiple in sizes])


def _size(mesh: Any, names: Any) -> int:
    """Return the number of devices along mesh axes of a mesh or of sizes by name."""
    sizes = getattr(mesh, "shape", mesh)
    return math.prod(sizes[name] for name in names)
