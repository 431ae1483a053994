"""Errors about an experiment: their fields are written as flags of configuration paths."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import layerkit_runner
from layerkit.config import Config
from layerkit_runner import BaseExperiment, Override
from layerkit_runner.errors import FieldError, UsageError
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.run.job_errors import naming_paths
from layerkit_runner.run.resolve import resolve


@dataclasses.dataclass
class Data:
    """An input."""

    depth: int
    name: str = ""


class Small(BaseExperiment):
    """An experiment on two data sets and a mesh of two devices."""

    LAYERS: int = 3

    def task(self) -> Config:
        return Config(Data, depth=self.LAYERS)

    def datasets(self) -> list[Config]:
        return [Config(Data, depth=self.LAYERS), Config(Data, depth=2, name="heldout")]

    def partitioner(self) -> Config:
        return SpmdPartitioner.HParams.config(ici_mesh_shape=[2, 1, 1])


@pytest.mark.parametrize(
    ("owner", "field", "shown", "shown_owner"),
    [
        (None, "partitioner.ici_mesh_shape", "--fdl.partitioner.ici_mesh_shape", None),
        ("task.train", "num_train_steps", "--fdl.task.train.num_train_steps", None),
        ("Data", "depth", "--fdl.datasets.0.depth", None),
        ("heldout", "depth", "--fdl.datasets.1.depth", None),
        ("Data 'heldout'", "depth", "--fdl.datasets.1.depth", None),
        # No path of a config.
        ("Data", "rows", "rows", "Data"),
        ("Linear(lm)", "depth", "depth", "Linear(lm)"),
        (None, "depth", "depth", None),
        (None, "--exp", "--exp", None),
        (None, None, None, None),
    ],
)
def test_field_of_an_error_is_the_flag_of_its_path(
    raises, owner: str | None, field: str, shown: str, shown_owner: str | None
):
    with raises(UsageError, field=shown, owner=shown_owner), naming_paths(resolve(Small())):
        raise UsageError(owner=owner, field=field, value=3, expected="another value")


def test_mesh_of_other_devices_raises_with_settings_as_flags(raises):
    resolved = resolve(Small())
    settings = {"--fdl.partitioner.ici_mesh_shape": [1, 1, 1]}
    with raises(UsageError, settings=settings), naming_paths(resolved):
        resolved.partitioner.Instantiate().start(jax.devices()[:1])
    override = Override("partitioner.ici_mesh_shape", "[1, 1, 1]")
    resolve(Small(), [override]).partitioner.Instantiate().start(jax.devices()[:1])


def test_unknown_field_in_a_method_raises_with_its_line(raises, monkeypatch: Any):
    class Misspelled(Small):
        def task(self) -> Config:
            return Config(Data, depth=self.LAYRES)  # type: ignore[attr-defined]

    monkeypatch.chdir(Path(__file__).parent)
    line = Misspelled.task.__code__.co_firstlineno + 1
    owner = f"test_resolve.py:{line}: {Misspelled.__qualname__}"
    with raises(FieldError, owner=owner, value="LAYRES", choices=("LAYERS",)):
        resolve(Misspelled())


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
    # Pax has a flag of the first name below, and models of folders a field of the second.
    fields = {name for name in fields if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", name)}
    fields -= {"TFDS_DATA_DIR", "CHAT_TEMPLATE"}
    assert "ICI_MESH_SHAPE" in fields and len(fields) > 80
    root = Path(layerkit_runner.__file__).parent
    named = re.compile(rf"(?<!\w)({'|'.join(sorted(fields))})(?!\w)|layerkit_experiments")
    matches = {
        f"{path.relative_to(root)}: {match[0]}"
        for path in _sources(layerkit_runner)
        for node in _nodes(ast.parse(path.read_text()))
        for text in _texts(node)
        for match in named.finditer(text)
    }
    assert sorted(matches) == []


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
