"""How often each instruction of a compiled program runs, read from its HLO text.

HLO holds the body of a loop once; how often it runs stands at the `while` that calls it, or follows
from its condition, a counter that is compared with a constant. So the text is cut into
computations, and counts are handed down from each caller to what it calls, the entry running once.
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
# Those that run what they call as it stands there; others, such as fusions, make one of it.
_CALLERS = ("while", "conditional", "call", "async")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_LOOP_PARTS = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
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
      computation: Name of the one that it stands in.
      is_fused: Whether it is part of another instruction, such as a fusion, so that its result
        takes no memory of its own.
    """

    name: str
    type: str
    opcode: str
    rest: str
    executions: int = 1
    is_exact: bool = True
    computation: str = ""
    is_fused: bool = False


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
      hlo_text: What `compiled.as_text()` returns; "" for no program.
    """
    computations, entry = _computations(hlo_text)
    if not computations:
        return
    counts = _counts(computations, entry)
    fused = _fused(computations)
    for name, body in computations.items():
        count = counts.get(name)
        if count is None:
            continue
        for instruction in body:
            yield dataclasses.replace(
                instruction,
                executions=count.times,
                is_exact=count.is_exact,
                computation=name,
                is_fused=name in fused,
            )


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
        name: [call for instruction in body for call in _calls(instruction, computations)]
        for name, body in computations.items()
    }
    counts = {entry: _Count(1, is_exact=True)}
    for caller in _callers_first(entry, calls):
        for callee, times in calls[caller]:
            ran = counts[caller] * times
            counts[callee] = counts[callee] + ran if callee in counts else ran
    return counts


def _fused(computations: dict[str, list[Instruction]]) -> set[str]:
    """The computations that are parts of what calls them, and all that these call in turn."""
    found: set[str] = set()
    callees = {
        callee
        for body in computations.values()
        for instruction in body
        if not instruction.opcode.startswith(_CALLERS)
        for callee, _ in _calls(instruction, computations)
    }
    while callees:
        found |= callees
        bodies = (computations.get(name, ()) for name in callees)
        within = (each for body in bodies for each in body)
        inner = {callee for each in within for callee, _ in _calls(each, computations)}
        callees = inner - found
    return found


def _calls(
    instruction: Instruction, computations: dict[str, list[Instruction]]
) -> Iterator[tuple[str, _Count]]:
    """The computations that an instruction calls, and how often each time."""
    opcode, rest = instruction.opcode, instruction.rest
    if opcode.endswith(("-done", "-update")):
        return  # names again what its start has called
    times = _Count(1, is_exact=opcode != "conditional")
    if opcode == "while":
        known = _TRIP_COUNT.search(rest)
        times = _Count(int(known[1]), is_exact=True) if known else _rounds(rest, computations)
    for match in _CALLED.finditer(rest):
        yield match[1], times
    for match in _BRANCHES.finditer(rest):
        for name in match[1].split(","):
            yield name.strip().removeprefix("%"), times


def _rounds(attributes: str, computations: dict[str, list[Instruction]]) -> _Count:
    """Rounds of a loop that counts up from 0 to a constant, as those over layers do; else 1."""
    parts = dict(_LOOP_PARTS.findall(attributes))
    condition, body = (computations.get(parts.get(p, ""), []) for p in ("condition", "body"))
    there = {each.name: each for each in condition}
    for compare in condition:
        if compare.opcode != "compare" or "direction=LT" not in compare.rest:
            continue
        counter, limit = (there.get(name) for name in _operands(compare)[:2])
        index = _INDEX.search(counter.rest) if counter is not None else None
        most = _constant(limit)
        if index is None or most is None:
            continue
        step = _step(body, int(index[1]))
        return _Count(-(-most // (step or 1)), is_exact=step is not None)
    return _Count(1, is_exact=False)


def _step(body: list[Instruction], index: int) -> int | None:
    """By how much a loop's counter, element `index` of its state, grows in a round."""
    there = {each.name: each for each in body}
    state = _operands(body[-1]) if body and body[-1].opcode == "tuple" else []
    counter = there.get(state[index]) if index < len(state) else None
    if counter is None or counter.opcode != "add":
        return None
    steps = (_constant(there.get(name)) for name in _operands(counter))
    return next((step for step in steps if step), None)


def _operands(instruction: Instruction) -> list[str]:
    return _OPERAND.findall(instruction.rest.partition(")")[0])


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    number = instruction.rest.partition(")")[0]
    return int(number) if number.isdecimal() else None


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
