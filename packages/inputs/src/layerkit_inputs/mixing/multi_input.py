"""MultiInput: several inputs at once, each batch holding one of each, as in Praxis.

Sharding wants one batch size for all arrays of a batch. So where the inputs have batches of 4 and 6
rows, the outer batch is their greatest common divisor, 2, and the arrays are `[2, 2, ...]` and
`[2, 3, ...]`: the model joins the two leading dimensions again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.config import Config, sub_config_field
from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.mixing.components import build_components, checked_configs
from layerkit_inputs.mixing.composite_input import CompositeInput


class MultiInput(CompositeInput):
    """Batches of named inputs in one: field `web.ids` is `ids` of the input `web`.

    Rows of an input's batches follow from its config: `batch_size`, or `percore_batch_size` beside
    one here (twice as much makes two rows for each outer one), else as many as the outer batch. The
    outer `batch_size`, where it is not set, is the greatest common divisor.

    An epoch ends where those of the inputs do, which must be all at once: an evaluation that lost
    the rest of the longer ones would be wrong.
    """

    input_to_params: Mapping[str, Config] | None = sub_config_field(None)
    """Configs of the inputs, by the name that they have in a batch. They are built with the place
    among the hosts and the kind of pass given here."""
    default_input: str | None = None
    """Which input `ids_to_strings` asks, unless its key names one."""

    def __post_init__(self) -> None:
        configs = checked_configs(self.input_to_params, "input_to_params", self._config_error)
        for name in configs:
            if not name.isidentifier():
                raise self._config_error(
                    f"input_to_params: {name!r} cannot name a field of a batch."
                )
        if self.default_input is not None and self.default_input not in configs:
            near = near_names(self.default_input, configs)
            raise self._config_error(f"default_input={self.default_input!r} is no input{near}")
        found = {name: self._rows_of(name, config) for name, config in configs.items()}
        known_sizes = [size for size in found.values() if size is not None]
        if self.batch_size is None and len(known_sizes) == len(found):
            self.batch_size = math.gcd(*known_sizes)
        super().__post_init__()
        sizes = {name: size or self.local_batch_size for name, size in found.items()}
        for name, size in sizes.items():
            if size % self.local_batch_size:
                raise self._config_error(
                    f"input_to_params[{name!r}] has batches of {size} rows, which batch_size="
                    f"{self.batch_size} does not divide."
                )
        self._components = build_components(
            self,
            configs,
            field="input_to_params",
            refuse=self._config_error,
            batch_sizes=sizes,
            one_vocabulary=False,
        )

    def _rows_of(self, name: str, config: Config) -> int | None:
        """Rows of an input's batches on this host, as far as its config says."""
        if config.batch_size is not None:
            return config.batch_size
        if config.percore_batch_size is None:
            return None
        if not self.percore_batch_size or self.batch_size is None:
            raise self._config_error(
                f"input_to_params[{name!r}] sets percore_batch_size={config.percore_batch_size}, "
                "but there is none here; set it in both, or batch_size in the input."
            )
        rows = self.batch_size * config.percore_batch_size / self.percore_batch_size
        if abs(rows - round(rows)) > 1e-6:
            raise self._config_error(
                f"input_to_params[{name!r}] sets percore_batch_size={config.percore_batch_size}, "
                f"which beside {self.percore_batch_size} here makes batches of {rows:g} rows; "
                "expected a multiple."
            )
        return round(rows)

    def _next(self) -> NestedMap:
        batches = {}
        ended = []
        for name, component in self._components.items():
            try:
                batches[name] = component.get_next()
            except StopIteration:
                ended.append(name)
        if ended and batches:
            raise self._config_error(
                f"the epoch of {ended} is over, but {list(batches)} have more batches; evaluate on "
                "each by itself, or set eval_loop_num_batches."
            )
        if ended:
            raise StopIteration
        return NestedMap({name: batch.transform(self._split) for name, batch in batches.items()})

    def _split(self, array: Any) -> np.ndarray:
        """`[rows, ...]` as `[batch, rows / batch, ...]`."""
        array = np.asarray(array)
        return array.reshape(self.local_batch_size, -1, *array.shape[1:])

    def _reader_state(self) -> dict[str, Any]:
        return {"components": self._component_states()}

    def _set_reader_state(self, position: dict[str, Any]) -> None:
        self._set_component_states(position["components"])

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Text of token ids, as one of the inputs has it.

        Args:
          ids: int `[batch, length]`, or as in a batch `[batch, rows, length]`.
          lengths: int `[batch]`, or `[batch, rows]`.
          key: Name of an input, or of one and a vocabulary of its own, such as `web.src`. None:
            `default_input`.

        Raises:
          ValueError: it says no input and there is no default, or none of that name.
        """
        name, inner = self._component_of(key)
        ids = np.asarray(ids)
        flat = ids.reshape(-1, ids.shape[-1])
        return self._components[name].ids_to_strings(flat, np.ravel(lengths), inner)

    def text_tokenizer(self, key: str | None = None) -> Any:
        """Return that of the input which `key` names; None where it names none."""
        try:
            name, inner = self._component_of(key)
        except ValueError:
            return None
        return self._components[name].text_tokenizer(inner)

    def _component_of(self, key: str | None) -> tuple[str, str | None]:
        """Return the input that a key of `ids_to_strings` names, and the key for that input."""
        name, _, inner = (key or self.default_input or "").partition(".")
        if name not in self._components and self.default_input is not None:
            name, inner = self.default_input, key or ""
        if name not in self._components:
            known = near_names(name, self._components)
            raise self._config_error(
                f"ids_to_strings(key={key!r}) says no input{known} Its inputs: "
                f"{', '.join(self._components)}."
            )
        return name, inner or None
