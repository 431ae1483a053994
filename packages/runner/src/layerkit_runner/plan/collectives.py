"""What the devices of a compiled step send to one another: kinds, mesh axes, times and bytes.

Bytes are those that each device SENDS (and receives as many) when a collective over g devices is
done with the least traffic, as a ring does it:

| kind | bytes sent by each device |
|---|---|
| all-gather | (g − 1)/g of its result |
| all-reduce | 2 (g − 1)/g of its result: a reduce-scatter, then an all-gather |
| reduce-scatter | (g − 1) times its result, which is 1/g of what came in |
| all-to-all | (g − 1)/g of its result |
| collective-permute | its result |

(Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005.) Shapes in HLO are those on one device. What hardware can do better, such as reducing inside a
switch, is not known here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

from layerkit_runner.plan.executions import Instruction, instructions
from layerkit_runner.plan.replica_groups import axes_of_groups, axes_of_pairs, parse_groups

# Bytes sent by each device, from the size of the result in bytes and the number g of devices.
_SENT: dict[str, Callable[[int, int], float]] = {
    "all-gather": lambda size, g: size * (g - 1) / g,
    "all-reduce": lambda size, g: 2 * size * (g - 1) / g,
    "reduce-scatter": lambda size, g: size * (g - 1),
    "all-to-all": lambda size, g: size * (g - 1) / g,
    "ragged-all-to-all": lambda size, g: size * (g - 1) / g,
    "collective-broadcast": lambda size, g: size,
    "collective-permute": lambda size, g: size,
}

_GROUPS = re.compile(
    r"replica_groups=("
    r"mesh\[[^\]]*\](?:, device_ids=\(.*?\))? \{[^}]*\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|\{(?:\{[\d,]*\},?)*\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")
_OPERAND = re.compile(r"%([\w.\-]+)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([^\]]*)\]")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same mesh axes, in one step.

    Attributes:
      kind: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`, …
      axes: Mesh axes that it runs over, such as `fsdp` or `data+fsdp`; `mixed` for groups that are
        no whole axes.
      executions: How often, iterations of loops counted; arrays that XLA sends together are one.
      bytes_sent: By each device, in all executions together.
      is_exact: False where a loop of unknown length (counted once) or a conditional (all of its
        branches counted) is among them.
    """

    kind: str
    axes: str
    executions: int
    bytes_sent: int
    is_exact: bool


def collective_traffic(hlo_text: str, mesh_shape: Mapping[str, int]) -> list[Traffic]:
    """What a compiled program sends, most bytes first.

    Args:
      hlo_text: What `compiled.as_text()` returns.
      mesh_shape: Sizes of the mesh axes, by name; the program is compiled for the mesh's devices in
        row-major order.

    Raises:
      ValueError: device groups in a form that is not known.
    """
    found: dict[tuple[str, str], Traffic] = {}
    for kind, instruction in _collectives(hlo_text):
        axes, group_size = _span(instruction.rest, tuple(mesh_shape.items()))
        if group_size == 1:
            continue
        sent = _SENT[kind](type_bytes(instruction.type), group_size) * instruction.executions
        before = found.get((kind, axes), Traffic(kind, axes, 0, 0, is_exact=True))
        found[kind, axes] = Traffic(
            kind,
            axes,
            before.executions + instruction.executions,
            before.bytes_sent + round(sent),
            before.is_exact and instruction.is_exact,
        )
    return sorted(found.values(), key=lambda traffic: (-traffic.bytes_sent, traffic.kind))


def _collectives(hlo_text: str) -> Iterator[tuple[str, Instruction]]:
    """Collectives by kind; an asynchronous one once, with the type that its `-done` returns."""
    started: dict[str, Instruction] = {}
    for instruction in instructions(hlo_text):
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if kind not in _SENT:
            continue
        if instruction.opcode.endswith("-start"):
            started[instruction.name] = instruction
        elif instruction.opcode.endswith("-done"):
            operand = _OPERAND.search(instruction.rest)
            assert operand is not None, instruction
            yield kind, dataclasses.replace(started[operand[1]], type=instruction.type)
        else:
            yield kind, instruction


@functools.lru_cache(maxsize=1024)
def _groups_span(text: str, mesh: tuple[tuple[str, int], ...]) -> tuple[str, int]:
    groups = parse_groups(text, num_devices=math.prod(size for _, size in mesh))
    return axes_of_groups(groups, dict(mesh)), max(len(group) for group in groups)


def _span(attributes: str, mesh: tuple[tuple[str, int], ...]) -> tuple[str, int]:
    """The mesh axes of a collective, and how many devices take part in one of its groups."""
    if groups := _GROUPS.search(attributes):
        return _groups_span(groups[1], mesh)
    if pairs := _PAIRS.search(attributes):
        numbers = [int(number) for number in _BITS.findall(pairs[1])]
        moves = [(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True) if a != b]
        return (axes_of_pairs(moves, dict(mesh)), 2) if moves else ("", 1)
    raise ValueError(f"a collective without a known form of device groups: {attributes}")


def type_bytes(hlo_type: str) -> int:
    """Bytes of an HLO type: of one array, or of all arrays of a tuple.

    >>> type_bytes("(f32[4,8]{1,0}, bf16[3]{0})")
    134
    """
    return sum(
        math.ceil(math.prod(_dimensions(sizes)) * _num_bits(dtype) / 8)
        for dtype, sizes in _ARRAY.findall(hlo_type)
    )


def _dimensions(sizes: str) -> list[int]:
    return [int(size) for size in _BITS.findall(sizes)]


def _num_bits(dtype: str) -> int:
    """Bits of an element: the first number in a name such as `f8e4m3fn`; a `pred` takes a byte."""
    bits = _BITS.search(dtype)
    return int(bits[0]) if bits else 8
