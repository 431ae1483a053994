"""How often each instruction of a compiled program runs, read from its HLO text.

HLO holds the body of a loop once; how often it runs stands at the `while` that calls it, where XLA
knows. So the text is cut into computations, and counts are handed down from each caller to what it
calls, the entry running once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

# `%region_1.2 (arg: f32[4]) -> f32[4] {`, in some versions without the signature.
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{$")
# `%x.3 = f32[4]{0} all-reduce(%y), channel_id=1, …`. A tuple type has spaces, but none that stands
# before a name and an opening bracket.
_INSTRUCTION = re.compile(
    r"(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.+?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)"
)
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
      name: Without the `%`.
      type: Shape of the result, such as `f32[4,8]{1,0}`, or a tuple of them in brackets.
      opcode: Such as `all-reduce`.
      rest: Everything after the opening bracket: operands and attributes.
      executions: How often it runs each time the program does.
      is_exact: False inside a loop of unknown length, whose body counts once, and inside a branch
        of a conditional, which counts as if it were always taken.
    """

    name: str
    type: str
    opcode: str
    rest: str
    executions: int = 1
    is_exact: bool = True


@dataclasses.dataclass(frozen=True)
class _Count:
    times: int
    is_exact: bool

    def __add__(self, other: _Count) -> _Count:
        return _Count(self.times + other.times, self.is_exact and other.is_exact)

    def __mul__(self, other: _Count) -> _Count:
        return _Count(self.times * other.times, self.is_exact and other.is_exact)


def instructions(hlo_text: str) -> Iterator[Instruction]:
    """All instructions of a compiled program that run, with how often.

    Args:
      hlo_text: What `compiled.as_text()` returns.
    """
    computations, entry = _computations(hlo_text)
    counts = _counts(computations, entry)
    for name, body in computations.items():
        count = counts.get(name)
        if count is None:
            continue
        for instruction in body:
            yield dataclasses.replace(instruction, executions=count.times, is_exact=count.is_exact)


def _computations(hlo_text: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    body: list[Instruction] = []
    for line in hlo_text.splitlines():
        line = line.strip()
        if header := _HEADER.fullmatch(line):
            body = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif match := _INSTRUCTION.fullmatch(line):
            body.append(Instruction(match["name"], match["type"], match["opcode"], match["rest"]))
    return computations, entry


def _counts(computations: dict[str, list[Instruction]], entry: str) -> dict[str, _Count]:
    """How often each computation runs; as HLO has no recursion, callers can be taken first."""
    calls = {
        name: [call for instruction in body for call in _calls(instruction)]
        for name, body in computations.items()
    }
    counts = {entry: _Count(1, is_exact=True)}
    for caller in _callers_first(entry, calls):
        for callee, times in calls[caller]:
            ran = counts[caller] * times
            counts[callee] = counts[callee] + ran if callee in counts else ran
    return counts


def _calls(instruction: Instruction) -> Iterator[tuple[str, _Count]]:
    """The computations that an instruction calls, and how often each time."""
    opcode, rest = instruction.opcode, instruction.rest
    if opcode.endswith(("-done", "-update")):
        return  # names again what its start has called
    times = _Count(1, is_exact=opcode != "conditional")
    if opcode == "while":
        known = _TRIP_COUNT.search(rest)
        times = _Count(int(known[1]), is_exact=True) if known else _Count(1, is_exact=False)
    for match in _CALLED.finditer(rest):
        yield match[1], times
    for match in _BRANCHES.finditer(rest):
        for name in match[1].split(","):
            yield name.strip().removeprefix("%"), times


def _callers_first(entry: str, calls: dict[str, list[tuple[str, _Count]]]) -> list[str]:
    """Depth-first postorder, reversed; with a stack of its own, since programs can nest deeply."""
    order: list[str] = []
    seen = {entry}
    stack = [(entry, iter(calls[entry]))]
    while stack:
        name, remaining = stack[-1]
        callee = next((c for c, _ in remaining if c in calls and c not in seen), None)
        if callee is None:
            order.append(name)
            stack.pop()
        else:
            seen.add(callee)
            stack.append((callee, iter(calls[callee])))
    return order[::-1]
