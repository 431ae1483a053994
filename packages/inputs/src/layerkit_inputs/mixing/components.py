"""Construction and checks of the components of an input that reads other inputs.

Such an input takes configs instead of inputs: the runner sets the host index and the batch size of
the outer input, and the outer input builds each component with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from layerkit.config import Config, assigned_fields
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.evaluation import concatenate_rows
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.base.indexed_input import IndexedInput

_DECIDED_BY_OWNER = (
    "infeed_host_index", "num_infeed_hosts", "is_training", "reset_for_eval", "repeat",
    "eval_loop_num_batches", "percore_batch_size",
)  # fmt: skip


def build_components(
    owner: BaseInput,
    configs: Mapping[str, Config[BaseInput]] | None,
    *,
    field: str,
    batch_sizes: Mapping[str, int],
    one_vocabulary: bool = True,
) -> dict[str, BaseInput]:
    """Build the components of an input.

    Components have the host, kind of pass and evaluation length of the owner. A component without
    a seed gets the owner's seed plus its index, so that components of one length have different
    orders.

    Args:
      owner: Outer input, after its `__post_init__`.
      configs: Config of each component by name.
      field: Field of the owner that holds `configs`, for errors.
      batch_sizes: Rows of each component's batches on this host.
      one_vocabulary: True if a model reads the tokens of all components with one vocabulary, which
        is then checked.

    Raises:
      ConfigError: There are no components, or one sets a field that the owner decides to another
        value.
    """
    require(configs, owner._label, field, configs, "a dict of name -> config of an input")
    built = {}
    for number, (name, config) in enumerate((configs or {}).items()):
        decided = {name: getattr(owner, name) for name in _DECIDED_BY_OWNER}
        decided["batch_size"] = batch_sizes[name]
        assigned = {k: v for k, v in assigned_fields(config).items() if v is not None}
        for key, value in decided.items():
            expected = f"{value!r}, as in the outer input"
            is_same = assigned.get(key, value) == value
            require(is_same, owner._label, f"{field}[{name!r}].{key}", assigned.get(key), expected)
        del decided["percore_batch_size"]
        decided["name"] = assigned.get("name", name)
        seed = (owner.input_random_seed or 0) + number
        decided["input_random_seed"] = assigned.get("input_random_seed", seed)
        built[name] = config.clone(**decided).Instantiate()
    if one_vocabulary:
        _check_vocabularies(owner, built, field)
    return built


def _check_vocabularies(owner: BaseInput, built: Mapping[str, BaseInput], field: str) -> None:
    """Raise `ConfigError` if components have different vocabularies, which no shape would show."""
    units = {name: component.token_unit for name, component in built.items()}
    for attribute, values in (("token_unit", units), ("tokenizer", _fingerprints(built))):
        first = next(iter(values), "")
        for name, value in values.items():
            expected = f"{values[first]!r}, as in {field}[{first!r}]"
            is_same = value == values[first]
            require(is_same, owner._label, f"{field}[{name!r}] {attribute}", value, expected)


def _fingerprints(built: Mapping[str, BaseInput]) -> dict[str, str]:
    """Return the fingerprint of the tokenizer of each component that has one."""
    fingerprints = {}
    for name, component in built.items():
        tokenizer = getattr(component, "tokenizer", None)
        # Records keep the fingerprint of their tokenizer, which need not be on this machine.
        if hasattr(component, "tokenizer_fingerprint"):
            fingerprints[name] = component.tokenizer_fingerprint
        elif tokenizer is not None and hasattr(tokenizer, "fingerprint"):
            fingerprints[name] = tokenizer.fingerprint()
    return fingerprints


def check_reads_rows(owner: BaseInput, field: str, reader: BaseInput) -> None:
    """Raise `ConfigError` if a component cannot read any row by its number."""
    reads_rows = isinstance(reader, IndexedInput)
    reads_rows = reads_rows and type(reader).get_next is BaseInput.get_next
    expected = "an IndexedInput that does not override get_next"
    require(reads_rows, owner._label, field, type(reader).__qualname__, expected)


def num_rows_of(reader: IndexedInput) -> int | None:
    """Return the number of rows of a component, or raise `ConfigError` if it has none."""
    num_rows = reader._num_rows()
    require(num_rows != 0, reader._label, "number of rows", num_rows, "at least one")
    return num_rows


def _row_fields(batch: NestedMap) -> list[str]:
    fields = sorted(spec_of(batch).flatten_items())
    return [f"{path}: {spec.dtype.name}{list(spec.shape[1:])}" for path, spec in fields]


def check_same_rows(owner: BaseInput, batches: Mapping[str, NestedMap], field: str) -> None:
    """Raise `ConfigError` if rows of components differ in fields, dtypes or shapes."""
    specs = {name: _row_fields(batch) for name, batch in batches.items()}
    first = next(iter(specs))
    for name, rows in specs.items():
        expected = f"{specs[first]}, as in {field}[{first!r}]"
        require(rows == specs[first], owner._label, f"rows of {field}[{name!r}]", rows, expected)


def merge_rows(parts: Sequence[NestedMap], turns: np.ndarray) -> NestedMap:
    """Return one batch in new arrays; each row is the next row of the component of its turn.

    Args:
      parts: Rows of the first component, then of the second, and so on.
      turns: Index of the component of each row, int `[rows]`.
    """
    order = np.empty(len(turns), np.int64)
    order[turns.argsort(kind="stable")] = np.arange(len(turns))
    return concatenate_rows(parts).transform(lambda array: array.take(order, axis=0))
