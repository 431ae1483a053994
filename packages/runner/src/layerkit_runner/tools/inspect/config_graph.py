"""`--mode=inspect --inspect=graph`: the configs of an experiment as a Mermaid flowchart.

A box is a config: the class, then the values that differ from the defaults of the class. An arrow
is a field. Fields of one config that hold equal configs share a box. A box with arrows from
different boxes is one config object in several fields.
(https://mermaid.js.org/syntax/flowchart.html)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from layerkit.config import assigned_fields, target_of
from layerkit_runner.config.config_text import value_text
from layerkit_runner.config.config_tree import NOT_SET, children, configs_in, target_name
from layerkit_runner.config.overrides import ROOTS
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.files.text import cut

_VALUES_SHOWN = 6
_VALUE_LENGTH = 32


class Node(NamedTuple):
    """A box: a unique key, the name of the class or function, and values as `num_layers = 2`."""

    key: str
    title: str
    values: tuple[str, ...]
    is_class: bool = True


class Edge(NamedTuple):
    """An arrow between the boxes of two keys, for fields such as `query_tpl` or `datasets.0`."""

    parent: str
    child: str
    fields: tuple[str, ...]


class ConfigGraph(NamedTuple):
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
            is_class = isinstance(target_of(config), type)
            values = tuple(_set_values(config))
            graph.nodes.append(Node(child, target_name(config), values, is_class))
            below = [each for name, value in children(config) for each in configs_in(value, name)]
            _draw(graph, child, below, known)


def _set_values(config: Any) -> Iterator[str]:
    """Yield the fields that differ from the defaults of the class and hold no config."""
    target = target_of(config)
    try:
        parameters = dict(inspect.signature(target).parameters)
    except ValueError:  # some built-in types have no signature
        parameters = {}
    for name, value in assigned_fields(config).items():
        default = parameters[name].default if name in parameters else NOT_SET
        is_default = type(default) is type(value) and default == value
        if not (is_default or value is None or value is NOT_SET or any(configs_in(value))):
            yield f"{name} = {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return cut(value, _VALUE_LENGTH)
    return cut(getattr(value, "__name__", None) or value_text(value), _VALUE_LENGTH)


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
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;"}
    return "".join(codes.get(character, character) for character in text)
