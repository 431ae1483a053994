"""Tables that map keys of another framework to fields, and the classes written from them.

A package that offers experiments may keep tables in a file `translate.yml` beside its
`__init__.py`. The head of that file describes what a table holds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerkit.near_names import near_names
from layerkit_runner.config.registry import experiment_packages
from layerkit_runner.errors import UsageError
from layerkit_runner.files.bounded_documents import parse_yaml, read_text

FILE_NAME = "translate.yml"
_LARGEST = 2**100  # no size, step or rate is larger
_ABSTRACT = (
    "Abstract, because it is not the original yet: do what each NOT TRANSLATED line says or decide"
    " that it changes nothing, then remove abstract=True."
)


class NotTranslatedError(ValueError):
    """A value that no field can have; the text says why."""


@dataclasses.dataclass(frozen=True)
class Leftover:
    """Source text that is not translated, with the reason and, if known, its file and line."""

    text: str
    where: str
    reason: str

    def __str__(self) -> str:
        return printable(": ".join(filter(None, (self.where, self.text, self.reason))))


@dataclasses.dataclass(frozen=True)
class Translation:
    """A configuration of another framework in terms of this project.

    Attributes:
      name: Name of the class.
      summary: First line of its docstring.
      fields: Values of experiment fields.
      settings: Values that no field has, by their paths from `task`.
      recipes: Classes that the class inherits, in their order, with their modules.
      leftovers: What is not translated.
    """

    name: str
    summary: str
    fields: Mapping[str, Any]
    settings: Mapping[str, Any]
    recipes: Mapping[str, str]
    leftovers: Sequence[Leftover]


def read_tables() -> dict[str, Any]:
    """Return the tables of the first package of experiments that has some.

    Raises:
      UsageError: No installed package has tables.
    """
    for package in experiment_packages():
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            path = Path(folder, FILE_NAME)
            if path.is_file():
                return parse_yaml(read_text(path))
    raise UsageError(f"no package of experiments has a {FILE_NAME}. Install layerkit-experiments.")


def map_keys(
    table: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Map keys by the rows of a table.

    Args:
      table: The part of `read_tables` for a framework.
      values: Values of the keys.

    Returns:
      Fields, recipes and paths from `task` with their values; reasons of keys that are not mapped.
    """
    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    known = [key for key in table["keys"] if key in values]
    for key in dict.fromkeys([*known, *values]):
        try:
            found |= _map_key(table, key, values)
        except NotTranslatedError as error:
            reasons[key] = str(error)
    return found, reasons


