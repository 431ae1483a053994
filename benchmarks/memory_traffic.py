"""Bytes that the instructions of a compiled step read and write in the memory of a device.

An instruction reads its operands and writes its results once; fused instructions are one. Of an
array that is sliced, gathered from or updated in place, only these parts count. Caches, and tiles
that a kernel reads more than once, are unknown.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence

from layerkit_runner.tools.plan.collectives import type_bytes
from layerkit_runner.tools.plan.hlo import Instruction, instructions
from layerkit_runner.tools.plan.live_memory import traced_name

_FUSIONS = ("fusion", "fusion-start")  # the compiler of JAX 0.12 starts copies asynchronously
_RUNS = ("while", "call", "conditional", "async-start")
_NO_ACCESS = (*_RUNS, "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
# Memory without contents, for results that are written part by part.
_ALLOCATION = 'custom_call_target="AllocateBuffer"'
_READS_PART = ("dynamic-slice", "slice", "gather")
# Instructions that compute nothing: they move, fill or cast arrays.
_MOVES = (
    *("copy", "transpose", "reshape", "broadcast", "iota", "convert", "slice", "dynamic-slice"),
    *("dynamic-update-slice", "concatenate", "pad", "reverse", *_NO_ACCESS),
)
_SCALAR = re.compile(r"\w+\[\]")


@dataclasses.dataclass(frozen=True)
class MemoryAccess:
    """Bytes that one instruction reads and writes in all its executions in a step.

    `is_copy` is True if it moves, fills or casts arrays and computes nothing.
    """

    bytes: int
    is_copy: bool
    executions: int
    type: str
    name: str


def memory_traffic(hlo_text: str) -> list[MemoryAccess]:
    """Return the accesses of a compiled program, from `compiled.as_text()`, most bytes first."""
    named: dict[str, Instruction] = {}
    bodies: dict[str, list[Instruction]] = collections.defaultdict(list)
    fused: set[str] = set()
    for one in instructions(hlo_text):
        named[one.name] = one
        bodies[one.computation].append(one)
        fused.update(() if one.opcode in _RUNS else one.called)
    accesses = []
    for one in named.values():
        is_part = one.computation in fused or one.opcode in _NO_ACCESS
        if is_part or one.opcode.endswith("-done") or _ALLOCATION in one.rest:
            continue
        operands = [named[name] for name in dict.fromkeys(one.operands)]
        parts = [dataclasses.replace(operand, opcode="parameter") for operand in operands]
        parts = bodies[one.called[0]] if one.opcode in _FUSIONS else [*parts, one]
        # The type of another start has its operands and its results.
        is_start = one.opcode.endswith("-start") and one.opcode not in _FUSIONS
        size = type_bytes(one.type) if is_start else _fused_bytes(parts)
        size, is_copy = size * one.executions, all(map(_moves, parts))
        accesses.append(MemoryAccess(size, is_copy, one.executions, one.type, traced_name(one)))
    return sorted(accesses, key=lambda access: -access.bytes)


def _moves(instruction: Instruction) -> bool:
    """Return whether an instruction computes nothing but positions in an array."""
    is_scalar = _SCALAR.fullmatch(instruction.type) and instruction.opcode != "reduce"
    return bool(is_scalar) or instruction.opcode in _MOVES


def _fused_bytes(body: Sequence[Instruction]) -> int:
    """Return the bytes of the parameters and of the results, the last instruction."""
    named = {instruction.name: instruction for instruction in body}

    def source(name: str) -> str:
        """Return the instruction that a chain of bitcasts begins with."""
        while named[name].opcode == "bitcast":
            name = named[name].operands[0]
        return name

    total = 0
    reads: dict[str, list[tuple[int, bool]]] = collections.defaultdict(list)
    for user in body:
        # An operand that is updated in place is not read.
        operands = user.operands[user.opcode == "dynamic-update-slice" :]
        for operand in () if user.opcode in ("parameter", "constant", "bitcast") else operands:
            reads[source(operand)].append((type_bytes(user.type), user.opcode in _READS_PART))
    for parameter in (part for part in body if part.opcode == "parameter"):
        size, users = type_bytes(parameter.type), reads[parameter.name]
        total += min(size, sum(part if is_part else size for part, is_part in users))
    for name in body[-1].operands if body[-1].opcode == "tuple" else [body[-1].name]:
        result = named[source(name)]
        if result.opcode == "dynamic-update-slice":
            result = named[result.operands[1]]
        total += type_bytes(result.type)
    return total
