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

Where the g devices lie in s slices (or nodes), as many in each, a part of these bytes crosses the
slower network between them. Least crosses when what is common is done within each slice first, as
libraries do it: a sum leaves a slice once, split over its devices, and not once for each of them.

| kind | of the bytes above, those that leave the slice |
|---|---|
| all-gather | (s − 1)/g of its result |
| all-reduce | 2 (s − 1)/g of its result |
| reduce-scatter | (s − 1) times its result |
| all-to-all | (s − 1)/s of its result |
| collective-permute | all, if any pair of devices lies in two slices |

TPUs themselves split what runs over several slices in this way, and the part that crosses them is a
`send` through the host: it is told as the collective that it stands for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from layerkit_runner.tools.plan.executions import Instruction, instructions
from layerkit_runner.tools.plan.replica_groups import axes_of_groups, axes_of_pairs, parse_groups

# From the size of the result in bytes, the number g of devices and the number s of slices: what
# each device sends, and the part of it that leaves its slice.
_Formula = Callable[[int, int, int], float]
_SENT: dict[str, tuple[_Formula, _Formula]] = {
    "all-gather": (
        lambda size, g, s: size * (g - 1) / g,
        lambda size, g, s: size * (s - 1) / g,
    ),
    "all-reduce": (
        lambda size, g, s: 2 * size * (g - 1) / g,
        lambda size, g, s: 2 * size * (s - 1) / g,
    ),
    "reduce-scatter": (
        lambda size, g, s: size * (g - 1),
        lambda size, g, s: size * (s - 1),
    ),
    "all-to-all": (
        lambda size, g, s: size * (g - 1) / g,
        lambda size, g, s: size * (s - 1) / s,
    ),
    "ragged-all-to-all": (
        lambda size, g, s: size * (g - 1) / g,
        lambda size, g, s: size * (s - 1) / s,
    ),
    "collective-broadcast": (
        lambda size, g, s: size,
        lambda size, g, s: size if s > 1 else 0,
    ),
    "collective-permute": (
        lambda size, g, s: size,
        lambda size, g, s: size if s > 1 else 0,
    ),
}

