"""Translation of MaxText's YAML files and `key=value` words.

Only the given keys are translated; recipes have defaults for the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from layerkit.config.checks import require
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import DocumentError, parse_yaml
from layerkit_runner.tools.translate.tables import (
    Leftover,
    NotTranslatedError,
    Translation,
    convert,
    make_translation,
    map_keys,
)

_AXES = ("data", "fsdp", "tensor")


def read_values(texts: Mapping[str, str], words: Sequence[str]) -> dict[str, Any]:
    """Return the values of YAML files and of `key=value` words; later ones take precedence."""
    values: dict[str, Any] = {}
    for file, text in texts.items():
        read = _parse(text, file)
        is_mapping = isinstance(read, dict) and all(isinstance(key, str) for key in read)
        require(is_mapping, file, "content", read, "a YAML mapping of names to values")
        values |= read
    for word in words:
        name, equals, text = word.partition("=")
        is_valid = equals and name.isidentifier()
        require(is_valid, None, "argument", word, "KEY=VALUE, as on MaxText's command line")
        values[name] = _parse(text, word)
    return {key: _number(value) for key, value in values.items()}


def _parse(text: str, name: str) -> Any:
    try:
        return parse_yaml(text)
    except DocumentError as error:
        raise UsageError(f"not valid YAML: {error}", owner=name) from error


def _number(value: Any) -> Any:
    """Return the number for text such as `1e-3`, which YAML 1.1 reads as text."""
    if isinstance(value, str) and value[:1] in "0123456789.-":
        try:
            return float(value)
        except ValueError:
            return value
    return value


def translate_maxtext(
    values: Mapping[str, Any],
    tables: Mapping[str, Any],
    *,
    name: str = "FromMaxText",
    defaults: Mapping[str, Any] | None = None,
) -> Translation:
    """Translate keys of MaxText.

    Keys with the value of `defaults`, MaxText's base.yml, need no field.
    """
    table, known = tables["maxtext"], defaults or {}
    keys = _Keys({**known, **values})
    found = {
        **_sizes(keys, table["sizes"]),
        **_schedule(keys, table["schedule"]),
        **_meshes(keys, table["meshes"]),
    }
    rest = {key: value for key, value in keys.values.items() if key not in keys.read}
    mapped, reasons = map_keys(table, rest)
    for key, reason in reasons.items():
        if key in values and not (key in known and known[key] == values[key]):
            keys.reject(key, reason)
    summary = f"{keys.values.get('run_name') or 'A configuration'}, from MaxText."
    return make_translation(
        tables, table["recipes"], found | mapped, keys.leftovers, name=name, summary=summary
    )


class _Keys:
    """Values of keys that are read together, and those of them that cannot be translated."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.read: set[str] = set()
        self.leftovers: list[Leftover] = []

    def get(self, key: str, kind: str, default: Any = None) -> Any:
        """Return a value converted to a kind of `convert`; None if it has another kind."""
        self.read.add(key)
        if key not in self.values:
            return default
        try:
            return convert(kind, self.values[key])
        except NotTranslatedError as error:
            self.reject(key, str(error))
            return None

    def reject(self, key: str, reason: str) -> None:
        """Add a key to those that are not translated."""
        self.leftovers.append(Leftover(f"{key} = {self.values.get(key)!r}", "", reason))


def _sizes(keys: _Keys, sizes: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return sizes multiplied by `scale`; each field has several names of its key."""
    scale = keys.get("scale", "integer", 1)
    found = {}
    for field, names in sizes.items():
        size = next((keys.get(name, "integer") for name in names if name in keys.values), None)
        if size is not None and scale is not None:
            found[field] = size * scale
    return found


def _schedule(keys: _Keys, fields: Mapping[str, str]) -> dict[str, Any]:
    steps = keys.get("steps", "integer", -1)
    length = keys.get("learning_rate_schedule_steps", "integer", -1)
    fraction = keys.get("warmup_steps_fraction", "number")
    if steps is None or length is None:
        return {}
    # -1 stands for the value of the other key.
    steps, length = length if steps == -1 else steps, steps if length == -1 else length
    found = {} if steps == -1 else {fields["steps"]: steps}
    if length < steps:
        reason = "less than steps: MaxText then sets the rate to 0, recipes keep the minimum"
        keys.reject("learning_rate_schedule_steps", reason)
    elif length != steps:
        found[fields["length"]] = length
    if fraction is not None and length == -1:
        keys.reject("warmup_steps_fraction", "the number of steps is unknown; give steps=N")
    elif fraction is not None:
        found[fields["warmup"]] = int(length * fraction)
    return found


def _meshes(keys: _Keys, fields: Mapping[str, str]) -> dict[str, list[int]]:
    found = {}
    for kind, field in fields.items():
        axes = [f"{kind}_{axis}_parallelism" for axis in _AXES]
        names = [n for n in keys.values if n.startswith(f"{kind}_") and n.endswith("_parallelism")]
        sizes = {name: keys.get(name, "integer") for name in names}
        for name, size in sizes.items():
            if size is not None and size < 1:
                keys.reject(name, "expected a number of devices; write it in place of -1")
            elif size is not None and size > 1 and name not in axes:
                reason = "the recipe's mesh is data × fsdp × tensor; docs/partitioning.md has more"
                keys.reject(name, reason)
        shape = [sizes.get(name) or 1 for name in axes]
        is_complete = sizes and all(size is not None and size > 0 for size in sizes.values())
        if is_complete and (kind == "ici" or math.prod(shape) > 1):
            found[field] = shape
    return found
