"""Tables of the implementations of an operation, and the choice of a row with its reason.

An operation, such as attention or the grouped product of experts, has one table. `auto` selects the
first row that supports the call and whose library is installed, so the order of the rows is the
order of preference. A row that is selected by name raises if it does not support the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

Call = TypeVar("Call")
# Requirements of a call, noun phrases, and whether the call fails each.
Requirements = Mapping[str, bool]

# JAX's names of the platforms of live and of planned devices with NVIDIA's kernels.
GPU_PLATFORMS = ("gpu", "cuda")
_DEVICES = {"gpu": "a GPU", "tpu": "a TPU"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation(Generic[Call]):
    """A row of the table of an operation.

    Attributes:
      name: Name that selects it. Rows of different platforms may share a name.
      load: Function that returns the implementation. It imports what is not always needed.
      requires: Function that returns the requirements of a call.
      requires_of_auto: Function that returns further requirements without which `auto` skips the
        row.
      platforms: JAX's names of the platforms that run it; () for all.
      find_missing: Function that returns a sentence on a missing library, or "".
    """

    name: str
    load: Callable[..., Any]
    requires: Callable[[Call], Requirements] = lambda call: {}
    requires_of_auto: Callable[[Call], Requirements] = lambda call: {}
    platforms: tuple[str, ...] = ()
    find_missing: Callable[[], str] = lambda: ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A selected row.

    Attributes:
      name: Name of the row.
      reason: Reason of the selection.
      load: Function that returns the implementation.
    """

    name: str
    reason: str
    load: Callable[..., Any] = dataclasses.field(repr=False, compare=False)

    def describe(self, operation: str) -> str:
        """Return one log line: `attention backend: xla (auto: cpu has no fused kernel)`."""
        return f"{operation}: {self.name} ({self.reason})"


def select_auto(table: Sequence[Implementation[Call]], call: Call, *, platform: str) -> Choice:
    """Return the first row of a table that supports a call on a platform.

    The last row supports all calls on all platforms.
    """
    reasons: list[str] = []
    for row in table:
        if row.platforms and platform not in row.platforms:
            continue
        unmet = _unmet({**row.requires(call), **row.requires_of_auto(call)})
        if unmet:
            reasons.append(f"{row.name} requires {'; '.join(unmet)}")
        elif missing := row.find_missing():
            reasons.append(missing)
        else:
            fits = f"{row.name} supports this call on {platform}"
            first = fits if row.platforms else f"{platform} has no fused kernel"
            return Choice(row.name, f"auto: {'; '.join(reasons) or first}", row.load)
    raise AssertionError("the last row of a table supports all calls")


def find_row(
    table: Sequence[Implementation[Call]], name: str, *, platform: str
) -> Implementation[Call]:
    """Return the row with a name, the one for the platform if several rows share the name."""
    rows = [row for row in table if row.name == name]
    return next((row for row in rows if platform in row.platforms), rows[0])


def unmet_requirements(
    table: Sequence[Implementation[Call]], name: str, call: Call, *, platform: str
) -> list[str]:
    """Return what the row with a name requires of a call that does not have it, noun phrases."""
    row = find_row(table, name, platform=platform)
    if row.platforms and platform not in row.platforms:
        known = {p for other in table if other.name == name for p in other.platforms}
        devices = " or ".join(text for p, text in _DEVICES.items() if p in known)
        return [f"{devices} instead of {platform}"]
    return _unmet(row.requires(call))


def _unmet(requirements: Requirements) -> list[str]:
    return [requirement for requirement, is_unmet in requirements.items() if is_unmet]
