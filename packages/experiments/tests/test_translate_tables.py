"""The tables in `translate.yml` name keys once, and fields and recipes that exist."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.tools.translate.tables import map_keys, read_tables

TABLES = read_tables()
PARTS = ("optimizer", "partitioner", "data", "model")


def recipe_objects(name: str) -> dict[str, Any]:
    """The objects that a recipe imports, by name."""
    imports = TABLES["recipes"][name].get("imports", {})
    return {each: getattr(importlib.import_module(imports[each]), each) for each in imports}


def recipe_fields(name: str) -> set[str]:
    """The fields of a class with this recipe, besides those of LmExperiment."""
    entry, objects = TABLES["recipes"][name], recipe_objects(name)
    bases = [experiment_fields(objects[base]) for base in entry.get("bases", ())]
    return {field for names in [*bases, entry.get("declares", {})] for field in names}


def targets() -> Iterator[tuple[str, Any]]:
    """Yield what the rows of the table set, with values where the rows have them."""
    table = TABLES["pax"]
    entries = table["keys"].values()
    rows = [row for entry in entries for row in (entry if isinstance(entry, list) else [entry])]
    for row in rows:
        row = {"to": row} if isinstance(row, str) else row
        if "to" in row:
            yield from ((field, None) for field in row["to"].split()[:-1])
        yield from row.get("also", {}).items()
        otherwise = row.get("otherwise", {})
        for fields in [*row.get("values", {}).values(), otherwise]:
            yield from fields.items() if isinstance(fields, Mapping) else ()


def test_rows_set_fields_of_recipes():
    fields = {name for each in TABLES["recipes"] for name in recipe_fields(each)}
    values = dict(targets())
    assert len(values) > 25
    for name, value in values.items():
        if name in PARTS:
            assert value in TABLES["recipes"]
        elif "." not in name:
            assert name in fields


def test_key_is_mapped_or_neutral():
    table = TABLES["pax"]
    neutral = table["neutral"].split()
    assert len(neutral) == len(set(neutral))
    assert not table["keys"].keys() & set(neutral)


def test_default_of_every_part_is_a_recipe():
    assert list(TABLES["pax"]["recipes"]) == list(PARTS)
    assert set(TABLES["pax"]["recipes"].values()) <= TABLES["recipes"].keys()


@pytest.mark.parametrize("name", TABLES["recipes"])
def test_recipe_exists_and_names_fields(name: str):
    entry, known = TABLES["recipes"][name], recipe_fields("LmExperiment") | recipe_fields(name)
    assert {*entry.get("fields", {}), *entry.get("unused", ())} <= known
    assert all(callable(recipe_objects(name)[each]) for each in entry.get("methods", {}).values())


def test_fields_of_recipes_are_those_that_other_recipes_lack():
    common = recipe_fields("LmExperiment")
    for field, names in TABLES["fields_of_recipes"].items():
        if field not in common:
            assert names == [name for name in TABLES["recipes"] if field in recipe_fields(name)]
        assert set(names) <= TABLES["recipes"].keys()


@pytest.mark.parametrize("name", TABLES["pax"]["bases"])
def test_base_class_of_pax_sets_known_keys_and_has_known_bases(name: str):
    table = TABLES["pax"]
    base = table["bases"][name]
    assert set(base.get("bases", ())) <= table["bases"].keys()
    read = {name for part in ("reads", "ignores") for name in base.get(part, "").split()}
    assert {*base.get("fields", {}), *read, *table["always_read"].split()} <= table["keys"].keys()
    fields = {"USE_REPEATED_LAYER": False, **base.get("fields", {})}
    _, reasons = map_keys(table, fields)
    assert reasons.keys() <= {"NUM_HEADS"}


# `scripts/pax_translations.py` writes the constants of paxml 1.4.0.
BASE_CLASSES = json.loads((Path(__file__).parent / "pax" / "base_classes.json").read_text())


@pytest.mark.parametrize("name", sorted(TABLES["pax"]["bases"].keys() - {"BaseExperiment"}))
def test_base_class_has_the_constants_of_paxml(name: str):
    table, recorded = TABLES["pax"], BASE_CLASSES[name]

    def collect(base: str) -> tuple[dict[str, Any], set[str]]:
        described = table["bases"][base]
        fields: dict[str, Any] = {}
        known = {*described.get("reads", "").split(), *described.get("ignores", "").split()}
        for parent in reversed(described.get("bases", ())):
            inherited, more = collect(parent)
            fields, known = fields | inherited, known | more
        return fields | described.get("fields", {}), known

    fields, known = collect(name)
    constants = {key: value for key, value in fields.items() if key.isidentifier()}
    texts = {key: str(value) for key, value in constants.items()}
    expected = {key: recorded[key] for key in texts}
    for key, value in constants.items():
        if isinstance(value, float):
            texts[key], expected[key] = value, float(recorded[key])
    assert texts == expected
    assert recorded.keys() & table["keys"].keys() <= {
        *fields,
        *known,
        *table["always_read"].split(),
    }
