"""Names of experiments: looked up in catalogues, and imported where a catalogue lacks them."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.config.catalogue import CatalogueLine, catalogue_file_text
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields
from layerkit_runner.config.registry import (
    ExperimentEntry,
    find_experiment,
    list_experiments,
    load_experiment,
)
from layerkit_runner.errors import UsageError

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


def refusal(name: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_experiment(find_experiment(name))
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "reg_acme.lm.small.Small",
        "lm.small.Small",
        "lm.small.Tiny",
        "reg_acme.lm.small.Tiny",
        "Tiny",
        "small.Tiny",
        "tasks.lm.params.small.Small",
        "paxml.tasks.lm.params.small.Small",
        "tasks.lm.params.small.Tiny",
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_ways_to_name_an_experiment(name: str):
    cls = load_experiment(find_experiment(name))
    assert f"{cls.__module__}.{cls.__qualname__}" == "reg_acme.lm.small.Small"


def test_the_name_that_nvidias_scripts_use(folder: Path):
    write(
        folder,
        {
            "reg_acme/lm/pile.py": """
                from reg_acme.lm.parts import LmBase
                class RegPile126M(LmBase): pass
            """
        },
    )
    found = find_experiment("paxml.contrib.gpu.scripts_gpu.configs.RegPile126M")
    assert found.dotted == "reg_acme.lm.pile.RegPile126M"


@pytest.mark.usefixtures("folder")
def test_entries_of_a_package_without_a_catalogue():
    entries = {e.name: e for e in list_experiments() if e.module.startswith("reg_acme")}
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


def test_catalogued_experiment_is_found_and_listed_without_an_import(folder: Path):
    line = CatalogueLine(12, "one device", "C4", "Catalogued.", ("lm",))
    text = catalogue_file_text({"lm.big.Big": line})
    broken = "raise RuntimeError('imported')"
    write(folder, {"reg_acme/catalogue.json": text, "reg_acme/lm/big.py": broken})
    listed = [entry for entry in list_experiments() if entry.module.startswith("reg_acme")]
    assert listed == [ExperimentEntry("lm.big.Big", "reg_acme.lm.big.Big", line)]
    assert find_experiment("Big") == find_experiment("lm.big.Big") == listed[0]
    assert "did you mean 'lm.big.Big'?" in refusal("lm.big.Bigg")
    assert "reg_acme.lm.big" not in sys.modules
    # One that the catalogue lacks is imported.
    assert load_experiment(find_experiment("lm.small.Small")).__name__ == "Small"
    write(folder, {"reg_acme/lm/big.py": "class Bigger: pass\n"})
    assert refusal("lm.big.Big") == (
        "module reg_acme.lm.big has no experiment 'Big'; did you mean 'Bigger'? It has: Bigger."
    )


@pytest.mark.usefixtures("folder")
def test_the_list_of_what_has_all_tags():
    def listed(*tags: str) -> list[str]:
        found = list_experiments(tags=tags)
        return [entry.name for entry in found if entry.module.startswith("reg_acme")]

    every = ["lm.small.Small", "lm.small.Tiny", "vision.small.Small", "vision.small.Wide"]
    assert listed() == listed("adam") == listed("lm", "adam") == every
    assert listed("vision") == listed("lm", "vision") == ["vision.small.Small"]
    with pytest.raises(UsageError) as caught:
        list_experiments(tags=("lm", "adma"))
    text = str(caught.value)
    assert text.startswith("--tag=adma: expected one of adam, ")
    assert text.endswith("; did you mean 'adam'?")


def test_tags_where_no_experiment_has_any(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("layerkit_runner.config.registry.experiment_packages", list)
    with pytest.raises(UsageError) as caught:
        list_experiments(tags=("moe",))
    assert str(caught.value) == ("--tag=moe: expected none, for no experiment has any.")


@pytest.mark.parametrize(
    ("tags", "example"), [("moe", "('moe',)"), (("moe", 1), "('moe', 'pipeline')")]
)
def test_tags_that_are_no_strings_are_refused(tags: Any, example: str):
    with pytest.raises(UsageError) as caught:
        type("Own", (BaseExperiment,), {"tags": tags})
    assert str(caught.value) == f"Own.tags={tags!r}: expected strings, such as {example}"


@pytest.mark.usefixtures("folder")
def test_the_list_holds_what_can_run():
    listed = {e.name: e.line.summary for e in list_experiments() if e.module.startswith("reg_acme")}
    assert listed == {
        "lm.small.Small": "A small model.",
        "lm.small.Tiny": "The same as lm.small.Small.",
        "vision.small.Small": "Another small model.",
        "vision.small.Wide": "",
    }
    assert [e.name for e in list_experiments()] == sorted(e.name for e in list_experiments())


@pytest.mark.usefixtures("folder")
def test_several_experiments_of_one_name_are_all_told():
    assert refusal("small.Small") == (
        "--exp=small.Small is ambiguous; it can be any of\n"
        "  reg_acme.lm.small.Small\n"
        "  reg_acme.vision.small.Small"
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lm.small.Smal", "'lm.small.Small'"),
        ("lm.small.Small(", "'lm.small.Small'"),
        ("lm.small.small", "'lm.small.Small'"),
        ("tasks.lm.params.small.Smal", "'lm.small.Small'"),
        ("Wied", "'Wide'"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_unknown_name_hears_the_near_one(name: str, near: str):
    text = refusal(name)
    assert text.startswith(f"there is no experiment {name!r}; did you mean ")
    assert near in text
    assert text.endswith("? `runner --list` shows all.")


def test_a_class_missing_from_ones_own_module(folder: Path):
    write(
        folder,
        {
            "reg_own.py": """
                from layerkit_runner import BaseExperiment
                class Mine(BaseExperiment): pass
            """
        },
    )
    assert find_experiment("reg_own.Mine").name == "reg_own.Mine"
    assert refusal("reg_own.Mien") == (
        "module reg_own has no experiment 'Mien'; did you mean 'Mine'? It has: Mine."
    )


@pytest.mark.usefixtures("folder")
def test_what_is_no_experiment_or_only_a_base_is_refused():
    assert refusal("reg_acme.lm.small.Unrelated") == (
        "reg_acme.lm.small.Unrelated is a class but no experiment: it does not derive from"
        " BaseExperiment."
    )
    assert "there is no experiment 'LmBase'" in refusal("LmBase")
    assert refusal("lm.parts.LmBase").startswith("lm.parts.LmBase is only a base for other")
    assert "only a base" in refusal("lm.small._Private")


@pytest.mark.usefixtures("folder")
def test_misspelt_class_is_answered_without_an_import(folder: Path):
    write(folder, {"reg_own.py": "raise RuntimeError('imported')\nclass Mine: pass\n"})
    assert "did you mean 'Mine'?" in refusal("reg_own.Mien")


def test_module_that_is_not_python_is_named(folder: Path):
    write(folder, {"reg_broken.py": "class Broken(:\n"})
    assert refusal("reg_broken.Broken") == (f"{folder / 'reg_broken.py'}, line 1: invalid syntax")


def test_classes_that_are_made_by_calls_or_imported_are_found(folder: Path):
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


def test_a_missing_library_is_named_without_a_traceback(folder: Path):
    write(
        folder,
        {
            "reg_needs.py": """
                import reg_not_installed
                from layerkit_runner import BaseExperiment
                class Needs(BaseExperiment): pass
            """
        },
    )
    with pytest.raises(UsageError) as caught:
        load_experiment(find_experiment("reg_needs.Needs"))
    assert str(caught.value) == "reg_needs cannot be imported: No module named 'reg_not_installed'."


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("DEPHT = 1", "Wrong assigns DEPHT, which is not declared; did you mean 'DEPTH'? A new"),
        ("reduced_fields = {'DEPHT': 1}", "reduced_fields of Wrong: Wrong has no field 'DEPHT';"),
        ("def eval_program(self): pass", "Wrong defines eval_program(), which a run never calls;"),
        ("def executors(self): pass", "Wrong defines executors(), which a run never calls; did"),
    ],
)
@pytest.mark.parametrize("name", ["Wrong", "Other", "Made"])
def test_a_class_that_is_refused_is_named_by_file_and_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, text: str, name: str
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
    with pytest.raises(UsageError) as caught:
        load_experiment(find_experiment(f"reg_refused.{name}"))
    assert str(caught.value).startswith(f"reg_refused.py:7: {text}")
    assert isinstance(caught.value, TypeError)
    assert caught.value.exit_code == 2
