"""Construction and checks of the components of an input that reads other inputs.

Such an input takes configs instead of inputs: the runner sets the host index and the batch size of
the outer input, and the outer input builds each component with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.config import Config, assigned_fields, is_config, target_of
from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import BaseInput
from layerkit_inputs.base.batch_specs import spec_of


def build_components(
    owner: BaseInput,
    configs: Mapping[str, Config] | None,
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
      field: Field of the owner that holds `configs`, for errors. Empty if each component is a field
        of the owner.
      batch_sizes: Rows of each component's batches on this host.
      one_vocabulary: True if a model reads the tokens of all components with one vocabulary, which
        is then checked.

    Raises:
      ConfigError: There are no components, one is not the config of an input, or one sets a field
        that the owner decides to another value.
    """
    shared: dict[str, Any] = {
        "infeed_host_index": owner.infeed_host_index,
        "num_infeed_hosts": owner.num_infeed_hosts,
        "is_training": owner.is_training,
        "reset_for_eval": owner.reset_for_eval,
        "repeat": owner.repeat,
        "eval_loop_num_batches": owner.eval_loop_num_batches,
    }
    built = {}
    for number, (name, config) in enumerate(check_configs(owner, configs, field).items()):
        given = {**shared, "batch_size": batch_sizes[name]}
        own = {key: value for key, value in assigned_fields(config).items() if value is not None}
        for key, value in (given | {"percore_batch_size": owner.percore_batch_size}).items():
            if own.get(key, value) != value:
                raise owner._config_error(
                    field=f"{_label(field, name)}.{key}",
                    value=own[key],
                    expected=f"{value!r}, as in the outer input",
                    hint=f"Leave {key} unset in the component.",
                )
        given.setdefault("name", own.get("name", name))
        seed = (owner.input_random_seed or 0) + number
        given["input_random_seed"] = own.get("input_random_seed", seed)
        built[name] = config.clone(**given).Instantiate()
    if one_vocabulary:
        _check_vocabularies(owner, built, field)
    return built


def check_configs(
    owner: BaseInput, configs: Mapping[str, Config | None] | None, field: str
) -> Mapping[str, Config]:
    """Return the configs of components, or raise `ConfigError` unless each describes an input."""
    valid = isinstance(configs, Mapping) and configs
    require(valid, owner._label, field, configs, "a dict of name -> config of an input")
    assert configs is not None
    checked: dict[str, Config] = {}
    for name, config in configs.items():
        target = target_of(config) if config is not None and is_config(config) else None
        if config is None or not isinstance(target, type) or not issubclass(target, BaseInput):
            raise owner._config_error(
                field=_label(field, name),
                value=config,
                expected="the config of an input, such as LocalText.HParams.config(...)",
            )
        checked[name] = config
    return checked


def _label(field: str, name: str) -> str:
    return f"{field}[{name!r}]" if field else name


def _check_vocabularies(owner: BaseInput, built: Mapping[str, BaseInput], field: str) -> None:
    """Raise `ConfigError` if components have different vocabularies, which no shape would show."""
    for attribute, seen in (
        ("token_unit", {name: component.token_unit for name, component in built.items()}),
        ("tokenizer fingerprint", _fingerprints(built)),
    ):
        names = list(seen)
        for name in names[1:]:
            if seen[name] != seen[names[0]]:
                raise owner._config_error(
                    "components have different vocabularies",
                    field=f"{_label(field, name)} {attribute}",
                    value=seen[name],
                    expected=f"{seen[names[0]]!r}, as in {_label(field, names[0])}",
                )


def _fingerprints(built: Mapping[str, BaseInput]) -> dict[str, str]:
    """Return the fingerprint of the tokenizer of each component that has one."""
    found = {}
    for name, component in built.items():
        tokenizer = getattr(component, "tokenizer", None)
        # Records keep the fingerprint of their tokenizer, which need not be on this machine.
        if hasattr(component, "tokenizer_fingerprint"):
            found[name] = component.tokenizer_fingerprint
        elif tokenizer is not None and hasattr(tokenizer, "fingerprint"):
            found[name] = tokenizer.fingerprint()
    return found


def check_same_rows(owner: BaseInput, batches: Mapping[str, NestedMap], field: str) -> None:
    """Raise `ConfigError` if rows of components differ in fields, dtypes or shapes."""
    specs = {
        name: {
            path: f"{spec.dtype.name}{list(spec.shape[1:])}"
            for path, spec in spec_of(batch).flatten_items()
        }
        for name, batch in batches.items()
    }
    first, *others = specs
    for name in others:
        differing = [
            f"{path}: {specs[first].get(path, 'missing')} and {specs[name].get(path, 'missing')}"
            for path in sorted({*specs[first], *specs[name]})
            if specs[first].get(path) != specs[name].get(path)
        ]
        if differing:
            raise owner._config_error(
                f"rows of {_label(field, first)} and {_label(field, name)} differ: "
                f"{'; '.join(differing)}"
            )


def merge_rows(parts: Sequence[NestedMap], turns: np.ndarray) -> NestedMap:
    """Return one batch in new arrays; each row is the next row of the component of its turn.

    Args:
      parts: Rows of the first component, then of the second, and so on.
      turns: Index of the component of each row, int `[rows]`.
    """
    order = np.empty(len(turns), np.int64)
    order[turns.argsort(kind="stable")] = np.arange(len(turns))
    return concatenate_rows(parts).transform(lambda array: array.take(order, axis=0))


def slice_rows(batch: NestedMap, start: int, stop: int) -> NestedMap:
    """Return rows `start` to `stop` as views."""
    return batch.transform(lambda array: array[start:stop])


def concatenate_rows(parts: Sequence[NestedMap]) -> NestedMap:
    """Return one batch with the rows of `parts` in order; a single part is returned itself."""
    if len(parts) == 1:
        return parts[0]
    return NestedMap(
        {
            key: concatenate_rows([part[key] for part in parts])
            if isinstance(value, NestedMap)
            else np.concatenate([part[key] for part in parts])
            for key, value in parts[0].items()
        }
    )


def renumber_provenance(batch: NestedMap, index: int, count: int) -> NestedMap:
    """Return `batch` with provenance that is unique among components.

    Provenance `n` of component `index` of `count` becomes `n * count + index`. Padding keeps -1.

    Raises:
      ConfigError: A number exceeds int32.
    """
    if "provenance" not in batch:
        return batch
    provenance = np.asarray(batch.provenance, np.int64)
    numbered = np.where(provenance < 0, provenance, provenance * count + index)
    most = int(numbered.max(initial=0))
    require(most < 2**31, "mixture", "provenance", most, "a number below 2**31")
    return batch | {"provenance": numbered.astype(np.int32)}
