"""ConfiguredValue: configured objects that are compared and hashed by their fields.

Decoders and logit processors are fields of models, and JAX's caches use models as keys. So two
objects with equal fields must be equal and have the same hash.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Configurable


class ConfiguredValue(Configurable):
    """Base class of configured objects without state, which are compared by their fields."""

    def __post_init__(self) -> None:
        """Convert lists, which configs and the command line may give, to tuples, for the hash."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, _as_tuples(getattr(self, field.name)))

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same class and equal fields."""
        return isinstance(other, ConfiguredValue) and self._values() == other._values()

    def __hash__(self) -> int:
        """Return a hash of the class and the fields."""
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        # Includes the fields that subclasses add.
        fields = dataclasses.fields(self)
        return (type(self), *(getattr(self, field.name) for field in fields))


def _as_tuples(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return tuple(_as_tuples(item) for item in value)
    return value