def _map_key(table: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    value, row, neutral = values[key], table["keys"].get(key), table["neutral"].split()
    if key in neutral:
        return {}
    if isinstance(value, NotTranslatedError):
        raise value
    if row is None:
        near = near_names(key, [*table["keys"], *neutral])
        raise NotTranslatedError(f"no field for it is known{near}")
    row = {"to": row} if isinstance(row, str) else row
    if _is_one_of(value, [row.get("same", row)]):
        return {}
    when = row.get("when", {})
    if when and not any(_is_one_of(values.get(name), allowed) for name, allowed in when.items()):
        otherwise = row.get("otherwise", {})
        if isinstance(otherwise, str):
            raise NotTranslatedError(otherwise)
        return otherwise
    if "values" in row:
        return _map_value(row, value)
    field, kind = row["to"].split()
    if value is None and "quotient" in row:
        dividend, divisor = (values.get(name) for name in row["quotient"])
        if type(dividend) is type(divisor) is int and divisor:
            value = dividend // divisor
    return {field: convert(kind, value)}


def _is_one_of(value: Any, allowed: Collection[Any]) -> bool:
    """Return whether a value is allowed; True is not 1."""
    is_bool = isinstance(value, bool)
    return any(each == value and isinstance(each, bool) == is_bool for each in allowed)


def _map_value(row: Mapping[str, Any], value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if row.get("prefix"):
        value = str(value).partition("/")[0].partition(":")[0]
    for known, fields in row["values"].items():
        if _is_one_of(value, [known]):
            return fields
    expected = f"expected one of {', '.join(map(str, row['values']))}"
    raise NotTranslatedError(row.get("because", expected))


def convert(kind: str, value: Any) -> Any:
    """Return a value as a field has it; nothing is guessed, so 2.5 layers are not 2.

    Args:
      kind: `integer`, `number`, `bool` or `integers`; `count` and `positive` are an integer and a
        number that become None at 0 and below, as both frameworks write "none". A kind that ends
        in ? allows None.
      value: A value of Python or YAML.

    Raises:
      NotTranslatedError: The value is of another kind.
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
            raise NotTranslatedError("expected a list of whole numbers")
        return [convert("integer", item) for item in value]
    is_whole = kind in ("integer", "count")
    is_number = type(value) in (int, float) and abs(value) < _LARGEST
    if not is_number or (is_whole and value != value // 1):
        raise NotTranslatedError("expected a whole number" if is_whole else "expected a number")
    value = int(value) if is_whole else float(value)
    return None if kind in ("count", "positive") and value <= 0 else value


def make_translation(
    tables: Mapping[str, Any],
    defaults: Mapping[str, str],
    found: Mapping[str, Any],
    leftovers: Sequence[Leftover],
    **names: str,
) -> Translation:
    """Choose the recipes of a class and keep the fields that they have.

    Args:
      tables: Result of `read_tables`.
      defaults: Recipes where `found` has no others.
      found: Fields, recipes and paths from `task` with their values.
      leftovers: What is not translated so far.
      **names: Name and summary of the class.
    """
    chosen = {found.get(part, default) for part, default in defaults.items()}
    fields = {key: value for key, value in found.items() if key.isupper()}
    unused = []
    for field, owners in tables["fields_of_recipes"].items():
        if field in fields and not chosen & set(owners):
            value = fields.pop(field)
            if value is not None:
                reason = f"the recipes of this class have no such field; {owners[0]} has it"
                unused.append(Leftover(f"{field} = {value!r}", "", reason))
    return Translation(
        fields=fields,
        settings={key: value for key, value in found.items() if "." in key},
        recipes={name: tables["recipes"][name] for name in tables["recipes"] if name in chosen},
        leftovers=list(dict.fromkeys([*leftovers, *unused])),
        **names,
    )


def module_text(translations: Sequence[Translation], title: str) -> str:
    """Return a module with a docstring and a class for each translation."""
    imports: dict[str, set[str]] = {}
    for translation in translations:
        for recipe, module in translation.recipes.items():
            imports.setdefault(module, set()).add(recipe)
        if translation.settings:
            imports.setdefault("layerkit.config", set()).add("Config")
    lines = [f'"""{title}"""', "", "from __future__ import annotations", ""]
    lines += [f"from {name} import {', '.join(sorted(imports[name]))}" for name in sorted(imports)]
    return "\n".join(lines) + "\n\n\n" + "\n\n".join(map(_class_text, translations))


def _class_text(translation: Translation) -> str:
    """Return a class with a comment for each leftover, for which it is abstract."""
    summary = printable(translation.summary).replace("\\", "\\\\").replace('"', "'")
    bases = ", ".join([*translation.recipes, *["abstract=True"] * bool(translation.leftovers)])
    lines = [f"class {translation.name}({bases}):", f'    """{summary}"""', ""]
    lines += _comment(_ABSTRACT) if translation.leftovers else []
    for leftover in translation.leftovers:
        lines += _comment(f"NOT TRANSLATED {leftover}")
    lines += [f"    {name} = {_literal(value)}" for name, value in translation.fields.items()]
    if translation.settings:
        lines += ["", "    def task(self) -> Config:"]
        lines += ['        """Return the task, with values that no field has."""']
        lines += ["        task = super().task()"]
        lines += [f"        {path} = {_literal(v)}" for path, v in translation.settings.items()]
        lines += ["        return task"]
    return "\n".join(lines).rstrip() + "\n"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _comment(text: str) -> list[str]:
    # A flag that is not broken can be copied.
    lines = textwrap.wrap(text, 90, break_long_words=False, break_on_hyphens=False)
    return [f"    # {line}" for line in lines]


def printable(text: str) -> str:
    """Return text on one line without control characters, as comments and terminals need it."""
    return "".join(part if part.isprintable() else "�" for part in " ".join(text.split()))


def command_text(translation: Translation, experiment: str) -> str:
    """Return the command that runs an experiment with the translated values."""
    words = [f"--exp={experiment}"]
    for name, value in {**translation.fields, **translation.settings}.items():
        text = value if isinstance(value, str) else repr(value).replace(" ", "")
        words.append(f"--fdl.{name}={text}")
    return " \\\n  ".join(["runner", *map(shlex.quote, words), "--job_log_dir=DIR"])