_GROUPS = re.compile(
    r"replica_groups=("
    r"mesh\[[^\]]*\](?:, device_ids=\(.*?\))? \{[^}]*\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|\{(?:\{[\d,]*\},?)*\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_CHAIN = re.compile(r'channel_id=(\d+),.*\bchain_id="(\d+)"')
_OPERAND = re.compile(r"%([\w.\-]+)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([^\]]*)\]")
_NUMBERS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same mesh axes, in one step.

    Attributes:
      kind: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`, …
      axes: Mesh axes that it runs over, such as `fsdp` or `data+fsdp`; `mixed` for groups that are
        no whole axes.
      executions: How often, iterations of loops counted; arrays that XLA sends together are one.
      bytes_sent: By each device, in all executions together.
      bytes_slow: Those of them that go to another slice or node.
      is_exact: False where a loop of unknown length (counted once) or a conditional (all of its
        branches counted) is among them.
    """

    kind: str
    axes: str
    executions: int
    bytes_sent: int
    is_exact: bool
    bytes_slow: int = 0


def collective_traffic(
    hlo_text: str, mesh_shape: Mapping[str, int], *, slices: Sequence[int] | None = None
) -> list[Traffic]:
    """What a compiled program sends, most bytes first.

    Args:
      hlo_text: What `compiled.as_text()` returns.
      mesh_shape: Sizes of the mesh axes, by name; the program is compiled for the mesh's devices in
        row-major order.
      slices: In which slice or node each of these devices lies; None for all in one.

    Raises:
      ValueError: device groups in a form that is not known.
    """
    found: dict[tuple[str, str], Traffic] = {}
    layout = _Layout(tuple(mesh_shape.items()), None if slices is None else tuple(slices))
    for kind, instruction in _collectives(hlo_text):
        size = type_bytes(instruction.type)
        if instruction.opcode == "send":
            span, sent = layout.across_slices, _sent_between_slices(kind, instruction, layout)
            slow = sent
        else:
            span = _span(instruction.rest, layout)
            if kind == "reduce-scatter" and instruction.opcode.startswith("all-reduce"):
                size //= span.num_devices  # a TPU's fusion, which keeps a part of the sum
            sent, slow = (
                formula(size, span.num_devices, span.num_slices) for formula in _SENT[kind]
            )
        if span.num_devices == 1:
            continue
        before = found.get((kind, span.axes), Traffic(kind, span.axes, 0, 0, is_exact=True))
        found[kind, span.axes] = Traffic(
            kind,
            span.axes,
            before.executions + instruction.executions,
            before.bytes_sent + round(sent * instruction.executions),
            before.is_exact and instruction.is_exact,
            before.bytes_slow + round(slow * instruction.executions),
        )
    return sorted(found.values(), key=lambda traffic: (-traffic.bytes_sent, traffic.kind))


def _collectives(hlo_text: str) -> Iterator[tuple[str, Instruction]]:
    """Collectives by kind; an asynchronous one once, with the type that its `-done` returns.

    What TPUs do in steps beside several products stands in each of them again, as links of a chain.
    """
    started: dict[str, Instruction] = {}
    chains: set[tuple[str, str]] = set()
    for instruction in instructions(hlo_text):
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if kind == "send" and (between := _BETWEEN_SLICES.search(instruction.rest)):
            if instruction.opcode == "send":
                yield between[1].lower().replace("_", "-"), instruction
            continue
        if kind not in _SENT:
            continue
        if chain := _CHAIN.search(instruction.rest):
            if (chain[1], chain[2]) in chains:
                continue
            chains.add((chain[1], chain[2]))
        if kind == "all-reduce" and instruction.computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        if instruction.opcode.endswith("-start"):
            started[instruction.name] = instruction
        elif instruction.opcode.endswith("-done"):
            operand = _OPERAND.search(instruction.rest)
            assert operand is not None, instruction
            yield kind, dataclasses.replace(started[operand[1]], type=instruction.type)
        else:
            yield kind, instruction


class _Layout(NamedTuple):
    """The devices of a program: mesh axes with their sizes, and the slice of each device."""

    axes: tuple[tuple[str, int], ...]
    slices: tuple[int, ...] | None

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    def num_slices(self, groups: Iterable[Iterable[int]]) -> int:
        """In how many slices the devices of one group lie, at most."""
        if self.slices is None:
            return 1
        return max(len({self.slices[device] for device in group}) for group in groups)

    @property
    def across_slices(self) -> _Span:
        """Of what the devices in the same place of all slices do together."""
        slices = np.reshape(self.slices or [0], [size for _, size in self.axes])
        axes = [
            name
            for dimension, (name, _) in enumerate(self.axes)
            if np.any(np.diff(slices, axis=dimension))
        ]
        count = len(np.unique(slices))
        return _Span("+".join(axes), count, count)


class _Span(NamedTuple):
    """Mesh axes of a collective, how many devices are in one of its groups, in how many slices."""

    axes: str
    num_devices: int
    num_slices: int


def _sent_between_slices(kind: str, instruction: Instruction, layout: _Layout) -> float:
    """Bytes of a `send` to other slices, whose operand is the device's part of the collective."""
    array = _ARRAY.search(instruction.type)
    assert array is not None, instruction
    size, count = type_bytes(array[0]), layout.across_slices.num_slices
    if kind == "all-gather":
        return size * (count - 1)
    if kind in ("all-reduce", "all-to-all"):
        return _SENT[kind][0](size, count, count)
    return size * (count - 1) / count if kind == "reduce-scatter" else size


def _span(attributes: str, layout: _Layout) -> _Span:
    if groups := _GROUPS.search(attributes):
        return _span_of_groups(groups[1], layout)
    if pairs := _PAIRS.search(attributes):
        return _span_of_pairs(pairs[1], layout)
    raise ValueError(f"a collective without a known form of device groups: {attributes}")


@functools.lru_cache(maxsize=1024)
def _span_of_groups(text: str, layout: _Layout) -> _Span:
    groups = parse_groups(text, num_devices=layout.num_devices)
    axes = axes_of_groups(groups, dict(layout.axes))
    return _Span(axes, max(len(group) for group in groups), layout.num_slices(groups))


@functools.lru_cache(maxsize=1024)
def _span_of_pairs(text: str, layout: _Layout) -> _Span:
    numbers = [int(number) for number in _NUMBERS.findall(text)]
    moves = [(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True) if a != b]
    if not moves:
        return _Span("", 1, 1)
    return _Span(axes_of_pairs(moves, dict(layout.axes)), 2, layout.num_slices(moves))


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
    return [int(size) for size in _NUMBERS.findall(sizes)]


def _num_bits(dtype: str) -> int:
    """Bits of an element: the first number in a name such as `f8e4m3fn`; a `pred` takes a byte."""
    bits = _NUMBERS.search(dtype)
    return int(bits[0]) if bits else 8
