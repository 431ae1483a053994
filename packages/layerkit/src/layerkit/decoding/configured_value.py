"""ConfiguredValue: something configured that is nothing but its fields.

Decoders and logit processors sit in the fields of a model, which JAX's caches take as a key. So two
of them with equal fields are equal and have the same hash.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Configurable


class ConfiguredValue(Configurable):
    """Base of what is configured, has no state, and is compared by its fields."""

    def __post_init__(self) -> None:
        # A config, and the command line, may give lists; a value holds what has a hash.
        for field in dataclasses.fields(self):
            setattr(self, field.name, _as_tuples(getattr(self, field.name)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfiguredValue) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        # All of them, so that a subclass with fields of its own needs to write nothing here.
        fields = dataclasses.fields(self)
        return (type(self), *(getattr(self, field.name) for field in fields))


def _as_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return tuple(_as_tuples(item) for item in value)
    return value
