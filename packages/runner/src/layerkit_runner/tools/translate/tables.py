"""Tables that map fields of Pax to ours, and classes generated from them.

A package that offers experiments may keep tables in a file `translate.yml` beside its
`__init__.py`. The comment at the top of that file describes the rows.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from layerkit.errors import as_sentence, near_names
from layerkit_runner.config.registry import experiment_packages
from layerkit_runner.errors import UsageError

FILE_NAME = "translate.yml"
# Bound of sizes, steps and rates.
_LARGEST = 2**100
_ABSTRACT = (
    "Abstract, because it differs from the original: follow each NOT TRANSLATED line, or decide"
    " that it has no effect, then remove abstract=True."
)


class NotTranslatedError(ValueError):
    """A value that no field can have; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Leftover:
    """Source text that is not translated, with the reason and, if known, its file and line."""

    text: str
    where: str
    reason: str

    def __str__(self) -> str:
        """Return place, text and reason in one line."""
        return printable(": ".join(filter(None, (self.where, self.text, self.reason))))


@dataclasses.dataclass(frozen=True)
class Translation:
    """An experiment class of Pax, translated to fields and recipes.

    `settings` are values without a field, by their paths from `task`; `recipes` are entries of the
    table by name, in their order there. `unread` are constants that the original has no effect
    from, and so are left out.
    """

    name: str
    summary: str
    fields: Mapping[str, Any]
    settings: Mapping[str, Any]
    recipes: Mapping[str, Mapping[str, Any]]
    leftovers: Sequence[Leftover]
    unread: Sequence[Leftover] = ()


def read_tables() -> dict[str, Any]:
    """Return the tables of the first package of experiments with a `translate.yml`."""
    for package in experiment_packages():
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            path = Path(folder, FILE_NAME)
            if path.is_file():
                return yaml.safe_load(path.read_bytes())
    hint = "Install layerkit-experiments."
    raise UsageError(f"no package of experiments has a {FILE_NAME}", hint=hint)


