"""Bytes on each device: tensors of state and batch, and temporaries and outputs of a step.

State and batch are exact sums of shard sizes. Temporaries and outputs are the compiler's figures.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from layerkit.base.sharding import HOST_MEMORY
from layerkit_runner.optim.weight_selection import mesh_axes
from layerkit_runner.step.train_state import TrainState
from layerkit_runner.tools.plan.compiling import CompiledStep, Sizes, refused_sizes

KINDS = ("weights", "non-trainable", "averages", "optimizer", "batch")
"""Kinds of tensors; `optimizer` includes the step counter."""
_KIND_OF = {
    "params": "weights",
    "non_trainable": "non-trainable",
    "overwrite_with_gradient": "non-trainable",
    "ema": "averages",
    "ema_statistics": "averages",
}


@dataclasses.dataclass(frozen=True)
class TensorMemory:
    """A tensor that lives on the devices between steps.

    `shape` is that of the whole tensor, without padding. `sharding` has the mesh axes that split
    each dimension. `bytes_per_device` are those of one shard, with padding. `memory` is "device" or
    "host".
    """

    path: str
    kind: str
    shape: list[int]
    dtype: str
    sharding: list[list[str]]
    bytes_per_device: int
    memory: str = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Sizes):
    """Bytes on one device while a step runs, by kind of tensor and as the compiler reports.

    Tensors in host memory are in `host_arguments` only. `weights` include the frozen ones.
    """

    weights: int
    frozen_weights: int = 0
    non_trainable: int
    averages: int
    optimizer: int
    batch: int
    peak: int


def tensor_memory(
    state: TrainState, batch: Any, *, stored: TrainState | None = None
) -> list[TensorMemory]:
    """Return every tensor of a state and a batch, largest first.

    `stored` is the state as a checkpoint holds it; None if no weight is padded.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state if stored is None else stored)]
    tensors = [
        _tensor(path, leaf, shape, kind=_KIND_OF.get(_name(path[:1]), "optimizer"))
        for (path, leaf), shape in zip(leaves, shapes, strict=True)
    ]
    tensors += [
        _tensor((jax.tree_util.DictKey("batch"), *path), leaf, leaf.shape, kind="batch")
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    ]
    order = {kind: position for position, kind in enumerate(KINDS)}
    return sorted(
        tensors, key=lambda tensor: (-tensor.bytes_per_device, order[tensor.kind], tensor.path)
    )


def step_memory(
    tensors: Iterable[TensorMemory], step: CompiledStep, *, trained: Any = None
) -> Memory:
    """Return the bytes of `tensors` by kind, and the bytes of the step compiled for them.

    `trained` is the tree of the trained weights; None if all are.
    """
    by_kind, frozen = dict.fromkeys(KINDS, 0), 0
    leaves = jax.tree_util.tree_leaves_with_path({"params": trained})
    names = {_name(path) for path, _ in leaves}
    for tensor in tensors:
        if tensor.memory == "device":
            by_kind[tensor.kind] += tensor.bytes_per_device
            is_frozen = names and tensor.kind == "weights" and tensor.path not in names
            frozen += tensor.bytes_per_device if is_frozen else 0
    sizes = step.sizes
    if sizes is None:
        sizes = refused_sizes(step.refusal or "", arguments=sum(by_kind.values()))
    return Memory(
        **dataclasses.asdict(sizes),
        **{kind.replace("-", "_"): size for kind, size in by_kind.items()},
        frozen_weights=frozen,
        # The compiler's own peak is not used, because on CPU it omits temporaries. On TPUs this sum
        # equals it: see `temporary_bytes`.
        peak=sizes.arguments + sizes.outputs - sizes.donated + sizes.temporaries,
    )


def num_bytes(tree: Any) -> int:
    """Return the bytes of a tree of whole arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _tensor(path: tuple[Any, ...], leaf: Any, shape: tuple[int, ...], *, kind: str) -> TensorMemory:
    return TensorMemory(
        path=_name(path),
        kind=kind,
        shape=list(shape),
        dtype=leaf.dtype.name,
        sharding=[*map(list, mesh_axes(leaf.sharding.spec, leaf.ndim))],
        bytes_per_device=math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        memory="host" if leaf.sharding.memory_kind == HOST_MEMORY else "device",
    )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


# The number of a layer in a list: the 3 of `layers_3`.
_NUMBER = re.compile(r"(?<=_)\d+(?=/|$)")
_Tensor = TypeVar("_Tensor", bound=TensorMemory)


def join_layers(
    tensors: Iterable[_Tensor], texts: Callable[[_Tensor], tuple[str, ...]]
) -> dict[tuple[str, ...], list[_Tensor]]:
    """Return tensors by path and texts; numbered layers with equal texts share an entry.

    Its path is such as `stack/layers_0…2/w`, and its first text has the number of tensors.
    """
    groups: dict[tuple[str, ...], list[_Tensor]] = {}
    for tensor in tensors:
        has_several = len(_NUMBER.findall(tensor.path)) > 1
        name = tensor.path if has_several else _NUMBER.sub("#", tensor.path)
        groups.setdefault((name, *texts(tensor)), []).append(tensor)
    return {
        (
            _joint_path([t.path for t in group]),
            f"{len(group)} × " * (len(group) > 1) + text,
            *rest,
        ): group
        for (_, text, *rest), group in groups.items()
    }


def _joint_path(paths: list[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    numbers = sorted(int(_NUMBER.findall(path)[0]) for path in paths)
    is_range = numbers == list(range(numbers[0], numbers[-1] + 1))
    text = f"{numbers[0]}…{numbers[-1]}" if is_range else ",".join(map(str, numbers))
    return _NUMBER.sub(text, paths[0])
