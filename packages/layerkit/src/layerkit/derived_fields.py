"""Fields of a template that its owner decides, such as the sizes that a stack hands on."""

from __future__ import annotations

import functools
from typing import Any

from layerkit.config import Config, assigned_fields, target_of


def derive_fields(template: Config, where: str, **derived: Any) -> Config:
    """A copy of `template` with fields that its owner decides; None decides nothing.

    Raises:
      ValueError: the template sets one of them to something else, be it to the field's default;
        names both places.
    """
    config = template.clone()
    set_by_nobody = _set_by_nobody(target_of(config))
    for name, value in derived.items():
        if value is None:
            continue
        explicit = assigned_fields(config).get(name)
        is_set = explicit is not None and explicit != set_by_nobody.get(name)
        if is_set and explicit != value:
            raise ValueError(
                f"{where}: {name}={explicit!r} is set in its config, but its owner derives"
                f" {name}={value!r}; leave the field out or make them agree"
            )
        setattr(config, name, value)
    return config


# Every trace asks for every layer, and the answer takes as long as making a config.
@functools.cache
def _set_by_nobody(target: Any) -> dict[str, Any]:
    """The default templates and containers that every config of a target carries."""
    return assigned_fields(Config(target))