def map_keys(
    table: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values of fields, recipes and paths, and reasons of keys that are not mapped."""
    fields: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    known = [key for key in table["keys"] if key in values]
    for key in dict.fromkeys([*known, *values]):
        try:
            fields |= _map_key(table, key, values)
        except NotTranslatedError as error:
            reasons[key] = str(error)
    return fields, reasons


def _map_key(table: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    value, row, neutral = values[key], table["keys"].get(key), table["neutral"].split()
    if key in neutral:
        return {}
    if isinstance(value, NotTranslatedError):
        raise value
    if row is None:
        near = near_names(key, [*table["keys"], *neutral])
        raise NotTranslatedError(as_sentence(f"unknown key{near}"))
    rows = row if isinstance(row, list) else [row]
    row = next((row for row in rows if _applies(row, values)), rows[-1])
    row = {"to": row} if isinstance(row, str) else row
    if not _applies(row, values):
        otherwise = row.get("otherwise", {})
        if isinstance(otherwise, str):
            raise NotTranslatedError(otherwise)
        return otherwise
    if "values" in row:
        return _map_value(row, value)
    *fields, kind = row["to"].split()
    if value is None and "quotient" in row:
        dividend, divisor = (values.get(name) for name in row["quotient"])
        if type(dividend) is type(divisor) is int and divisor:
            value = dividend // divisor
    if not value and "falsy" in row:
        value = row["falsy"]
    return {**dict.fromkeys(fields, convert(kind, value)), **row.get("also", {})}


def _applies(row: str | Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    when = {} if isinstance(row, str) else row.get("when", {})
    return not when or any(_is_one_of(values.get(key), allowed) for key, allowed in when.items())


def _is_one_of(value: Any, allowed: Collection[Any]) -> bool:
    """Return whether a value is one of the allowed, where True differs from 1."""
    is_bool = isinstance(value, bool)
    return any(value == other and isinstance(other, bool) == is_bool for other in allowed)


def _map_value(row: Mapping[str, Any], value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        value = ",".join(map(str, value))
    for known, fields in row["values"].items():
        if _is_one_of(value, [known]):
            return fields
    expected = f"expected one of {', '.join(map(str, row['values']))}"
    raise NotTranslatedError(row.get("because", expected))


def convert(kind: str, value: Any) -> Any:
    """Return a value converted to the type of a field, without rounding.

    Args:
      kind: `integer`, `number`, `bool` or `integers`; `positive` is a number whose values of 0 and
        below become None, since Pax writes "none" so; `magnitude` is a number without its sign, and
        None for 0. A kind that ends in ? allows None.
      value: Value of Python.
    """
    if value is None and kind.endswith("?"):
        return None
    kind = kind.removesuffix("?")
    if kind == "bool":
        if not isinstance(value, bool):
            raise NotTranslatedError("expected True or False")
        return value
    if kind == "integers":
        if not isinstance(value, list):
            raise NotTranslatedError("expected a list of integers")
        return [convert("integer", item) for item in value]
    is_whole = kind == "integer"
    is_number = type(value) in (int, float) and abs(value) < _LARGEST
    if not is_number or (is_whole and value != value // 1):
        raise NotTranslatedError("expected an integer" if is_whole else "expected a number")
    value = int(value) if is_whole else float(value)
    if kind == "magnitude":
        return abs(value) or None
    return None if kind == "positive" and value <= 0 else value


def make_translation(
    tables: Mapping[str, Any],
    defaults: Mapping[str, str],
    mapped: Mapping[str, Any],
    leftovers: Sequence[Leftover],
    unread: Sequence[Leftover] = (),
    **names: str,
) -> Translation:
    """Return a translation with chosen recipes and the fields that they have."""
    chosen = {mapped.get(part, default) for part, default in defaults.items()}
    fields = {key: value for key, value in mapped.items() if key.isupper()}
    unused = []
    for field, owners in tables["fields_of_recipes"].items():
        if field in fields and not chosen & set(owners):
            value = fields.pop(field)
            if value is not None:
                reason = f"the recipes of this class have no such field; {owners[0]} has it"
                unused.append(Leftover(f"{field} = {value!r}", "", reason))
    recipes = {name: entry for name, entry in tables["recipes"].items() if name in chosen}
    defaults_of_recipes = {k: v for entry in recipes.values() for k, v in _part(entry, "fields")}
    return Translation(
        fields=defaults_of_recipes | fields,
        settings={key: value for key, value in mapped.items() if "." in key},
        recipes=recipes,
        leftovers=list(dict.fromkeys([*leftovers, *unused])),
        unread=unread,
        **names,
    )


def _part(recipe: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """Return the items of a part of a recipe, such as its methods."""
    return list(recipe.get(name, {}).items())


def module_text(translations: Sequence[Translation]) -> str:
    """Return a module with a docstring and a class for each translation."""
    imports: dict[str, set[str]] = {}
    for translation in translations:
        for recipe in translation.recipes.values():
            for name, module in _part(recipe, "imports"):
                imports.setdefault(module, set()).add(name)
        if translation.settings:
            imports.setdefault("layerkit.config", set()).add("Config")
    lines = ['"""Translated from Pax."""', "", "from __future__ import annotations", ""]
    lines += [f"from {name} import {', '.join(sorted(imports[name]))}" for name in sorted(imports)]
    return "\n".join(lines) + "\n\n\n" + "\n\n".join(map(_class_text, translations))


def _class_text(translation: Translation) -> str:
    """Return the source of a class, which is abstract if it has leftovers, one comment each."""
    summary = printable(translation.summary).replace("\\", "\\\\").replace('"', "'")
    recipes = translation.recipes.values()
    bases = [base for recipe in recipes for base in recipe.get("bases", ())]
    bases += ["abstract=True"] * bool(translation.leftovers)
    lines = [f"class {translation.name}({', '.join(bases)}):", f'    """{summary}"""', ""]
    lines += _comment(_ABSTRACT) if translation.leftovers else []
    for leftover in translation.leftovers:
        lines += _comment(f"NOT TRANSLATED {leftover}")
    for constant in translation.unread:
        lines += _comment(f"LEFT OUT {constant}")
    types = {name: f": {text}" for recipe in recipes for name, text in _part(recipe, "declares")}
    for name, value in translation.fields.items():
        lines.append(f"    {name}{types.get(name, '')} = {_literal(value)}")
    for recipe in recipes:
        for name, value in _part(recipe, "attributes"):
            lines.append(f"    {name} = {_literal(value)}")
    if unused := tuple(name for recipe in recipes for name in recipe.get("unused", ())):
        lines.append(f"    unused_fields = {unused!r}")
    for recipe in recipes:
        lines += [f"    {name} = {function}" for name, function in _part(recipe, "methods")]
    if translation.settings:
        lines += ["", "    def task(self) -> Config:"]
        lines += ['        """Return the task with values that have no field."""']
        lines += ["        task = super().task()"]
        lines += [f"        {path} = {_literal(v)}" for path, v in translation.settings.items()]
        lines += ["        return task"]
    return "\n".join(lines).rstrip() + "\n"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _comment(text: str) -> list[str]:
    # Words are not broken, so that flags can be copied.
    lines = textwrap.wrap(text, 90, break_long_words=False, break_on_hyphens=False)
    return [f"    # {line}" for line in lines]


def printable(text: str) -> str:
    """Return text on one line without control characters, for comments and terminals."""
    return "".join(part if part.isprintable() else "�" for part in " ".join(text.split()))
