"""CompositeInput, the base of inputs that read batches of other inputs.

The scope of its state is `global` if all components have this scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from layerkit_inputs.base.base_input import BaseInput, Scope


class CompositeInput(BaseInput):
    """Base of inputs over built components, which a subclass puts into `_components`."""

    def __post_init__(self) -> None:
        """Create an input without components, which the subclass adds."""
        super().__post_init__()
        self._components: dict[str, BaseInput] = {}

    @property
    def state_scope(self) -> Scope:  # type: ignore[override]
        """`global` if every component has this scope, else `host`."""
        scopes = {component.state_scope for component in self._components.values()}
        return "global" if scopes == {"global"} else "host"

    @property
    def token_unit(self) -> str:  # type: ignore[override]
        """Token unit that all components have, or the default if they differ."""
        units = {component.token_unit for component in self._components.values()}
        return units.pop() if len(units) == 1 else BaseInput.token_unit

    @property
    def num_skipped(self) -> int:
        """Records that components skipped because they could not read them."""
        return sum(component.num_skipped for component in self._components.values())

    def describe_data(self) -> list[str]:
        """Return the lines of every component, after its name."""
        return [
            f"{name}: {line}"
            for name, component in self._components.items()
            for line in component.describe_data()
        ]

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return the tokenizer of the first component; all have one vocabulary."""
        return next(iter(self._components.values())).text_tokenizer(key)

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Return the text of token ids by the first component; all have one vocabulary."""
        return next(iter(self._components.values())).ids_to_strings(ids, lengths, key)

    def _reset(self) -> None:
        for component in self._components.values():
            component.reset()

    def _close(self) -> None:
        for component in self._components.values():
            component.close()
