"""CompositeInput: what inputs that read other inputs batch by batch share.

Their state holds those of their components, so it fits any number of hosts where all of theirs do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.state import Scope


class CompositeInput(BaseInput):
    """Base of inputs over built components, which a subclass puts into `_components`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._components: dict[str, BaseInput] = {}

    @property
    def state_scope(self) -> Scope:  # type: ignore[override]
        """`global` where that of every component is."""
        scopes = {component.state_scope for component in self._components.values()}
        return "global" if scopes == {"global"} else "host"

    @property
    def token_unit(self) -> str:  # type: ignore[override]
        """That of the components, where they have one in common."""
        units = {component.token_unit for component in self._components.values()}
        return units.pop() if len(units) == 1 else BaseInput.token_unit

    @property
    def num_skipped(self) -> int:
        """Records that components could not read and left out."""
        return sum(component.num_skipped for component in self._components.values())

    def component(self, name: str) -> BaseInput:
        """The built component of this name; whoever reads from it changes what comes next here."""
        return self._components[name]

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return that of the first component; all have one vocabulary."""
        return next(iter(self._components.values())).text_tokenizer(key)

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """As the first component does; all have one vocabulary."""
        return next(iter(self._components.values())).ids_to_strings(ids, lengths, key)

    def _reset(self) -> None:
        for component in self._components.values():
            component.reset()

    def _component_states(self) -> dict[str, Any]:
        return {name: component.get_state() for name, component in self._components.items()}

    def _set_component_states(self, states: dict[str, Any]) -> None:
        if states.keys() != self._components.keys():
            raise self._config_error(
                f"the state is of components {sorted(states)}, here are "
                f"{sorted(self._components)}; restore with the fields it was written with, or "
                "start a new run from the weights alone."
            )
        for name, component in self._components.items():
            component.set_state(states[name])

    def _close(self) -> None:
        for component in self._components.values():
            component.close()
