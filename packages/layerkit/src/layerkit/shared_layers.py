"""Layers that several parents of one model share, found by their `shared_weight_id`."""

from __future__ import annotations

from typing import Any, NoReturn

from layerkit.config import Config, assigned_fields, build, walk_configs


class SharedLayers:
    """The shared layers of a whole model, kept by its root."""

    def __init__(self) -> None:
        # id → (where it is used first, config, layer); the last two are None within a loop.
        self._by_id: dict[str, tuple[str, Any, Any]] = {}

    def keep_inside(self, template: Any, where: str) -> None:
        """Reserve the ids used in `template` for a body with stacked weights of its own.

        Raises:
          ValueError: one of them is used outside too, where the weights cannot be the same.
        """
        for config in walk_configs(template):
            shared_id = assigned_fields(config).get("shared_weight_id")
            if shared_id is not None:
                first, known, _ = self._by_id.get(shared_id, (where, None, None))
                if first != where or known is not None:
                    self._refuse_crossing(shared_id, first, where)
                self._by_id[shared_id] = (where, None, None)

    def layer(self, config: Config, where: str) -> Any:
        """Return the layer with the id of `config`, built at the first call.

        Raises:
          ValueError: another config has the same id, or a loop has it.
        """
        assert config.shared_weight_id is not None
        first, known, layer = self._by_id.setdefault(
            config.shared_weight_id, (where, config, build(config))
        )
        if known is None:
            self._refuse_crossing(config.shared_weight_id, first, where)
        if known != config:
            raise ValueError(
                f"{where} and {first} share weights (shared_weight_id="
                f"{config.shared_weight_id!r}) but their configs differ:\n{config}\n{known}"
            )
        return layer

    def _refuse_crossing(self, shared_id: str, first: str, second: str) -> NoReturn:
        raise ValueError(
            f"shared_weight_id={shared_id!r} is used in {first} and in {second}, but weights cannot"
            " be shared into or out of a repeated layer"
        )
