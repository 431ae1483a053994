"""Collectives of a compiled step: kinds, mesh axes, executions and bytes.

Bytes are those that each device sends with the least traffic, as in a ring (Thakur, Rabenseifner
and Gropp, 2005); those that leave a slice are of an algorithm that first does the part within it. A
ragged all-to-all counts the smaller of its two buffers, as with balanced experts. The TPU compiler
splits a collective over slices: the part between them is a `send` through the host.

HLO lists groups of device numbers in row-major order of the mesh, in one of three forms, or as the
pairs of a permutation:

    {{0,2},{1,3}}                                     a list; {} is one group of all devices
    [2,2]<=[2,2]T(1,0)                                a reshaped and transposed range
    mesh['a'=2,'b'=2], device_ids=([4]) {'a'}         a mesh of the compiler, and its axes
    {{0,1},{1,0}}                                     source_target_pairs
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from layerkit_runner.tools.plan.hlo import Instruction, instructions

# Bytes that each device sends, and those that leave its slice, given the size of the result in
# bytes, the number g of devices and the number s of slices.
_Formula = Callable[[int, int, int], float]
_SENT: dict[str, tuple[_Formula, _Formula]] = {
    "all-gather": (lambda size, g, s: size * (g - 1) / g, lambda size, g, s: size * (s - 1) / g),
    "all-reduce": (
        lambda size, g, s: 2 * size * (g - 1) / g,
        lambda size, g, s: 2 * size * (s - 1) / g,
    ),
    "reduce-scatter": (lambda size, g, s: size * (g - 1), lambda size, g, s: size * (s - 1)),
    "all-to-all": (lambda size, g, s: size * (g - 1) / g, lambda size, g, s: size * (s - 1) / s),
    "collective-permute": (lambda size, g, s: size, lambda size, g, s: size if s > 1 else 0),
}
_SENT["ragged-all-to-all"] = _SENT["all-to-all"]
_SENT["collective-broadcast"] = _SENT["collective-permute"]

_GROUPS = re.compile(
    r"replica_groups=(?:"
    r"mesh\[[^\]]*\](?:, device_ids=\(.*?\))? \{[^}]*\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|\{(?:\{[\d,]*\},?)*\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{(?:\{\d+,\d+\},?)+\}")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_CHAIN = re.compile(r'channel_id=(\d+),.*\bchain_id="(\d+)"')
_OPERAND = re.compile(r"%([\w.\-]+)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([^\]]*)\]")
_NUMBERS = re.compile(r"\d+")
_LIST = re.compile(r"\{([\d,\s]*)\}")
_RANGE = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<axes>[^}]*)\}$"
)
_MESH_SIZE = re.compile(r"'?([^'=,]+)'?=(\d+)")
# An axis, or a part of one: `'a':(2)4` is a's second factor when a is seen as [2, 4, rest].
_MESH_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")

Groups = Sequence[Sequence[int]] | np.ndarray

MIXED = "mixed"
"""Label of groups that are not whole mesh axes."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same mesh axes, in one step.

    `executions` counts rounds of loops, and arrays that XLA sends together once. `bytes_sent` are
    those of each device in all executions, of which `bytes_slow` go to another slice or node.
    `is_exact` is as in `Instruction`.
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
    """Return the collectives of a compiled program, most bytes first.

    Args:
      hlo_text: Result of `compiled.as_text()`.
      mesh_shape: Sizes of the mesh axes by name, for devices in row-major order.
      slices: Slice or node of each of these devices; None for a single slice.
    """
    traffic_by_key: dict[tuple[str, str], Traffic] = {}
    layout = _Layout(tuple(mesh_shape.items()), None if slices is None else tuple(slices))
    for kind, instruction in _collectives(hlo_text):
        size = type_bytes(instruction.type)
        if instruction.opcode == "send":
            span = layout.across_slices
            sent = slow = _sent_between_slices(kind, instruction, span.num_slices)
        else:
            devices = _GROUPS.search(instruction.rest) or _PAIRS.search(instruction.rest)
            if devices is None:
                raise ValueError(f"unknown form of device groups: {instruction.rest}")
            span = _span(devices[0], layout)
            if kind == "reduce-scatter" and instruction.opcode.startswith("all-reduce"):
                size //= span.num_devices  # a TPU's fusion, which keeps a part of the sum
            sent, slow = (
                formula(size, span.num_devices, span.num_slices) for formula in _SENT[kind]
            )
        if span.num_devices == 1:
            continue
        before = traffic_by_key.get(
            (kind, span.axes), Traffic(kind, span.axes, 0, 0, is_exact=True)
        )
        traffic_by_key[kind, span.axes] = Traffic(
            kind,
            span.axes,
            before.executions + instruction.executions,
            before.bytes_sent + round(sent * instruction.executions),
            before.is_exact and instruction.is_exact,
            before.bytes_slow + round(slow * instruction.executions),
        )
    return sorted(traffic_by_key.values(), key=lambda traffic: (-traffic.bytes_sent, traffic.kind))


