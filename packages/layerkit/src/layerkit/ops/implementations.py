"""Tables of the implementations of an operation, and the choice of a row, which is logged.

An operation, such as attention or the grouped product of experts, has one table. `auto` selects the
first row that supports the call and whose library is installed, so the order of the rows is the
order of preference. A row that is selected by name raises if it does not support the call.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from layerkit.errors import ConfigError

_LOG = logging.getLogger(__name__)

Call = TypeVar("Call")
# A function of a call that returns noun phrases, and whether the call fails each.
Requirements = Callable[[Call], Mapping[str, bool]]

# JAX's names of the platforms of live and of planned devices with NVIDIA's kernels.
GPU_PLATFORMS = ("gpu", "cuda")
# Names of the kind of a Hopper GPU.
HOPPER = re.compile(r"NVIDIA G?H\d+")
_DEVICES = {"gpu": "a GPU", "tpu": "a TPU"}


class UnsupportedBackendError(ConfigError):
    """An implementation, or a kind of context parallelism, that does not support a call.

    `expected` lists every requirement that is not met.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation(Generic[Call]):
    """A row of the table of an operation.

    Attributes:
      name: Name that selects it. Rows of different platforms may share a name.
      function: The implementation, or its dotted name, which is imported at the first use.
      requires: Requirements of a call.
      requires_of_auto: Further requirements, without which `auto` skips the row.
      platforms: JAX's names of the platforms that run it; () for all.
      probe: Dotted name of a function that returns how to install a missing library, or "".
    """

    name: str
    function: Callable[..., Any] | str
    requires: Requirements[Call] = lambda call: {}
    requires_of_auto: Requirements[Call] = lambda call: {}
    platforms: tuple[str, ...] = ()
    probe: str = ""

    def load(self) -> Any:
        """Return the implementation."""
        return _imported(self.function) if isinstance(self.function, str) else self.function

    def missing(self) -> str:
        """Return how to install a missing library, or ""."""
        return _imported(self.probe)() if self.probe else ""


def select(
    table: Sequence[Implementation[Call]],
    name: str,
    call: Call,
    *,
    platform: str,
    operation: str,
    field: str,
    owner: str | None = None,
) -> Implementation[Call]:
    """Return the row with a name, or for `auto` the first one that supports a call; log the reason.

    The last row that `auto` reaches supports all calls.

    Raises:
      UnsupportedBackendError: The named row does not support the call, or is not installed.
    """
    reasons: list[str] = []
    if name == "auto":
        for row in table:
            if row.platforms and platform not in row.platforms:
                continue
            if unmet := _unmet({**row.requires(call), **row.requires_of_auto(call)}):
                reasons.append(f"{row.name} requires {'; '.join(unmet)}")
            elif missing := row.missing():
                reasons.append(missing)
            else:
                break
        fits = f"{row.name} supports this call on {platform}"
        first = fits if row.platforms else f"{platform} has no fused kernel"
        reason = f"auto: {'; '.join(reasons) or first}"
    else:
        row, reason = find_row(table, name, platform=platform), "as requested"
        unmet = unmet_requirements(table, name, call, platform=platform)
        place = {"field": field, "value": name, "owner": owner}
        unmet = unmet or list(filter(None, [row.missing()]))
        check_supported(unmet, operation=operation, alternative=f"{field}='auto'", **place)
    _LOG.info("%s: %s (%s)", operation, row.name, reason)
    return row


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


def check_supported(unmet: list[str], *, operation: str, alternative: str, **place: Any) -> None:
    """Raise `UnsupportedBackendError` if there are unmet requirements; `place` names the field."""
    if unmet:
        hint, expected = f"Use {alternative}.", "; ".join(unmet)
        raise UnsupportedBackendError(
            f"unsupported {operation}", expected=expected, hint=hint, **place
        )


def ampere_or_later(compute_capability: str) -> dict[str, bool]:
    """Return the requirement of cuDNN's attention and of Triton; "" is unknown and meets it."""
    is_older = re.match(r"[1-7]\.", compute_capability) is not None
    return {f"a GPU of compute capability 8.0 or later instead of {compute_capability}": is_older}


def _unmet(requirements: Mapping[str, bool]) -> list[str]:
    return [requirement for requirement, is_unmet in requirements.items() if is_unmet]


def _imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
