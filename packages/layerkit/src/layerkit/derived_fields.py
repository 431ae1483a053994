"""Fields of a template that its owner sets, such as the sizes that a stack passes to its layers."""

from __future__ import annotations

import functools
from typing import Any

from layerkit.config import Config, assigned_fields, target_of
from layerkit.errors import ConfigError


def derive_fields(template: Config, where: str, **derived: Any) -> Config:
    """Return a copy of a template with the fields that its owner derives.

    Args:
      template: Config of the layer.
      where: Path of the template, for error messages.
      **derived: Derived values by field; None leaves a field unchanged.

    Raises:
      ConfigError: The template sets a field to another value, even to the field's default.
    """
    config = template.clone()
    defaults = _default_fields(target_of(config))
    for name, value in derived.items():
        if value is None:
            continue
        explicit = assigned_fields(config).get(name)
        is_set = explicit is not None and explicit != defaults.get(name)
        if is_set and explicit != value:
            raise ConfigError(
                owner=where,
                field=name,
                value=explicit,
                expected=f"{value!r}, which the owner derives",
                hint="Leave the field out.",
            )
        setattr(config, name, value)
    return config


# Cached because every trace of every layer needs the result, which takes as long as making a
# config.
@functools.cache
def _default_fields(target: Any) -> dict[str, Any]:
    """Return the default templates and containers that each config of a target has."""
    return assigned_fields(Config(target))