def _collectives(hlo_text: str) -> Iterator[tuple[str, Instruction]]:
    """Yield collectives by kind. An asynchronous one has the type that its `-done` returns."""
    listed = list(instructions(hlo_text))
    types = {instruction.name: instruction.type for instruction in listed}
    started: dict[str, Instruction] = {}
    chains: set[tuple[str, str]] = set()
    for instruction in listed:
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if kind == "send" and (between := _BETWEEN_SLICES.search(instruction.rest)):
            if instruction.opcode == "send":
                yield between[1].lower().replace("_", "-"), instruction
            continue
        if kind not in _SENT:
            continue
        # A TPU program that overlaps one collective with several products repeats it beside each
        # of them, as links of a chain.
        if chain := _CHAIN.search(instruction.rest):
            if (chain[1], chain[2]) in chains:
                continue
            chains.add((chain[1], chain[2]))
        if kind == "all-reduce" and instruction.computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        if instruction.opcode.endswith("-start"):
            started[instruction.name] = instruction
            continue
        start = instruction
        if instruction.opcode.endswith("-done"):
            operand = _OPERAND.search(instruction.rest)
            assert operand is not None, instruction
            start = started[operand[1]]
        moved = instruction.type
        if kind == "ragged-all-to-all":
            moved = min(types[start.operands[0]], moved, key=type_bytes)
        yield kind, dataclasses.replace(start, type=moved)


class _Span(NamedTuple):
    """Mesh axes of a collective; the devices in one of its groups; the slices these lie in."""

    axes: str
    num_devices: int
    num_slices: int


class _Layout(NamedTuple):
    """The devices of a program: mesh axes with their sizes, and the slice of each device."""

    axes: tuple[tuple[str, int], ...]
    slices: tuple[int, ...] | None

    def num_slices(self, groups: Groups) -> int:
        """Return the largest number of slices that the devices of one group lie in."""
        if self.slices is None:
            return 1
        return max(len({self.slices[device] for device in group}) for group in groups)

    @property
    def across_slices(self) -> _Span:
        """The span of a collective of the devices at the same position of all slices."""
        slices = np.reshape(self.slices or [0], [size for _, size in self.axes])
        names = [name for name, _ in self.axes]
        axes = [name for axis, name in enumerate(names) if np.any(np.diff(slices, axis=axis))]
        count = len(np.unique(slices))
        return _Span("+".join(axes), count, count)


def _sent_between_slices(kind: str, instruction: Instruction, num_slices: int) -> float:
    """Return the bytes of a `send`, whose operand is the device's part of the collective."""
    array = _ARRAY.search(instruction.type)
    assert array is not None, instruction
    size = type_bytes(array[0])
    if kind == "all-gather":
        return size * (num_slices - 1)
    if kind in ("all-reduce", "all-to-all"):
        return _SENT[kind][0](size, num_slices, num_slices)
    return size * (num_slices - 1) / num_slices if kind == "reduce-scatter" else size


@functools.lru_cache(maxsize=1024)
def _span(attribute: str, layout: _Layout) -> _Span:
    """Return the span of a collective with `replica_groups=…` or `source_target_pairs=…`."""
    sizes = dict(layout.axes)
    name, _, text = attribute.partition("=")
    if name == "replica_groups":
        groups = parse_groups(text, num_devices=math.prod(sizes.values()))
        axes = axes_of_groups(groups, sizes)
        return _Span(axes, max(map(len, groups)), layout.num_slices(groups))
    numbers = _ints(text)
    moves = [(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True) if a != b]
    if not moves:
        return _Span("", 1, 1)
    return _Span(axes_of_pairs(moves, sizes), 2, layout.num_slices(moves))


