"""Names of experiments: found in the sources, and nothing imported that need not be."""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerkit_runner.config.class_sources import FieldSource
from layerkit_runner.config.experiment import BaseExperiment, experiment_fields
from layerkit_runner.config.registry import (
    find_experiment,
    list_experiments,
    load_experiment,
)
from layerkit_runner.errors import UsageError

# Importing any of these fails, so that a test which passes has read them only.
_READ_ONLY = {
    "reg_acme/__init__.py": "raise RuntimeError('imported')",
    "reg_acme/lm/__init__.py": "raise RuntimeError('imported')",
    "reg_acme/lm/parts.py": '''
        """Shared parts."""
        import typing
        import layerkit_runner as lr

        raise RuntimeError("imported")

        class Optimizer:
            tags: typing.ClassVar[tuple[str, ...]] = ("adam", "lm")

            LEARNING_RATE: float = 1e-3
            _hidden: int = 1
            lower: int = 2

        class LmBase(Optimizer, lr.BaseExperiment, typing.Generic[typing.T], abstract=True):
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
    write(tmp_path, _READ_ONLY)
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
        find_experiment(name)
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
    assert find_experiment(name).dotted == "reg_acme.lm.small.Small"


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
def test_what_the_source_tells_of_an_experiment():
    entry = find_experiment("lm.small.Small")
    assert entry.name == "lm.small.Small"
    assert entry.summary == "A small model."
    assert entry.complete
    assert entry.fields == {
        "NUM_LAYERS": FieldSource("'int'", "1"),
        "MESH": FieldSource("tuple[int, ...] | None", "None"),
        "LEARNING_RATE": FieldSource("float", "0.001"),
        "VOCAB_SIZE": FieldSource("int", None),
    }


@pytest.mark.usefixtures("folder")
def test_fields_follow_bases_across_modules():
    fields = find_experiment("Wide").fields
    assert fields["MESH"] == FieldSource("tuple[int, ...] | None", "(1, 2)")
    assert fields["VOCAB_SIZE"] == FieldSource("int", None)
    assert "HIDDEN_DIMS" not in fields


@pytest.mark.usefixtures("folder")
def test_tags_are_those_of_all_bases():
    assert find_experiment("lm.small.Small").tags == ("adam", "lm")
    assert find_experiment("vision.small.Small").tags == ("adam", "lm", "small", "vision")
    assert find_experiment("Wide").tags == ("adam", "lm")


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
    assert text.startswith("--tag has no value 'adma'; did you mean 'adam'? It is one of adam, ")
    assert text.endswith(", vision.")


def test_tags_where_no_experiment_has_any(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("layerkit_runner.config.registry.experiment_packages", list)
    with pytest.raises(UsageError) as caught:
        list_experiments(tags=("moe",))
    assert str(caught.value) == "--tag has no value 'moe'. There are none."


@pytest.mark.parametrize(
    ("written", "example"),
    [
        ("'moe'", "('moe',)"),
        ("('moe', 1)", "('moe', 'pipeline')"),
        ("Small.tags + ('moe',)", "('moe', 'pipeline')"),
    ],
)
def test_tags_that_are_no_written_out_strings_are_refused(folder: Path, written: str, example: str):
    source = f"""
        from reg_acme.lm.small import Small
        class Own(Small):
            tags = {written}
    """
    write(folder, {"reg_tagged.py": source})
    assert refusal("reg_tagged.Own") == (
        f"reg_tagged.Own, line 4: tags = {written}; expected strings, written out, such as"
        f" tags = {example}"
    )


@pytest.mark.usefixtures("folder")
def test_the_list_holds_what_can_run():
    listed = {e.name: e.summary for e in list_experiments() if e.module.startswith("reg_acme")}
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
                raise RuntimeError("imported")
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


def test_a_module_that_is_not_python_is_named(folder: Path):
    write(folder, {"reg_broken.py": "class Broken(:\n"})
    assert refusal("reg_broken.Broken") == (f"{folder / 'reg_broken.py'}, line 1: invalid syntax")


def test_where_the_source_cannot_tell_the_module_is_imported(folder: Path):
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

                def same(cls): return cls

                @same
                class Decorated(BaseExperiment):
                    NUM_LAYERS: int = 3

                class Below(make(2)):
                    NUM_HEADS: int = 1
            """
        },
    )
    made = find_experiment("reg_made.Made")
    assert (made.summary, made.tags, dict(made.fields)) == (
        "Made by a call.",
        ("made",),
        {"NUM_LAYERS": FieldSource("int", None)},
    )
    assert load_experiment(made)().NUM_LAYERS == 3
    assert not find_experiment("reg_made.Decorated").complete
    below = find_experiment("reg_made.Below")
    assert set(below.fields) == {"NUM_LAYERS", "NUM_HEADS"}


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
    assert str(caught.value) == (
        "reg_needs.Needs cannot be imported: No module named 'reg_not_installed' (reg_needs)."
    )


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


def test_source_and_import_agree(folder: Path):
    """The sources are read by rules of our own; Python's reading of the classes is the judge."""
    write(
        folder,
        {
            "reg_real/parts.py": """
                from layerkit_runner.config.experiment import BaseExperiment

                class Top(BaseExperiment, abstract=True):
                    tags = ("top", "all")
                    DEPTH: int = 1
                    WIDTH: int = 1
            """,
            "reg_real/diamond.py": """
                from __future__ import annotations
                import reg_real.parts
                from reg_real import parts as p

                class Left(reg_real.parts.Top):
                    DEPTH: float = 2.0
                    LEFT: str | None = None

                class Right(p.Top):
                    '''
                    Right of the diamond.
                    '''
                    tags = ["right"]
                    DEPTH: str = "3"
                    WIDTH = 4

                class Bottom(Left, Right):
                    LEFT = "x"
            """,
        },
    )
    names = [f"reg_real.diamond.{name}" for name in ("Left", "Right", "Bottom")]
    entries = [find_experiment(name) for name in names] + list_experiments()
    for entry in (e for e in entries if not e.module.startswith("reg_acme")):
        cls = load_experiment(entry)
        assert issubclass(cls, BaseExperiment)
        if entry.complete:
            told = {name: field.annotation for name, field in entry.fields.items()}
            assert told == experiment_fields(cls)
            said = [vars(base).get("tags", ()) for base in cls.__mro__]
            assert set(entry.tags) == set(itertools.chain(*said))
        if not entry.summary.startswith("The same as "):
            assert entry.summary == inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
