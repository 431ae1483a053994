"""Inputs made of other inputs: how those are built, and what they must have in common.

An input of several takes configs, not built inputs, since only it knows which host it is: the
runner fills in the place among the hosts and the batch size of the outer one, and each component is
built with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from layerkit.config import Config, assigned_fields, is_config, target_of
from layerkit.nested_map import NestedMap
from layerkit_inputs.base_input import BaseInput
from layerkit_inputs.specs import spec_of

Refuse = Callable[..., ValueError]
"""Makes the error about a field; `BaseInput._config_error`."""


def build_components(
    owner: BaseInput,
    configs: Mapping[str, Config] | None,
    *,
    field: str,
    refuse: Refuse,
    batch_sizes: Mapping[str, int],
    one_vocabulary: bool = True,
) -> dict[str, BaseInput]:
    """Builds the inputs that `owner` is made of.

    They are trained on or evaluated as the owner is, on the same host. Where a component has no
    seed, it gets the owner's plus its number, so that components of one length are not shuffled
    alike.

    Args:
      owner: With its fields settled.
      configs: Of each component, by name.
      field: What the owner calls `configs`, for messages; empty where each has a field of its own.
      refuse: Makes the owner's errors.
      batch_sizes: Rows of each component's batches on this host.
      one_vocabulary: Whether a model reads the tokens of all as the same.

    Raises:
      ValueError: no components, one that is no config of an input, or one that sets what the owner
        decides to something else.
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
    for number, (name, config) in enumerate(checked_configs(configs, field, refuse).items()):
        given = {**shared, "batch_size": batch_sizes[name]}
        own = {key: value for key, value in assigned_fields(config).items() if value is not None}
        for key, value in given.items():
            if own.get(key, value) != value:
                raise refuse(
                    f"{_label(field, name)} sets {key}={own[key]!r}, but {key}={value!r} here; "
                    "leave it unset there, since a component follows the input that it is part of."
                )
        given.setdefault("name", own.get("name", name))
        seed = (owner.input_random_seed or 0) + number
        given["input_random_seed"] = own.get("input_random_seed", seed)
        built[name] = config.clone(**given).Instantiate()
    if one_vocabulary:
        _check_vocabularies(built, field, refuse)
    return built


def checked_configs(
    configs: Mapping[str, Config | None] | None, field: str, refuse: Refuse
) -> Mapping[str, Config]:
    """`configs`, if there are any and each describes an input.

    Raises:
      ValueError: they are not.
    """
    if not isinstance(configs, Mapping) or not configs:
        raise refuse(f"{field}={configs!r}; expected a dict of name -> config of an input.")
    checked: dict[str, Config] = {}
    for name, config in configs.items():
        target = target_of(config) if config is not None and is_config(config) else None
        if config is None or not isinstance(target, type) or not issubclass(target, BaseInput):
            raise refuse(
                f"{_label(field, name)} is {config!r}; expected the config of an input, such as "
                "LocalText.HParams.config(...), which is built here."
            )
        checked[name] = config
    return checked


def _label(field: str, name: str) -> str:
    return f"{field}[{name!r}]" if field else name


def _check_vocabularies(built: Mapping[str, BaseInput], field: str, refuse: Refuse) -> None:
    """Ids of one vocabulary mean nothing in another, and no shape would show it."""
    for what, seen in (
        ("tokens of a", {name: component.token_unit for name, component in built.items()}),
        ("the tokenizer", _fingerprints(built)),
    ):
        names = list(seen)
        for name in names[1:]:
            if seen[name] != seen[names[0]]:
                raise refuse(
                    f"{_label(field, names[0])} and {_label(field, name)} have unlike "
                    f"vocabularies: {what} {seen[names[0]]!r} and {seen[name]!r}; a model reads "
                    "one."
                )


def _fingerprints(built: Mapping[str, BaseInput]) -> dict[str, str]:
    """Those of the tokenizers, as far as the components tell."""
    found = {}
    for name, component in built.items():
        tokenizer = getattr(component, "tokenizer", None)
        if hasattr(component, "tokenizer_fingerprint"):  # of the data, whether or not it is here
            found[name] = component.tokenizer_fingerprint
        elif tokenizer is not None and hasattr(tokenizer, "fingerprint"):
            found[name] = tokenizer.fingerprint()
    return found


def check_alike(batches: Mapping[str, NestedMap], field: str, refuse: Refuse) -> None:
    """Refuses batches of components that cannot be rows of one batch.

    Raises:
      ValueError: they differ in fields, dtypes, or shapes of a row.
    """
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
            raise refuse(
                f"{_label(field, first)} and {_label(field, name)} make unlike rows: "
                f"{'; '.join(differing)}."
            )


def merge_rows(parts: Sequence[NestedMap], turns: np.ndarray) -> NestedMap:
    """One batch, each row of it the next one of the component whose turn it is; new arrays.

    Args:
      parts: Rows of the first component, then of the second...
      turns: int `[rows]`: the number of a component.
    """
    order = np.empty(len(turns), np.int64)
    order[turns.argsort(kind="stable")] = np.arange(len(turns))
    return joined_rows(parts).transform(lambda array: array.take(order, axis=0))


def rows_between(batch: NestedMap, start: int, stop: int) -> NestedMap:
    """Rows `start` to `stop`, as views."""
    return batch.transform(lambda array: array[start:stop])


def joined_rows(parts: Sequence[NestedMap]) -> NestedMap:
    """One batch with the rows of `parts`, one after the other; a single one itself."""
    if len(parts) == 1:
        return parts[0]
    return NestedMap(
        {
            key: joined_rows([part[key] for part in parts])
            if isinstance(value, NestedMap)
            else np.concatenate([part[key] for part in parts])
            for key, value in parts[0].items()
        }
    )


def number_apart(batch: NestedMap, index: int, count: int) -> NestedMap:
    """`batch` with the provenance of component `index` of `count` made unlike that of the others.

    Example `n` of it becomes `n * count + index`; -1, padding, stays.
    """
    if "provenance" not in batch:
        return batch
    provenance = np.asarray(batch.provenance)
    numbered = np.where(provenance < 0, provenance, provenance * count + index)
    return batch | {"provenance": numbered.astype(provenance.dtype)}
