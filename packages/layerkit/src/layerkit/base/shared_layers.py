"""Registry of the layers that several parents of a model share by `shared_weight_id`."""

from __future__ import annotations

from typing import Any

from layerkit.config import Config, assigned_fields, build, walk_configs
from layerkit.errors import ConfigError


def shared_ids(template: Any) -> list[str]:
    """Return the ids of shared weights of the configs in a template."""
    ids = (assigned_fields(config).get("shared_weight_id") for config in walk_configs(template))
    return [shared_id for shared_id in ids if shared_id is not None]


class SharedLayers:
    """The shared layers of a model, which its root layer holds."""

    def __init__(self) -> None:
        """Create an empty registry."""
        # id → (first user, config, layer). The last two are None for ids inside of a repeated
        # layer.
        self._by_id: dict[str, tuple[str, Any, Any]] = {}

    def keep_inside(self, template: Any, where: str) -> None:
        """Reserve the ids used in `template` for a repeated layer, which has stacked weights.

        Args:
          template: Template of the repeated layer.
          where: Path of the repeated layer.

        Raises:
          ConfigError: An id is also used outside of the repeated layer.
        """
        for shared_id in shared_ids(template):
            first, known, _ = self._by_id.get(shared_id, (where, None, None))
            if first != where or known is not None:
                raise _crossing_error(shared_id, first, where)
            self._by_id[shared_id] = (where, None, None)

    def layer(self, config: Config, where: str) -> Any:
        """Return the layer with the id of `config`, which the first call builds.

        Args:
          config: Config of the layer, with a `shared_weight_id`.
          where: Path of the layer that the caller makes.

        Raises:
          ConfigError: Another config, or the body of a repeated layer, has the same id.
        """
        assert config.shared_weight_id is not None
        first, known, layer = self._by_id.setdefault(
            config.shared_weight_id, (where, config, build(config))
        )
        if known is None:
            raise _crossing_error(config.shared_weight_id, first, where)
        if known != config:
            raise ConfigError(
                owner=where,
                field="shared_weight_id",
                value=config.shared_weight_id,
                expected=f"the config that {first} has with the same id",
                hint=f"The configs differ:\n{config}\n{known}",
            )
        return layer


def _crossing_error(shared_id: str, first: str, second: str) -> ConfigError:
    return ConfigError(
        "weights cannot be shared into or out of a repeated layer",
        owner=second,
        field="shared_weight_id",
        value=shared_id,
        expected=f"an id that {first} does not use",
    )
