"""Bytes on each device: tensors of state and batch, and temporaries and outputs of a step.

State and batch are exact sums of shard sizes. Temporaries and outputs are the compiler's figures.
The text of the program has the shape of each result and the names under which it was traced.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax

from layerkit.base.sharding import HOST_MEMORY
from layerkit_runner.step.train_state import TrainState
from layerkit_runner.tools.plan.collectives import type_bytes
from layerkit_runner.tools.plan.compiling import CompiledStep, Sizes, refused_sizes
from layerkit_runner.tools.plan.hlo import Instruction, instructions

KINDS = ("weights", "non-trainable", "averages", "optimizer", "batch")
"""Kinds of tensors; `optimizer` includes the step counter."""
_KIND_OF = {
    "params": "weights",
    "non_trainable": "non-trainable",
    "overwrite_with_gradient": "non-trainable",
    "ema": "averages",
    "ema_statistics": "averages",
}

# Instructions that allocate no memory, or only once.
_NO_MEMORY = re.compile(
    "parameter|get-tuple-element|tuple|bitcast|constant|iota|broadcast|while|conditional|call"
    "|after-all|partition-id|opt-barrier|optimization-barrier|.*-start|.*-update"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SHAPE = re.compile(r"([a-z]+\d*\w*\[[\d,]*\])(\{[^}]*\})?")
# Memory space of a layout. That of the device is 0 and is not written.
_SPACE = re.compile(r"S\((\d+)\)")
_HOST_SPACE = "5"

# Parts of a traced name that come from JAX's transformations.
_PLUMBING = ("while", "body", "cond", "closed_call", "checkpoint", "custom_vjp_call", "pjit")
# A method of a layer, which follows the layer's name: `softmax/softmax.logits`.
_METHOD = re.compile(r"\w+\.[a-z_]\w*")


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

    Tensors in host memory are in `host_arguments` only.
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


def step_memory(tensors: Iterable[TensorMemory], step: CompiledStep) -> Memory:
    """Return the bytes of `tensors` by kind, and the bytes of the step compiled for them."""
    by_kind = dict.fromkeys(KINDS, 0)
    for tensor in tensors:
        if tensor.memory == "device":
            by_kind[tensor.kind] += tensor.bytes_per_device
    sizes = step.sizes
    if sizes is None:
        sizes = refused_sizes(step.refusal or "", arguments=sum(by_kind.values()))
    return Memory(
        **dataclasses.asdict(sizes),
        **{kind.replace("-", "_"): size for kind, size in by_kind.items()},
        # The compiler's own peak is not used, because on CPU it omits temporaries. On TPUs this sum
        # equals it: see `temporary_bytes`.
        peak=sizes.arguments + sizes.outputs - sizes.donated + sizes.temporaries,
    )


def _tensor(path: tuple[Any, ...], leaf: Any, shape: tuple[int, ...], *, kind: str) -> TensorMemory:
    spec = tuple(leaf.sharding.spec)
    entries = spec + (None,) * (leaf.ndim - len(spec))
    return TensorMemory(
        path=_name(path),
        kind=kind,
        shape=list(shape),
        dtype=leaf.dtype.name,
        sharding=[[entry] if isinstance(entry, str) else list(entry or ()) for entry in entries],
        bytes_per_device=math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize,
        memory="host" if leaf.sharding.memory_kind == HOST_MEMORY else "device",
    )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclasses.dataclass(frozen=True)
class TemporaryTensor:
    """A result that a device, or the host, holds while a step runs.

    `count` is the number of instructions with this shape, memory and traced name.
    """

    bytes_per_device: int
    shape: str
    count: int
    name: str
    memory: str = "device"


def largest_temporaries(hlo_text: str, *, most: int) -> list[TemporaryTensor]:
    """Return the largest results of a compiled program, largest first."""
    tensors: dict[tuple[str, str, str], TemporaryTensor] = {}
    for instruction in instructions(hlo_text):
        for shape, memory, size in _results(instruction):
            traced = _OP_NAME.search(instruction.rest)
            name = _short_name(traced[1]) if traced else instruction.name
            key = (shape, memory, name)
            count = tensors[key].count + 1 if key in tensors else 1
            tensors[key] = TemporaryTensor(size, shape, count, name, memory)
    order = sorted(tensors.values(), key=lambda tensor: (-tensor.bytes_per_device, tensor.name))
    return order[:most]


def _results(instruction: Instruction) -> list[tuple[str, str, int]]:
    """Return shape, memory and bytes of each array that an instruction leaves in memory."""
    if instruction.is_fused or _NO_MEMORY.fullmatch(instruction.opcode):
        return []
    if instruction.rest.startswith(")"):  # no operands: a buffer of zeros that a loop fills
        return []
    outputs = []
    for shape, layout in _SHAPE.findall(instruction.type):
        space = _SPACE.search(layout)
        if space is None or space[1] == _HOST_SPACE:
            outputs.append((shape, "device" if space is None else "host", type_bytes(shape)))
    return outputs


def _short_name(op_name: str) -> str:
    """Shorten `jit(train_step)/jvp(lm)/while/body/lm/lm.fprop/add` to `jvp(lm)/lm/add`."""
    return "/".join(
        part
        for part in op_name.split("/")
        if part not in _PLUMBING
        and not part.startswith(("jit(", "shard_map"))
        and not _METHOD.fullmatch(part)
    )