def type_bytes(hlo_type: str) -> int:
    """Return the bytes of an HLO type: of one array, or of all arrays of a tuple.

    >>> type_bytes("(f32[4,8]{1,0}, bf16[3]{0})")
    134
    """
    total = 0
    for dtype, sizes in _ARRAY.findall(hlo_type):
        # Bits are the first number in a name such as `f8e4m3fn`; a `pred` takes a byte.
        bits = _NUMBERS.search(dtype)
        total += math.ceil(math.prod(_ints(sizes)) * (int(bits[0]) if bits else 8) / 8)
    return total


def parse_groups(text: str, *, num_devices: int) -> list[list[int]]:
    """Return the groups of device numbers in the text of `replica_groups=`.

    Args:
      text: Text after the `=`, in any of the three forms.
      num_devices: Number of devices of the mesh.

    Raises:
      ValueError: The form is unknown.

    >>> parse_groups("[2,2]<=[2,2]T(1,0)", num_devices=4)
    [[0, 2], [1, 3]]
    """
    if mesh := _MESH.fullmatch(text):
        return _groups_of_mesh(mesh).tolist()
    if sizes := _RANGE.fullmatch(text):
        return _range(text).reshape(_ints(sizes[1])).tolist()
    if not text.startswith("{"):
        raise ValueError(f"unknown form of replica_groups={text}")
    groups = [_ints(match[1]) for match in _LIST.finditer(text)]
    return [group for group in groups if group] or [list(range(num_devices))]


def _range(text: str) -> np.ndarray:
    """Read `[4,2]<=[2,4]T(1,0)`, or `[2,4]T(1,0)`: device numbers in order."""
    match = _RANGE.fullmatch(text)
    if match is None:  # written out
        return np.array(_ints(text))
    shape = _ints(match[2] or match[1])
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose(_ints(match[3])).ravel() if match[3] else numbers.ravel()


def _groups_of_mesh(match: re.Match[str]) -> np.ndarray:
    sizes = {name: int(size) for name, size in _MESH_SIZE.findall(match["sizes"])}
    grouped = [
        (name, int(pre or 1), int(part or sizes[name]))
        for name, pre, part in _MESH_AXIS.findall(match["axes"])
    ]
    # Each axis is split where one of its parts begins or ends, so that a part is a dimension.
    shape: list[int] = []
    dimension: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        parts = [(pre, pre * part) for axis, pre, part in grouped if axis == name]
        for start, stop in itertools.pairwise(sorted({1, size, *itertools.chain(*parts)})):
            dimension[name, start] = len(shape)
            shape.append(stop // start)
    ids = np.arange(math.prod(shape)) if match["ids"] is None else _range(match["ids"])
    chosen = [dimension[name, pre] for name, pre, part in grouped if part > 1]
    grid = np.moveaxis(ids.reshape(shape), chosen, range(-len(chosen), 0))
    return grid.reshape(-1, math.prod(part for _, _, part in grouped))


def axes_of_groups(groups: Groups, mesh_shape: Mapping[str, int]) -> str:
    """Return the mesh axes that groups of devices span: `fsdp`, `data+fsdp`, or `mixed`.

    >>> axes_of_groups([[0, 2], [1, 3]], {"data": 2, "fsdp": 2})
    'data'
    """
    if len({len(group) for group in groups}) != 1:
        return MIXED
    coordinates = _coordinates(groups, mesh_shape)  # [groups, members, axes]
    varying = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
    axes = [axis for axis, varies in zip(mesh_shape, varying, strict=True) if varies]
    # The members differ only in these axes, so with this number they are all combinations.
    is_whole = len(groups[0]) == math.prod(mesh_shape[axis] for axis in axes)
    return "+".join(axes) if is_whole else MIXED


def axes_of_pairs(pairs: Groups, mesh_shape: Mapping[str, int]) -> str:
    """Return the mesh axes along which the (source, target) pairs of a permutation move data."""
    coordinates = _coordinates(pairs, mesh_shape)  # [pairs, 2, axes]
    moved = (coordinates[:, 0] != coordinates[:, 1]).any(axis=0)
    return "+".join(axis for axis, moves in zip(mesh_shape, moved, strict=True) if moves)


def _coordinates(groups: Groups, mesh_shape: Mapping[str, int]) -> np.ndarray:
    return np.stack(np.unravel_index(np.asarray(groups), tuple(mesh_shape.values())), axis=-1)


def _ints(text: str) -> list[int]:
    return [int(number) for number in _NUMBERS.findall(text)]
