"""Bytes on each device: tensors of state and batch, and temporaries and outputs of a step.

The former are exact sums of shard sizes, the latter the compiler's figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from layerkit_runner.tools.plan.compiling import CompiledStep, Sizes, refused_sizes
from layerkit_runner.training.train_state import TrainState

KINDS = ("weights", "non-trainable", "averages", "optimizer", "batch")
"""Kinds of tensors; `optimizer` includes the step counter."""
_KIND_OF = {
    "params": "weights",
    "non_trainable": "non-trainable",
    "overwrite_with_gradient": "non-trainable",
    "ema": "averages",
}


@dataclasses.dataclass(frozen=True)
class TensorMemory:
    """A tensor that lives on the devices between steps.

    Attributes:
      path: Path of names, such as `params/lm/softmax/w`.
      kind: One of `KINDS`.
      shape: Shape of the whole tensor, without padding.
      sharding: For each dimension the mesh axes that split it, `[[], ["fsdp"], ["data", "fsdp"]]`.
      bytes_per_device: Bytes of one shard, with padding.
    """

    path: str
    kind: str
    shape: list[int]
    dtype: str
    sharding: list[list[str]]
    bytes_per_device: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Sizes):
    """Bytes on one device while a step runs: by kind of tensor, and as the compiler reports them.

    Attributes:
      averages: Moving averages of the weights (`learner.ema_decay`).
      optimizer: State of the optimizer, and the step counter.
      peak: arguments + outputs − donated + temporaries.
    """

    weights: int
    non_trainable: int
    averages: int
    optimizer: int
    batch: int
    peak: int


def tensor_memory(
    state: TrainState, batch: Any, *, stored: TrainState | None = None
) -> list[TensorMemory]:
    """Return every tensor of a state and a batch, largest first.

    Args:
      state: Arrays or their shapes, with shardings.
      batch: Arrays or their shapes, with shardings.
      stored: The state as a checkpoint holds it, without padding; None if no weight is padded.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state if stored is None else stored)]
    found = [
        _tensor(path, leaf, shape, kind=_KIND_OF.get(_name(path[0]), "optimizer"))
        for (path, leaf), shape in zip(leaves, shapes, strict=True)
    ]
    found += [
        _tensor((jax.tree_util.DictKey("batch"), *path), leaf, leaf.shape, kind="batch")
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    ]
    order = {kind: position for position, kind in enumerate(KINDS)}
    return sorted(found, key=lambda each: (-each.bytes_per_device, order[each.kind], each.path))


def step_memory(tensors: Iterable[TensorMemory], step: CompiledStep) -> Memory:
    """Return the memory by kind of tensors and of the step that was compiled for them."""
    by_kind = dict.fromkeys(KINDS, 0)
    for tensor in tensors:
        by_kind[tensor.kind] += tensor.bytes_per_device
    sizes = step.sizes
    if sizes is None:
        sizes = refused_sizes(step.refusal or "", arguments=sum(by_kind.values()))
    return Memory(
        **dataclasses.asdict(sizes),
        weights=by_kind["weights"],
        non_trainable=by_kind["non-trainable"],
        averages=by_kind["averages"],
        optimizer=by_kind["optimizer"],
        batch=by_kind["batch"],
        # Not the compiler's own peak, which on CPU leaves the temporaries out. On TPUs the sum is
        # that peak: see `temporary_bytes`.
        peak=sizes.arguments + sizes.outputs - sizes.donated + sizes.temporaries,
    )


def _tensor(path: tuple[Any, ...], leaf: Any, shape: tuple[int, ...], *, kind: str) -> TensorMemory:
    spec = tuple(leaf.sharding.spec)
    entries = spec + (None,) * (leaf.ndim - len(spec))
    return TensorMemory(
        path="/".join(_name(part) for part in path),
        kind=kind,
        shape=list(shape),
        dtype=leaf.dtype.name,
        sharding=[[entry] if isinstance(entry, str) else list(entry or ()) for entry in entries],
        bytes_per_device=math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
    )


def _name(part: Any) -> str:
    """Return one part of a tree path: a field, a key or an index."""
    for attribute in ("name", "key", "idx"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)
