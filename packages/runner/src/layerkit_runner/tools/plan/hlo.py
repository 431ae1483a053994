"""The instructions of a compiled program and how often each runs, read from its HLO text.

HLO holds the body of a loop once. The number of runs is an attribute of the `while` that calls it,
or follows from its condition, which compares a counter with a constant. A computation runs as often
as its callers call it; the entry runs once.
"""

from __future__ import annotations

import collections
import dataclasses
import graphlib
import re
from collections.abc import Iterator

# `%region_1.2 (arg: f32[4]) -> f32[4] {`, in some versions without the signature.
_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*)?\{$")
# `%x.3 = f32[4]{0} all-reduce(%y), channel_id=1, …`. A tuple type has spaces, but none before a
# name and an opening bracket.
_INSTRUCTION = re.compile(
    r"(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.+?) (?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)"
)
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_LOOP_PARTS = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
INDEX = re.compile(r"\bindex=(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of HLO; `rest` is everything after the opening bracket.

    `executions` is the number of runs each time the program runs. It is not exact inside a branch,
    which counts as if always taken, and inside a loop that may end early or whose counter is
    unknown: such a loop counts its limit if that is a constant, otherwise once.
    """

    name: str
    type: str
    opcode: str
    rest: str
    executions: int = 1
    is_exact: bool = True
    computation: str = ""

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return _OPERAND.findall(self.rest.partition(")")[0])

    @property
    def called(self) -> list[str]:
        """Names of the computations that it calls."""
        branches = [name for match in _BRANCHES.finditer(self.rest) for name in match[1].split(",")]
        return [*_CALLED.findall(self.rest), *(name.strip().removeprefix("%") for name in branches)]


_Body = list[Instruction]
_Named = dict[str, Instruction]
# Number of runs, and whether it is exact.
_Count = tuple[int, bool]


def instructions(hlo_text: str) -> Iterator[Instruction]:
    """Yield all instructions that run of `compiled.as_text()`."""
    computations, entry = _computations(hlo_text)
    named = {
        instruction.name: instruction for body in computations.values() for instruction in body
    }
    calls = {
        name: [call for caller in body for call in _calls(caller, computations, named)]
        for name, body in computations.items()
    }
    callers: dict[str, set[str]] = collections.defaultdict(set)
    for caller, called in calls.items():
        for callee, _ in called:
            callers[callee].add(caller)
    counts: dict[str, _Count] = {entry: (1, True)}
    # HLO has no recursion, so callers come before their callees.
    for caller in graphlib.TopologicalSorter(callers).static_order():
        if caller not in counts:
            continue
        times, is_exact = counts[caller]
        for callee, (rounds, is_known) in calls.get(caller, ()):
            before, was_exact = counts.get(callee, (0, True))
            counts[callee] = (before + times * rounds, was_exact and is_exact and is_known)
    for name, body in computations.items():
        if name in counts:
            times, is_exact = counts[name]
            for instruction in body:
                yield dataclasses.replace(
                    instruction, executions=times, is_exact=is_exact, computation=name
                )


def _computations(hlo_text: str) -> tuple[dict[str, _Body], str]:
    computations: dict[str, _Body] = {}
    entry = ""
    body: _Body = []
    for line in map(str.strip, hlo_text.splitlines()):
        if header := _HEADER.fullmatch(line):
            body = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif match := _INSTRUCTION.fullmatch(line):
            body.append(Instruction(match["name"], match["type"], match["opcode"], match["rest"]))
    return computations, entry


def _calls(
    instruction: Instruction, computations: dict[str, _Body], named: _Named
) -> Iterator[tuple[str, _Count]]:
    """Yield the computations that an instruction calls, with the number of calls per run."""
    opcode, rest = instruction.opcode, instruction.rest
    if opcode.endswith(("-done", "-update")):
        return  # the start has called it already
    count = (1, opcode != "conditional")
    if opcode == "while":
        known = _TRIP_COUNT.search(rest)
        count = (int(known[1]), True) if known else _rounds(instruction, computations, named)
    for name in instruction.called:
        yield name, count


def _rounds(loop: Instruction, computations: dict[str, _Body], named: _Named) -> _Count:
    """Count the rounds of a loop that counts up to a constant; see `Instruction`."""
    parts = dict(_LOOP_PARTS.findall(loop.rest))
    condition, body = (computations.get(parts.get(p, ""), []) for p in ("condition", "body"))
    for compare in condition:
        if compare.opcode != "compare" or "direction=LT" not in compare.rest:
            continue
        counter, limit = (named.get(name) for name in compare.operands[:2])
        index = INDEX.search(counter.rest) if counter is not None else None
        most = _constant(limit)
        if index is None or most is None:
            continue
        # The state of the loop is a tuple, of which this element is the counter.
        start = _constant(_element(named.get(loop.operands[0]), int(index[1]), named))
        added = _element(body[-1] if body else None, int(index[1]), named)
        terms = added.operands if added is not None and added.opcode == "add" else []
        step = next((number for name in terms if (number := _constant(named.get(name)))), None)
        is_exact = compare is condition[-1] and step is not None and start is not None
        return max(0, -(-(most - (start or 0)) // (step or 1))), is_exact
    return 1, False


def _element(state: Instruction | None, index: int, named: _Named) -> Instruction | None:
    """Return the instruction that computes an element of a tuple, without copies of it."""
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return None
    value = named.get(state.operands[index])
    while value is not None and value.opcode.startswith("copy") and value.operands:
        value = named.get(value.operands[0])
    return value


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    number = instruction.rest.partition(")")[0]
    return int(number) if number.isdecimal() else None
