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


def recipe(name: str) -> Any:
    return getattr(importlib.import_module(TABLES["recipes"][name]), name)


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
    fields = {name for each in TABLES["recipes"] for name in experiment_fields(recipe(each))}
    found = dict(targets())
    assert len(found) > 25
    for name, value in found.items():
        if name in PARTS:
            assert value in TABLES["recipes"]
        elif "." not in name:
            assert name in fields


def test_key_is_mapped_or_neutral():
    table = TABLES["pax"]
    neutral = table["neutral"].split()
    assert len(neutral) == len(set(neutral))
    assert not table["keys"].keys() & set(neutral)


def test_recipes_of_every_part_exist():
    assert list(TABLES["pax"]["recipes"]) == list(PARTS)
    for name in [*TABLES["recipes"], *TABLES["pax"]["recipes"].values()]:
        assert recipe(name).__name__ == name


def test_fields_of_recipes_are_those_that_other_recipes_lack():
    listed = TABLES["fields_of_recipes"]
    mapped = {name for name, _ in targets() if name.isupper()}
    owners = {
        name: [each for each in TABLES["recipes"] if name in experiment_fields(recipe(each))]
        for name in mapped
    }
    common = {each for each in TABLES["recipes"] if each in ("LmExperiment", "LlamaDecoder")}
    for name in mapped:
        if not common & set(owners[name]):
            assert sorted(owners[name]) == sorted(listed.get(name, owners[name])), name
    for name, some in listed.items():
        assert sorted(owners[name]) == sorted(some)


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
