"""Temporaries that a device holds along the schedule of a compiled step, and the largest of them.

Compilers report the bytes at the peak, but for most devices not when each buffer is in use. Here a
result is in memory from its instruction to its last use, and loops update their state in place.
Other reuse, padding and the memory of kernels are unknown, so the figures are estimates.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from layerkit_runner.tools.plan.collectives import type_bytes
from layerkit_runner.tools.plan.hlo import INDEX, Instruction, instructions

_MOST_POINTS = 400
_LARGEST = 30  # more than a page shows, for the JSON form

_SHAPE = re.compile(r"([a-z]+\d*\w*\[[\d,]*\])(\{[^}]*\})?")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NO_RESULT = ("parameter", "constant", "iota", "partition-id", "replica-id", "after-all")
_SAME = ("bitcast", "while", "dynamic-update-slice", "opt-barrier", "optimization-barrier")
_RUNS = ("while", "call", "conditional")

# Parts of a traced name that come from JAX's transformations.
_PLUMBING = ("while", "body", "cond", "closed_call", "checkpoint", "custom_vjp_call", "pjit")
# A method of a layer, which follows the layer's name: `softmax/softmax.logits`.
_METHOD = re.compile(r"\w+\.[a-z_]\w*")


@dataclasses.dataclass(frozen=True)
class TemporaryTensor:
    """A result in the memory of a device; `count` have this shape and traced name."""

    bytes_per_device: int
    shape: str
    count: int
    name: str


@dataclasses.dataclass(frozen=True)
class LiveMemory:
    """Estimated temporaries on one device, along the schedule of a step.

    Attributes:
      bytes: Bytes at each point, bodies of loops once; of a long schedule the largest of several.
      backward: First and last of these points that belong to the backward pass; empty for none.
      largest: Largest results in memory where `bytes` is largest.
    """

    bytes: list[int]
    backward: list[int]
    largest: list[TemporaryTensor]


@dataclasses.dataclass(frozen=True, eq=False)
class _Buffer:
    size: int
    shape: str
    instruction: Instruction


# The buffers in which each element of a result may lie; a result that is no tuple has one element.
_Elements = list[set[_Buffer]]


def live_memory(hlo_text: str) -> LiveMemory | None:
    """Return the memory along the schedule of `compiled.as_text()`; None without a program."""
    bodies = collections.defaultdict(list)
    for instruction in instructions(hlo_text):
        bodies[instruction.computation].append(instruction)
    if not bodies:
        return None
    live: set[_Buffer] = set()
    sizes: list[int] = []
    backward: list[int] = []
    peak, most = live, -1
    for at, instruction in enumerate(_run(list(bodies)[-1], bodies, live)):  # the entry is last
        sizes.append(sum(buffer.size for buffer in live))
        if sizes[-1] > most:
            peak, most = {*live}, sizes[-1]
        # Zeros for gradients are often made long before the backward pass.
        if "transpose(" in instruction.rest and "broadcast_in_dim" not in instruction.rest:
            backward.append(at)
    counts = collections.Counter(
        (-buffer.size, traced_name(buffer.instruction), buffer.shape)
        for buffer in peak
        if buffer.size
    )
    step = -(-len(sizes) // _MOST_POINTS)
    return LiveMemory(
        [max(sizes[at : at + step]) for at in range(0, len(sizes), step)],
        [at // step for at in (*backward[:1], *backward[-1:])],
        [
            TemporaryTensor(-size, shape, count, name)
            for (size, name, shape), count in sorted(counts.items())[:_LARGEST]
        ],
    )


def _run(
    name: str, bodies: Mapping[str, Sequence[Instruction]], live: set[_Buffer]
) -> Iterator[Instruction]:
    """Yield the instructions of a computation and of those that it runs, in their order.

    While an instruction is yielded, `live` has the buffers in use.
    """
    body = bodies[name]
    # The result of an asynchronous instruction has the type that its `-done` returns.
    types = {i.operands[0]: i.type for i in body if i.opcode.endswith("-done") and i.operands}
    elements: dict[str, _Elements] = {}
    used: list[set[_Buffer]] = []
    for instruction in body:
        operands = [elements.get(operand, [set()]) for operand in instruction.operands]
        result = _result(instruction, types.get(instruction.name, instruction.type), operands)
        elements[instruction.name] = result
        used.append(set().union(*result, *itertools.chain.from_iterable(operands)))
    last = {buffer: at for at, buffers in enumerate(used) for buffer in buffers}
    # The caller counts results: the state of a loop, or outputs in place of the old state.
    results = set().union(*elements[body[-1].name])
    for at, instruction in enumerate(body):
        live |= {buffer for buffer in used[at] - results if buffer.instruction is instruction}
        yield instruction
        for callee in instruction.called if instruction.opcode in _RUNS else ():
            yield from _run(callee, bodies, live)
        live -= {buffer for buffer in used[at] if last[buffer] == at}


def _result(instruction: Instruction, hlo_type: str, operands: list[_Elements]) -> _Elements:
    """Return the buffers of a result: new ones, or those of operands."""
    opcode = instruction.opcode
    if opcode in _NO_RESULT:
        return [set()]
    if opcode == "tuple":
        return [set().union(*operand) for operand in operands]
    if opcode == "get-tuple-element":
        index = int(INDEX.findall(instruction.rest)[0])
        return operands[0][index : index + 1] or [set().union(*operands[0])]
    if opcode in _SAME or opcode.endswith(("-done", "-update")):
        return operands[0]
    # Memory other than that of the device has a number: `{1,0:S(1)}`.
    return [
        {_Buffer(0 if "S(" in layout else type_bytes(shape), shape, instruction)}
        for shape, layout in _SHAPE.findall(hlo_type)
    ]


def traced_name(instruction: Instruction) -> str:
    """Return the short traced name of an instruction, or its own name if it has none."""
    traced = _OP_NAME.search(instruction.rest)
    return short_name(traced[1]) if traced else instruction.name


def short_name(op_name: str) -> str:
    """Shorten `jit(train_step)/jvp(lm)/while/body/lm/lm.fprop/add` to `jvp(lm)/lm/add`."""
    return "/".join(
        part
        for part in op_name.split("/")
        if part not in _PLUMBING
        and not part.startswith(("jit(", "shard_map"))
        and not _METHOD.fullmatch(part)
    )
