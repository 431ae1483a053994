"""Fields of an experiment that are found behind configuration paths."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import layerkit_runner
from layerkit.config import Config
from layerkit_runner import BaseExperiment, Override
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.run.resolve import naming_flags, override_path, resolve, source_field


@dataclasses.dataclass
class Model:
    """A model with fields of each kind."""

    depth: int = 2
    width: int = 2
    rate: float = 0.5
    name: str = "a"
    half: int = 1
    is_causal: bool = True
    bias: str | None = None
    sizes: list[int] | None = None
    limit: int = 7


@dataclasses.dataclass
class Data:
    """An input."""

    depth: int


class Named(BaseExperiment):
    """Fields with other names than those that they set, and equal values."""

    LAYERS: int = 3
    DIMS: int = 3
    LR: float = 0.25
    TITLE: str = "lm"
    IS_CAUSAL: bool = False
    BIAS: str | None = None
    MESH: list[int] = [2, 1, 1]
    LIMIT: int = 9

    def task(self) -> Config:
        return Config(
            Model,
            depth=self.LAYERS,
            width=self.DIMS,
            rate=self.LR,
            name=self.TITLE,
            half=self.DIMS // 2,
            is_causal=self.IS_CAUSAL,
            bias=self.BIAS,
            sizes=[*self.MESH],
        )

    def datasets(self) -> list[Config]:
        return [Config(Data, depth=self.LAYERS)]

    def partitioner(self) -> Config:
        return SpmdPartitioner.HParams.config(ici_mesh_shape=self.MESH)


class Fixed(BaseExperiment):
    """No field for the mesh, which is written into the method."""

    LAYERS: int = 2

    def task(self) -> Config:
        return Config(Model, depth=self.LAYERS)

    def datasets(self) -> list[Config]:
        return []

    def partitioner(self) -> Config:
        return SpmdPartitioner.HParams.config(ici_mesh_shape=[2, 1, 1])


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("task.depth", "LAYERS"),
        ("task.width", "DIMS"),
        ("task.rate", "LR"),
        ("task.name", "TITLE"),
        ("task.sizes", "MESH"),
        ("task.is_causal", "IS_CAUSAL"),
        ("task.bias", "BIAS"),
        ("datasets.0.depth", "LAYERS"),
        ("partitioner.ici_mesh_shape", "MESH"),
        # Derived from a field, the class's own default, or no path.
        ("task.half", None),
        ("task.limit", None),
        ("task", None),
        ("task.lost", None),
        ("tsk.depth", None),
    ],
)
def test_path_maps_to_the_field_that_gives_its_value(path: str, field: str | None):
    resolved = resolve(Named())
    assert source_field(resolved, path) == field
    assert override_path(resolved, path) == (field or path)


def test_path_that_an_override_sets_has_no_field():
    resolved = resolve(Named(), [Override("task.depth", "5")])
    assert source_field(resolved, "task.depth") is None
    assert source_field(resolved, "task.width") == "DIMS"


@pytest.mark.parametrize(
    ("data", "field", "owner"),
    [
        ({"field": "task.depth", "value": 3}, "--fdl.LAYERS", None),
        (
            {"owner": "partitioner", "field": "ici_mesh_shape", "value": [2, 1, 1]},
            "--fdl.MESH",
            None,
        ),
        ({"owner": "task", "field": "rate", "value": 0.25}, "--fdl.LR", None),
        ({"owner": "Named: task", "field": "half", "value": 1}, "--fdl.task.half", "Named"),
        ({"owner": "Data", "field": "depth", "value": 3}, "--fdl.LAYERS", "Data"),
        # Another value, field or owner than one of the configs.
        ({"owner": "Data", "field": "depth", "value": 4}, "depth", "Data"),
        ({"owner": "Data", "field": "rows", "value": 3}, "rows", "Data"),
        ({"owner": "Linear(lm)", "field": "depth", "value": 3}, "depth", "Linear(lm)"),
    ],
)
def test_field_of_an_error_becomes_the_flag_that_sets_it(
    raises, data: dict[str, Any], field: str, owner: str | None
):
    with raises(UsageError, field=field, owner=owner), naming_flags(resolve(Named())):
        raise UsageError(expected="another value", **data)


@pytest.mark.parametrize(
    ("experiment", "flag"), [(Named, "--fdl.MESH"), (Fixed, "--fdl.partitioner.ici_mesh_shape")]
)
def test_error_about_the_mesh_names_what_the_experiment_has(
    experiment: type[BaseExperiment], flag: str, raises
):
    import jax

    resolved = resolve(experiment())
    with raises(UsageError, settings={flag: [1, 1, 1]}), naming_flags(resolved):
        resolved.partitioner.Instantiate().start(jax.devices()[:1])


def test_settings_of_an_error_become_flags_together(raises):
    flags = {"--fdl.DIMS": 4, "--fdl.LR": 0.5}
    with raises(UsageError, settings=flags), naming_flags(resolve(Named())):
        raise UsageError("does not fit.", settings={"width": 4, "rate": 0.5, "depth": 3})


def test_runner_names_no_field_and_no_module_of_the_experiments():
    experiments = pytest.importorskip("layerkit_experiments")
    trees = [ast.parse(path.read_text()) for path in _sources(experiments)]
    fields = {
        statement.target.id
        for tree in trees
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
        for statement in cls.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    fields = {name for name in fields if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", name)}
    assert "ICI_MESH_SHAPE" in fields and len(fields) > 80
    root = Path(layerkit_runner.__file__).parent
    named = re.compile(rf"(?<!\w)({'|'.join(sorted(fields))})(?!\w)|layerkit_experiments")
    found = [
        f"{path.relative_to(root)}: {match[0]}"
        for path in _sources(layerkit_runner)
        for node in _nodes(ast.parse(path.read_text()))
        for text in _texts(node)
        for match in named.finditer(text)
    ]
    assert sorted(set(found)) == []


def _sources(package: Any) -> list[Path]:
    return sorted(Path(package.__file__).parent.rglob("*.py"))


def _nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes but docstrings, whose examples show what fields look like."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [node for node in nodes if id(node) not in docstrings]


def _texts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    names = (getattr(node, name, None) for name in ("id", "attr", "arg", "name", "module"))
    return [name for name in names if isinstance(name, str)]
