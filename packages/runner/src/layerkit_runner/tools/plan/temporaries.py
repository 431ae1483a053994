"""The largest results that a compiled step computes, and the source lines that they come from.

A compiler reports one number for all of its temporaries. Which tensors they are can be read from
the program: each instruction has the shape of its result, the path of names under which it was
traced, and the lines of Python that called for it. Results of one line are told together; not all
of them are in memory at the same time, which the schedule decides.
"""

from __future__ import annotations

import dataclasses
import re

from layerkit_runner.tools.plan.collectives import type_bytes
from layerkit_runner.tools.plan.executions import Instruction, instructions

# Results that are not new memory: names of other results, or set up once.
_NO_MEMORY = (
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "iota",
    "broadcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "partition-id",
    "opt-barrier",
    "optimization-barrier",
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_SHAPE = re.compile(r"([a-z]+\d*\w*\[[\d,]*\])(\{[^}]*\})?")
# Memory spaces as TPUs number them in layouts: the device's is 0 and not written.
_SPACE = re.compile(r"S\((\d+)\)")
_HOST_SPACE = "5"

_TABLE_LINE = re.compile(r'(\d+) (?:"(?P<text>.*)"|\{(?P<fields>[^}]*)\})')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_PACKAGE_ROOTS = ("/site-packages/", "/dist-packages/", "/src/")


@dataclasses.dataclass(frozen=True)
class TemporaryTensor:
    """A result that a device holds while a step runs.

    Attributes:
      bytes_per_device: Of one of them.
      shape: Dtype and shape on one device, such as `bf16[6,2048,1536]`.
      count: Instructions that have such a result, from the same line under the same name; those
        of a loop's body once.
      name: Path of names under which it was traced, such as `jvp(lm)/stack/feed_forward/up`.
      source: File and line that called for it, such as `layerkit/layers/linears.py:88`.
      memory: `device`, or `host` where it is offloaded.
    """

    bytes_per_device: int
    shape: str
    count: int
    name: str
    source: str
    memory: str = "device"


def largest_temporaries(hlo_text: str, *, most: int) -> list[TemporaryTensor]:
    """The largest results of a compiled program, largest first.

    Args:
      hlo_text: What `compiled.as_text()` returns.
      most: How many are told.
    """
    sources = _Sources(hlo_text)
    found: dict[tuple[str, str, str, str], TemporaryTensor] = {}
    for instruction in instructions(hlo_text):
        for shape, memory, size in _results(instruction):
            name = _OP_NAME.search(instruction.rest)
            key = (
                shape,
                memory,
                _short_name(name[1]) if name else instruction.name,
                sources.of(instruction.rest),
            )
            count = found[key].count + 1 if key in found else 1
            found[key] = TemporaryTensor(size, shape, count, key[2], key[3], memory)
    order = sorted(found.values(), key=lambda each: (-each.bytes_per_device, each.name))
    return order[:most]


def _results(instruction: Instruction) -> list[tuple[str, str, int]]:
    """Shape, memory and bytes of each array that an instruction leaves in memory."""
    opcode = instruction.opcode
    if instruction.is_fused or opcode in _NO_MEMORY or opcode.endswith(("-start", "-update")):
        return []
    if instruction.rest.startswith(")"):  # of nothing: zeros, to be written over in a loop
        return []
    found = []
    for shape, layout in _SHAPE.findall(instruction.type):
        space = _SPACE.search(layout)
        if space is None or space[1] == _HOST_SPACE:
            found.append((shape, "device" if space is None else "host", type_bytes(shape)))
    return found


# Parts of a traced name that say how JAX got there, not what is computed.
_PLUMBING = ("while", "body", "cond", "closed_call", "checkpoint", "custom_vjp_call", "pjit")


# A method of a layer, which comes after the layer's own name: `softmax/softmax.logits`.
_METHOD = re.compile(r"\w+\.[a-z_]\w*")


def _short_name(op_name: str) -> str:
    """`jit(train_step)/jvp(lm)/while/body/lm/lm.fprop/add` → `jvp(lm)/lm/add`."""
    parts = [part for part in op_name.split("/") if part not in _PLUMBING]
    return "/".join(
        part
        for part in parts
        if not part.startswith(("jit(", "shard_map")) and not _METHOD.fullmatch(part)
    )


class _Sources:
    """Where instructions come from, as a program's text says in tables at its head."""

    def __init__(self, hlo_text: str) -> None:
        tables = _tables(hlo_text)
        self._files = {key: _short_path(text) for key, text in tables["FileNames"].items()}
        self._locations = {key: _fields(text) for key, text in tables["FileLocations"].items()}
        self._frames = {key: _fields(text) for key, text in tables["StackFrames"].items()}

    def of(self, attributes: str) -> str:
        """File and line of an instruction; "" where it came from no line."""
        if written := _SOURCE.search(attributes):
            return f"{_short_path(written[1])}:{written[2]}"
        frame = _FRAME.search(attributes)
        return self._line(int(frame[1])) if frame else ""

    def _line(self, frame: int) -> str:
        location = self._locations.get(self._frames.get(frame, {}).get("file_location_id", 0), {})
        file = self._files.get(location.get("file_name_id", 0))
        return "" if file is None else f"{file}:{location['line']}"


def _tables(hlo_text: str) -> dict[str, dict[int, str]]:
    """The numbered lines under each heading at the head of a program."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] | None = None
    for line in hlo_text.splitlines():
        if line in tables:
            current = tables[line]
        elif current is not None and (match := _TABLE_LINE.fullmatch(line.strip())):
            current[int(match[1])] = match["text"] if match["text"] is not None else match["fields"]
        elif line.endswith("{") and "=" not in line.partition("(")[0]:
            break  # the first computation
    return tables


def _fields(text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split())
    return {name: int(value) for name, value in pairs}


def _short_path(path: str) -> str:
    """A path from the package on, where it lies in one."""
    for root in _PACKAGE_ROOTS:
        if root in path:
            return path.rpartition(root)[2]
    return "/".join(path.split("/")[-2:])
