"""MultiInput: batches that hold one batch of each of several inputs, as in Praxis.

Sharding needs one leading dimension for all arrays of a batch. For inputs with batches of 4 and 6
rows, the outer batch size is their greatest common divisor, 2, and the arrays are `[2, 2, ...]` and
`[2, 3, ...]`. The model merges the two leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_choice, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.errors import check_same_data
from layerkit_inputs.mixing.components import build_components
from layerkit_inputs.mixing.composite_input import CompositeInput


class MultiInput(CompositeInput):
    """An input that merges batches of named inputs: `web.ids` is the field `ids` of input `web`.

    The batch size of an inner input is its `batch_size`, or follows from the ratio of its
    `percore_batch_size` to the outer one (a ratio of 2 makes two rows per outer row), or is the
    outer batch size. An unset outer `batch_size` is the greatest common divisor of the inner ones.

    The epochs of all inputs must end together; an evaluation that lost the rest of a longer input
    would be wrong.
    """

    input_to_params: Mapping[str, Config[BaseInput]] | None = sub_config_field(None)
    """Configs of the inputs by their name in a batch. They are built with the host and the kind of
    pass of this input."""
    default_input: str | None = None
    """Input that `ids_to_strings` uses unless its key names one."""

    def __post_init__(self) -> None:
        """Check the fields and build the inner inputs."""
        configs = self.input_to_params or {}
        if self.default_input is not None:
            check_choice(self._label, list(configs), default_input=self.default_input)
        rows = {name: self._rows_of(name, config) for name, config in configs.items()}
        known_sizes = [size for size in rows.values() if size is not None]
        if self.batch_size is None and len(known_sizes) == len(rows):
            self.batch_size = math.gcd(*known_sizes) or None
        super().__post_init__()
        sizes = {name: size or self.local_batch_size for name, size in rows.items()}
        for name, size in sizes.items():
            field = f"input_to_params[{name!r}].batch_size"
            expected = f"a multiple of batch_size={self.batch_size}"
            require(size % self.local_batch_size == 0, self._label, field, size, expected)
        self._components = build_components(
            self,
            {name: config.clone(percore_batch_size=None) for name, config in configs.items()},
            field="input_to_params",
            batch_sizes=sizes,
            one_vocabulary=False,
        )

    def _rows_of(self, name: str, config: Config) -> int | None:
        """Return the batch size of an input on this host, or None if its config has none."""
        inner, outer = config.percore_batch_size, self.percore_batch_size
        if config.batch_size is not None or inner is None:
            return config.batch_size
        rows = self.batch_size * inner / outer if self.batch_size and outer else 0.0
        field = f"input_to_params[{name!r}].percore_batch_size"
        expected = f"a multiple of percore_batch_size={outer} of the outer input"
        is_multiple = rows > 0 and abs(rows - round(rows)) <= 1e-6
        require(is_multiple, self._label, field, inner, expected)
        return round(rows)

    def _next(self) -> NestedMap:
        batches = {}
        ended = []
        for name, component in self._components.items():
            try:
                batches[name] = component.get_next()
            except StopIteration:
                ended.append(name)
        expected = f"epochs of one length, but {list(batches)} did not end"
        require(not ended or not batches, self._label, "inputs that ended", ended, expected)
        if ended:
            raise StopIteration
        return NestedMap({name: batch.transform(self._split) for name, batch in batches.items()})

    def _split(self, array: Any) -> np.ndarray:
        """Reshape `[rows, ...]` to `[batch, rows / batch, ...]`."""
        array = np.asarray(array)
        return array.reshape(self.local_batch_size, -1, *array.shape[1:])

    def _reader_state(self) -> dict[str, Any]:
        states = {name: component.get_state() for name, component in self._components.items()}
        return {"components": states}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        states: dict[str, Any] = position["components"]
        then, now = sorted(states), sorted(self._components)
        check_same_data(self._label, {"components": then}, {"components": now})
        for name, component in self._components.items():
            component.set_state(states[name])

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Return the text of token ids by one of the inputs.

        Args:
          ids: Token ids, int `[batch, length]`, or `[batch, rows, length]` as in a batch.
          lengths: Number of tokens, int `[batch]` or `[batch, rows]`.
          key: Name of an input, or of an input and its vocabulary, such as `web.src`. None: the
            input `default_input`.

        Raises:
          ConfigError: The key names no input and `default_input` is not set.
        """
        name, inner = self._component_of(key)
        ids = np.asarray(ids)
        flat = ids.reshape(-1, ids.shape[-1])
        return self._components[name].ids_to_strings(flat, np.ravel(lengths), inner)

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return the tokenizer of the input that `key` names, or None if it names no input."""
        try:
            name, inner = self._component_of(key)
        except ValueError:
            return None
        return self._components[name].text_tokenizer(inner)

    def _component_of(self, key: str | None) -> tuple[str, str | None]:
        """Return the name of the input in a key of `ids_to_strings`, and the key inside it."""
        name, _, inner = (key or self.default_input or "").partition(".")
        if name not in self._components and self.default_input is not None:
            name, inner = self.default_input, key or ""
        check_choice(self._label, list(self._components), key=name)
        return name, inner or None
