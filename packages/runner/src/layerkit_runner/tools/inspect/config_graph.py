"""`--mode=inspect --inspect=graph`: the configs of an experiment as a Mermaid flowchart.

A box is a config: the class, then the values that differ from the defaults of the class. An arrow
is a field. Fields of one config that hold equal configs share a box. A box with arrows from
different boxes is one config object in several fields.
(https://mermaid.js.org/syntax/flowchart.html)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from layerkit.config import assigned_fields, target_of
from layerkit_runner.config.config_tree import NOT_SET, children, configs_in, target_name
from layerkit_runner.config.overrides import ROOTS
from layerkit_runner.config.resolve import ResolvedExperiment

_VALUES_SHOWN = 6
_VALUE_LENGTH = 32


@dataclasses.dataclass(frozen=True)
class Node:
    """A box.

    Attributes:
      key: Unique name in the diagram.
      title: Name of the class or function.
      values: Changed values, such as `num_layers = 2`.
      is_class: Whether the config is of a class, not of a function.
    """

    key: str
    title: str
    values: tuple[str, ...]
    is_class: bool = True


@dataclasses.dataclass(frozen=True)
class Edge:
    """An arrow between two boxes, for fields such as `query_tpl` or `datasets.0`."""

    parent: str
    child: str
    fields: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ConfigGraph:
    """Boxes and arrows, from the experiment down."""

    nodes: list[Node]
    edges: list[Edge]


def config_graph(resolved: ResolvedExperiment) -> ConfigGraph:
    """Return the graph of the configs of an experiment, below one box for the experiment."""
    experiment = resolved.experiment
    values = tuple(f"{name} = {_text(value)}" for name, value in experiment.overrides.items())
    graph = ConfigGraph([Node("experiment", type(experiment).__qualname__, values)], [])
    held = [each for root in ROOTS for each in configs_in(getattr(resolved, root), root)]
    _draw(graph, "experiment", held, {})
    return graph


def _draw(graph: ConfigGraph, key: str, held: list[tuple[str, Any]], known: dict[int, str]) -> None:
    """Add the configs that the fields of a box hold, and recursively those below them.

    Args:
      graph: Graph to add to.
      key: Key of the box.
      held: Field names and configs.
      known: Keys of the boxes of configs, by identity.
    """
    groups: list[tuple[Any, list[str]]] = []
    for name, config in held:
        for other, names in groups:
            # Equal parts of an experiment, such as two data sets, have separate boxes.
            if other is config or (key != "experiment" and other == config):
                names.append(name)
                break
        else:
            groups.append((config, [name]))
    for config, names in groups:
        is_new = id(config) not in known
        child = known.setdefault(id(config), f"n{len(graph.nodes)}")
        graph.edges.append(Edge(key, child, tuple(names)))
        if is_new:
            values = tuple(f"{name} = {_text(value)}" for name, value in _set_values(config))
            is_class = isinstance(target_of(config), type)
            graph.nodes.append(Node(child, target_name(config), values, is_class))
            below = [each for name, value in children(config) for each in configs_in(value, name)]
            _draw(graph, child, below, known)


def _set_values(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield fields that differ from the defaults of the class, except those that hold configs."""
    defaults = _defaults(target_of(config))
    for name, value in assigned_fields(config).items():
        if any(configs_in(value)) or value is None or value is NOT_SET:
            continue
        default = defaults.get(str(name), NOT_SET)
        if type(default) is not type(value) or default != value:
            yield str(name), value


def _defaults(target: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(target):
        fields = dataclasses.fields(target)
        made = {
            f.name: f.default_factory for f in fields if f.default_factory in (list, dict, tuple)
        }
        given = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        return {**given, **{name: make() for name, make in made.items() if callable(make)}}
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some built-in types have no signature
        return {}
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _text(value: Any) -> str:
    text = str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in dataclasses.fields(value))
        text = f"{type(value).__name__}({', '.join(map(_text, parts))})"
    elif isinstance(value, float):
        text = f"{value:.4g}"
    elif hasattr(value, "__name__"):
        text = value.__name__
    return text if len(text) <= _VALUE_LENGTH else f"{text[: _VALUE_LENGTH - 1]}…"


def mermaid(graph: ConfigGraph) -> str:
    """Return a graph as the text of a Mermaid flowchart."""
    lines = ["flowchart TD", "  %% A template has a box whether its layer uses it or not."]
    for node in graph.nodes:
        more = len(node.values) - _VALUES_SHOWN
        shown = [node.title, *node.values[:_VALUES_SHOWN]]
        shown += [f"… {more} more"] if more > 0 else []
        label = "<br/>".join(map(_escaped, shown))
        # Functions, such as optimizers and schedules, have round ends.
        lines.append(f'  {node.key}["{label}"]' if node.is_class else f'  {node.key}(["{label}"])')
    for edge in graph.edges:
        lines.append(f'  {edge.parent} -->|"{_escaped(", ".join(edge.fields))}"| {edge.child}')
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return a label with entity codes for characters that end it or are read as HTML."""
    for character, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(character, code)
    return text
