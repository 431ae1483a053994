"""The largest results of a compiled step, and the source lines that they come from.

A compiler reports one number for all temporaries. The text of the program has the shape of each
result, the path of names under which it was traced, and its line of Python. Results of one line are
reported together. They are not all in memory at the same time.
"""

from __future__ import annotations

import dataclasses
import re

from layerkit_runner.tools.plan.collectives import type_bytes
from layerkit_runner.tools.plan.hlo import Instruction, instructions

# Instructions that allocate no memory, or only once.
_NO_MEMORY = re.compile(
    "parameter|get-tuple-element|tuple|bitcast|constant|iota|broadcast|while|conditional|call"
    "|after-all|partition-id|opt-barrier|optimization-barrier|.*-start|.*-update"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_SHAPE = re.compile(r"([a-z]+\d*\w*\[[\d,]*\])(\{[^}]*\})?")
# Memory space of a layout. That of the device is 0 and is not written.
_SPACE = re.compile(r"S\((\d+)\)")
_HOST_SPACE = "5"

_TABLE_LINE = re.compile(r'(\d+) (?:"(?P<text>.*)"|\{(?P<fields>[^}]*)\})')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_PACKAGE_ROOTS = ("/site-packages/", "/dist-packages/", "/src/")
# Parts of a traced name that come from JAX's transformations.
_PLUMBING = ("while", "body", "cond", "closed_call", "checkpoint", "custom_vjp_call", "pjit")
# A method of a layer, which follows the layer's name: `softmax/softmax.logits`.
_METHOD = re.compile(r"\w+\.[a-z_]\w*")


@dataclasses.dataclass(frozen=True)
class TemporaryTensor:
    """A result that a device holds while a step runs.

    Attributes:
      shape: Dtype and shape on one device, such as `bf16[6,2048,1536]`.
      count: Instructions with such a result from the same line under the same name; those of a
        loop's body count once.
      name: Path of names under which it was traced, such as `jvp(lm)/stack/feed_forward/up`.
      source: File and line of Python, such as `layerkit/layers/linears.py:88`.
      memory: `device`, or `host` for an offloaded result.
    """

    bytes_per_device: int
    shape: str
    count: int
    name: str
    source: str
    memory: str = "device"


def largest_temporaries(hlo_text: str, *, most: int) -> list[TemporaryTensor]:
    """Return the largest results of a compiled program, largest first.

    Args:
      hlo_text: Result of `compiled.as_text()`.
      most: Maximum number of results.
    """
    sources = _Sources(hlo_text)
    found: dict[tuple[str, str, str, str], TemporaryTensor] = {}
    for instruction in instructions(hlo_text):
        for shape, memory, size in _results(instruction):
            traced = _OP_NAME.search(instruction.rest)
            name = _short_name(traced[1]) if traced else instruction.name
            source = sources.of(instruction.rest)
            key = (shape, memory, name, source)
            count = found[key].count + 1 if key in found else 1
            found[key] = TemporaryTensor(size, shape, count, name, source, memory)
    order = sorted(found.values(), key=lambda each: (-each.bytes_per_device, each.name))
    return order[:most]


def _results(instruction: Instruction) -> list[tuple[str, str, int]]:
    """Return shape, memory and bytes of each array that an instruction leaves in memory."""
    if instruction.is_fused or _NO_MEMORY.fullmatch(instruction.opcode):
        return []
    if instruction.rest.startswith(")"):  # no operands: zeros that a loop overwrites
        return []
    found = []
    for shape, layout in _SHAPE.findall(instruction.type):
        space = _SPACE.search(layout)
        if space is None or space[1] == _HOST_SPACE:
            found.append((shape, "device" if space is None else "host", type_bytes(shape)))
    return found


def _short_name(op_name: str) -> str:
    """Shorten `jit(train_step)/jvp(lm)/while/body/lm/lm.fprop/add` to `jvp(lm)/lm/add`."""
    return "/".join(
        part
        for part in op_name.split("/")
        if part not in _PLUMBING
        and not part.startswith(("jit(", "shard_map"))
        and not _METHOD.fullmatch(part)
    )


class _Sources:
    """The source lines of instructions, from the tables at the head of a program's text."""

    def __init__(self, hlo_text: str) -> None:
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        current: dict[int, str] | None = None
        for line in hlo_text.splitlines():
            if line in self._tables:
                current = self._tables[line]
            elif current is not None and (match := _TABLE_LINE.fullmatch(line.strip())):
                text = match["text"]
                current[int(match[1])] = match["fields"] if text is None else text
            elif line.endswith("{") and "=" not in line.partition("(")[0]:
                break  # the first computation begins

    def of(self, attributes: str) -> str:
        """Return file and line of an instruction; "" if it comes from no line."""
        if written := _SOURCE.search(attributes):
            return f"{_short_path(written[1])}:{written[2]}"
        if not (frame := _FRAME.search(attributes)):
            return ""
        location = self._fields("StackFrames", int(frame[1])).get("file_location_id", 0)
        fields = self._fields("FileLocations", location)
        file = self._tables["FileNames"].get(fields.get("file_name_id", 0))
        return "" if file is None else f"{_short_path(file)}:{fields['line']}"

    def _fields(self, table: str, key: int) -> dict[str, int]:
        pairs = (part.split("=") for part in self._tables[table].get(key, "").split())
        return {name: int(value) for name, value in pairs}


def _short_path(path: str) -> str:
    """Return a path relative to the folder of its package."""
    for root in _PACKAGE_ROOTS:
        if root in path:
            return path.rpartition(root)[2]
    return "/".join(path.split("/")[-2:])
