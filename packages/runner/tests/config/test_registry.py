"""Lookup of experiments, in catalogues or by import, and the listing of them."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.registry import (
    CATALOGUE_FILE,
    CatalogueLine,
    ExperimentEntry,
    find_experiment,
    list_experiments,
    load_experiment,
    read_catalogue,
)
from layerkit_runner.errors import FieldError, UsageError
from layerkit_runner.tools.catalogue import catalogue_file_text

# A package without a catalogue.
_FILES = {
    "reg_acme/__init__.py": "",
    "reg_acme/lm/__init__.py": "",
    "reg_acme/vision/__init__.py": "",
    "reg_acme/tests/__init__.py": "raise RuntimeError('imported')",
    "reg_acme/lm/parts.py": '''
        """Shared parts."""
        import typing
        import layerkit_runner as lr

        T = typing.TypeVar("T")

        class Optimizer:
            tags: typing.ClassVar[tuple[str, ...]] = ("adam", "lm")

            LEARNING_RATE: float = 1e-3
            _hidden: int = 1
            lower: int = 2

        class LmBase(Optimizer, lr.BaseExperiment, typing.Generic[T], abstract=True):
            """Base of the language models."""

            tags = ("lm",)
            NUM_LAYERS: "int" = 2
            MESH: tuple[int, ...] | None = None
            HIDDEN_DIMS: int = 8
    ''',
    "reg_acme/lm/small.py": '''
        from .parts import LmBase as Base

        class Small(Base):
            """A small model.

            More about it.
            """
            NUM_LAYERS = 1
            VOCAB_SIZE: int

            @property
            def HIDDEN_DIMS(self): return 4

        class _Private(Base):
            """Not for the list."""

        class Unrelated:
            """Not an experiment."""

        Tiny = Small
    ''',
    "reg_acme/lm/pile.py": "from reg_acme.lm.small import Small as RegPile126M",
    "reg_acme/vision/small.py": '''
        from reg_acme.lm import parts, small

        class Small(parts.LmBase):
            """Another small model."""

            tags = ("vision", "small")

        class Wide(small.Small):
            tags: tuple[str, ...]
            MESH = (1, 2)
    ''',
    "reg_acme/tests/fixtures.py": """
        from reg_acme.lm.parts import LmBase

        class Fixture(LmBase): pass
    """,
    "reg_acme-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: reg-acme\nVersion: 1.0\n",
    "reg_acme-1.0.dist-info/entry_points.txt": "[layerkit.experiments]\nacme = reg_acme\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write(tmp_path, _FILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("reg_"):
            del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    importlib.invalidate_caches()


def load(name: str) -> Any:
    return load_experiment(find_experiment(name))


@pytest.mark.parametrize(
    "name",
    [
        "reg_acme.lm.small.Small",
        "lm.small.Small",
        "lm.small.Tiny",
        "Tiny",
        "tasks.lm.params.small.Small",
        "paxml.tasks.lm.params.small.Small",
    ],
)
@pytest.mark.usefixtures("folder")
def test_experiment_is_found_by_each_form_of_its_name(name: str):
    cls = load_experiment(find_experiment(name))
    assert f"{cls.__module__}.{cls.__qualname__}" == "reg_acme.lm.small.Small"


@pytest.mark.usefixtures("folder")
def test_name_in_nvidias_scripts_is_found():
    result = find_experiment("paxml.contrib.gpu.scripts_gpu.configs.RegPile126M")
    assert result.dotted == "reg_acme.lm.pile.RegPile126M"


@pytest.mark.usefixtures("folder")
def test_list_contains_the_runnable_experiments_of_a_package_without_a_catalogue():
    listed = list_experiments()
    assert [e.name for e in listed] == sorted(e.name for e in listed)
    entries = {e.name: e for e in listed if e.module.startswith("reg_acme")}
    assert {name: entry.line.summary for name, entry in entries.items()} == {
        "lm.small.Small": "A small model.",
        "lm.small.Tiny": "The same as lm.small.Small.",
        "vision.small.Small": "Another small model.",
        "vision.small.Wide": "",
    }
    small = entries["lm.small.Small"]
    assert (small.module, small.class_name) == ("reg_acme.lm.small", "Small")
    assert small.line == CatalogueLine(None, None, None, "A small model.", ("adam", "lm"))
    assert experiment_fields(load_experiment(small)) == {
        "NUM_LAYERS": "int",
        "MESH": "tuple[int, ...] | None",
        "LEARNING_RATE": "float",
        "VOCAB_SIZE": "int",
    }
    tags = {name: entry.line.tags for name, entry in entries.items()}
    assert tags["vision.small.Small"] == ("adam", "lm", "small", "vision")
    assert tags["vision.small.Wide"] == ("adam", "lm")


def test_catalogued_experiment_is_found_and_listed_without_an_import(raises, folder: Path):
    line = CatalogueLine(12, "one device", "C4", "Catalogued.", ("lm",))
    text = catalogue_file_text({"lm.big.Big": line})
    broken = "raise RuntimeError('imported')"
    write(folder, {"reg_acme/catalogue.json": text, "reg_acme/lm/big.py": broken})
    listed = [entry for entry in list_experiments() if entry.module.startswith("reg_acme")]
    assert listed == [ExperimentEntry("lm.big.Big", "reg_acme.lm.big.Big", line)]
    assert find_experiment("Big") == find_experiment("lm.big.Big") == listed[0]
    assert "reg_acme.lm.big" not in sys.modules
    # One that the catalogue lacks is imported.
    assert load_experiment(find_experiment("lm.small.Small")).__name__ == "Small"
    write(folder, {"reg_acme/lm/big.py": "class Bigger: pass\n"})
    with raises(UsageError, value="reg_acme.lm.big.Big", choices=("reg_acme.lm.big.Bigger",)):
        load("lm.big.Big")


@pytest.mark.usefixtures("folder")
def test_ambiguous_name_raises(raises):
    with raises(UsageError, field="--exp", value="small.Small"):
        find_experiment("small.Small")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lm.small.Smal", "'lm.small.Small'"),
        ("tasks.lm.params.small.Smal", "'lm.small.Small'"),
        ("Wied", "'Wide'"),
        ("lm.small", "'lm.small.Small'"),
        ("reg_own.smal.Small", "'reg_own.small.Small'"),  # in a package outside the catalogue
    ],
)
def test_unknown_name_suggests_the_nearest(folder: Path, name: str, near: str):
    write(folder, {"reg_own/__init__.py": "", "reg_own/small.py": ""})
    with pytest.raises(UsageError) as caught:
        find_experiment(name)
    assert (caught.value.field, caught.value.value) == ("--exp", name)
    assert near in str(caught.value)


@pytest.mark.parametrize("name", ["lm.small.Unrelated", "lm.parts.LmBase", "lm.small._Private"])
@pytest.mark.usefixtures("folder")
def test_class_that_is_no_runnable_experiment_raises(raises, name: str):
    with raises(UsageError, field="--exp", value=f"reg_acme.{name}"):
        load(name)


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("class Broken(:\n", "{folder}/reg_broken.py:1"),
        ("import reg_not_installed\nclass Broken: pass\n", "reg_broken"),
        ("from json import Nothing\n", "{line}:1"),
        ("\nx = undefined\n", "{line}:2"),
        ("\nfrom layerkit.config import Partial\nPartial(dict).set(1)\n", "{line}:3"),
    ],
    ids=["syntax error", "missing library", "missing name", "undefined name", "any other error"],
)
def test_module_that_cannot_be_imported_raises(raises, folder: Path, text: str, owner: str):
    write(folder, {"reg_broken.py": text})
    line = os.path.relpath(folder / "reg_broken.py")
    with raises(UsageError, owner=owner.format(folder=folder, line=line)):
        load("reg_broken.Broken")


def test_class_made_by_a_call_or_imported_is_found(folder: Path):
    write(
        folder,
        {
            "reg_made.py": """
                from layerkit_runner import BaseExperiment

                def make(layers):
                    class Made(BaseExperiment):
                        '''Made by a call.'''
                        tags = ("made",)
                        NUM_LAYERS: int = layers
                    return Made

                Made = make(3)
            """,
            "reg_star.py": "from reg_made import *\n",
        },
    )
    made = find_experiment("reg_made.Made")
    assert load_experiment(made)().NUM_LAYERS == 3
    assert load_experiment(find_experiment("reg_star.Made")) is load_experiment(made)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("DEPHT = 1", "DEPHT"),
    ],
)
@pytest.mark.parametrize("name", ["Wrong", "Other", "Made"])
def test_wrong_class_raises_with_its_file_and_line(
    raises, folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, value: str, name: str
):
    write(
        folder,
        {
            "reg_refused.py": f"""
                from layerkit_runner import BaseExperiment

                class Other(BaseExperiment):
                    DEPTH: int = 2

                class Wrong(Other):
                    {body}

                def same(cls): return cls
                Made = same(Other)
            """
        },
    )
    monkeypatch.chdir(folder)
    with raises(FieldError, owner="reg_refused.py:7: Wrong", value=value, exit_code=2):
        load(f"reg_refused.{name}")


SUMMARY = "A model of which much can be said, and all of it in one long sentence like this."
LINES = {
    "lm.B": CatalogueLine(2, "data 2 × fsdp 4", "C4", SUMMARY, ("lm", "moe")),
    "lm.A": CatalogueLine(1, "one device", "made-up tokens", SUMMARY),
    "lm.C": CatalogueLine(None, "one device", "your own text", SUMMARY),
}


def test_written_record_is_read_back(tmp_path: Path):
    assert read_catalogue(tmp_path) is None
    text = catalogue_file_text(LINES)
    assert text.splitlines()[2] == (
        '  "lm.B": {"num_params": 2, "mesh": "data 2 × fsdp 4", "data": "C4",'
        f' "summary": "{SUMMARY}",'
        ' "tags": ["lm", "moe"]},'
    )
    (tmp_path / CATALOGUE_FILE).write_text(text, encoding="utf-8")
    assert read_catalogue(tmp_path) == LINES


@pytest.mark.parametrize("content", [b"{", b'{"lm.A": {"x": 1, "tags": []}}', b'{"\xff": 1}'])
def test_invalid_catalogue_file_is_an_error(raises, content: bytes, tmp_path: Path):
    (tmp_path / CATALOGUE_FILE).write_bytes(content)
    with raises(UsageError, owner=f"{tmp_path}/catalogue.json"):
        read_catalogue(tmp_path)
