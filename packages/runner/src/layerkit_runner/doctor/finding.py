"""What a check found, for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
      what: A sentence.
      to_do: What to do about it, a sentence.
      fails: Whether a run would not work; otherwise it is only good to know.
    """

    what: str
    to_do: str
    fails: bool = True


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      lines: For people, without the name of the check.
      values: For programs: numbers, strings, lists and dicts.
      problems: Found by it.
    """

    lines: Sequence[str] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problems: Sequence[Problem] = ()


def to_json(finding: Finding) -> dict[str, Any]:
    """A finding as what `json` can write."""
    return dataclasses.asdict(finding)


def from_json(record: Mapping[str, Any]) -> Finding:
    """The finding that `to_json` was given."""
    problems = [Problem(**problem) for problem in record["problems"]]
    return Finding(record["lines"], record["values"], problems)


def not_looked_at(other: str) -> Finding:
    """A finding of nothing, since the check named `other` went wrong."""
    return Finding([f"not looked at, because of the check of {other}"])


def failed(what: str, to_do: str) -> Finding:
    """A finding of nothing but a failure."""
    return Finding(["does not work, see below"], {}, [Problem(what, to_do)])
