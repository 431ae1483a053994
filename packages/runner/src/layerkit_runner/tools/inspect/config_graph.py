"""`--mode=inspect --inspect=graph`: the configs of an experiment as a Mermaid diagram.

GitHub, GitLab and many editors draw it where it stands in a Markdown file between three backquotes
and `mermaid`; https://mermaid.live draws it as well.

A box is a config: the class, then the values that were set and are not the class's own defaults.
An arrow is a field. Fields of one config that hold equal configs share a box, and the arrow says
which they are and how often the layer is made. A box with several arrows from different places is
one config object in several fields. (https://mermaid.js.org/syntax/flowchart.html)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from layerkit.config import assigned_fields, field_names, target_of
from layerkit_runner.config.config_tree import NOT_SET, configs_in, field_value, target_name
from layerkit_runner.config.overrides import ROOTS
from layerkit_runner.config.resolve import ResolvedExperiment

_VALUES_SHOWN = 6
_VALUE_LENGTH = 32

# Where a class repeats the layer of one field, the field that says how often.
_REPEATED = {"layer_tpl": "num_layers", "block_tpls": "num_layers", "sub_tpl": "num_repeats"}


@dataclasses.dataclass(frozen=True)
class Node:
    """A box.

    Attributes:
      key: Unique in the diagram.
      title: Name of the class or function.
      values: `name = value` of what was set.
      more: How many such values are not shown.
      is_class: False for a function.
    """

    key: str
    title: str
    values: tuple[str, ...]
    more: int
    is_class: bool


@dataclasses.dataclass(frozen=True)
class Edge:
    """An arrow from the box of `parent` to that of `child`.

    Attributes:
      parent: Key.
      child: Key.
      fields: Names of the fields, such as `query_tpl` or `datasets.0`.
      count: How often the layer is repeated.
    """

    parent: str
    child: str
    fields: tuple[str, ...]
    count: int = 1


@dataclasses.dataclass(frozen=True)
class ConfigGraph:
    """Boxes and arrows, from the experiment down."""

    nodes: list[Node]
    edges: list[Edge]


def config_graph(resolved: ResolvedExperiment) -> ConfigGraph:
    """The graph of all that an experiment resolves to, below one box for the experiment."""
    experiment = resolved.experiment
    values = [f"{name} = {_text(value)}" for name, value in experiment.overrides.items()]
    root = Node("experiment", type(experiment).__qualname__, *_shown(values), is_class=True)
    drawing = _Drawing([root], [], {})
    held = [
        (name, value)
        for field in ROOTS
        for name, value in configs_in(getattr(resolved, field), field)
    ]
    drawing.add_children("experiment", held, num_layers=None, parent=None)
    return ConfigGraph(drawing.nodes, drawing.edges)


@dataclasses.dataclass
class _Drawing:
    nodes: list[Node]
    edges: list[Edge]
    # Boxes by the identity of their config, which lives as long as the experiment does.
    known: dict[int, str]

    def add_children(
        self, key: str, held: list[tuple[str, Any]], *, num_layers: int | None, parent: Any
    ) -> None:
        """Draws the configs that the fields of a box hold.

        Args:
          key: Of the box.
          held: Field name and config.
          num_layers: Depth that the nearest config above says; stacks are told it when they are
            built.
          parent: The config of the box; None for the experiment.
        """
        groups: list[tuple[Any, list[str]]] = []
        for name, config in held:
            for other, names in groups:
                if other is config or (_may_share_box(names[0], name) and other == config):
                    names.append(name)
                    break
            else:
                groups.append((config, [name]))
        for config, names in groups:
            count = 1 if parent is None else _repeats(parent, names, num_layers)
            child = self.known.get(id(config))
            is_new = child is None
            child = child or self.add_box(config)
            self.edges.append(Edge(key, child, tuple(names), count))
            if is_new:
                self.add_held(child, config, num_layers)

    def add_box(self, config: Any) -> str:
        """Draws the box of a config; returns its key."""
        key = self.known[id(config)] = f"n{len(self.nodes)}"
        values = [f"{name} = {_text(value)}" for name, value in _set_values(config)]
        is_class = isinstance(target_of(config), type)
        self.nodes.append(Node(key, target_name(config), *_shown(values), is_class=is_class))
        return key

    def add_held(self, key: str, config: Any, num_layers: int | None) -> None:
        """Draws what a config holds, below its box."""
        own = assigned_fields(config).get("num_layers")
        depth = own if isinstance(own, int) else num_layers
        names = dict.fromkeys([*field_names(config), *assigned_fields(config)])
        if "block_tpls" in names and any(configs_in(field_value(config, "block_tpls"))):
            del names["layer_tpl"]  # a pattern of layers stands in its place
        held = [each for name in names for each in configs_in(field_value(config, name), str(name))]
        self.add_children(key, held, num_layers=depth, parent=config)


def _may_share_box(name: str, other: str) -> bool:
    """Whether fields of one config may share a box for their equal configs.

    Those of an experiment are things of their own, and so are layers that are repeated otherwise.
    """
    field, of_other = name.partition(".")[0], other.partition(".")[0]
    if field in ROOTS or of_other in ROOTS:
        return False
    return _REPEATED.get(field) == _REPEATED.get(of_other)


def _repeats(parent: Any, names: list[str], num_layers: int | None) -> int:
    """How often the layer of some fields is made, as far as the configs tell."""
    field = names[0].partition(".")[0]
    counted_by = _REPEATED.get(field)
    if counted_by is None or counted_by not in field_names(parent):
        return 1
    count = num_layers if counted_by == "num_layers" else field_value(parent, counted_by)
    if not isinstance(count, int):
        return 1
    if field != "block_tpls":
        return count
    # Layer i is block i % period.
    period = len(field_value(parent, field))
    blocks = {int(name.partition(".")[2]) for name in names}
    return sum(layer % period in blocks for layer in range(count))


def _set_values(config: Any) -> Iterator[tuple[str, Any]]:
    """Fields that were given another value than the class has, without those that hold configs."""
    defaults = _defaults(target_of(config))
    for name, value in assigned_fields(config).items():
        if any(configs_in(value)) or value is None or value is NOT_SET:
            continue
        default = defaults.get(str(name), NOT_SET)
        if type(default) is type(value) and default == value:
            continue
        yield str(name), value


def _defaults(target: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(target):
        defaults: dict[str, Any] = {}
        for field in dataclasses.fields(target):
            make: Any = field.default_factory
            if field.default is not dataclasses.MISSING:
                defaults[field.name] = field.default
            elif make in (list, dict, tuple):
                defaults[field.name] = make()
        return defaults
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some built-in types do not tell theirs
        return {}
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _shown(values: list[str]) -> tuple[tuple[str, ...], int]:
    return tuple(values[:_VALUES_SHOWN]), max(0, len(values) - _VALUES_SHOWN)


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
    """The graph as the text of a Mermaid flowchart."""
    return "\n".join(_mermaid_lines(graph))


def _mermaid_lines(graph: ConfigGraph) -> Iterator[str]:
    yield "flowchart TD"
    yield "  %% A template has a box whether its layer makes use of it or not."
    for node in graph.nodes:
        more = [f"… {node.more} more"] if node.more else []
        label = "<br/>".join([*map(_escaped, (node.title, *node.values)), *more])
        # Functions, such as optimizers and schedules, have round ends.
        yield f'  {node.key}["{label}"]' if node.is_class else f'  {node.key}(["{label}"])'
    for edge in graph.edges:
        times = f" ×{edge.count}" if edge.count > 1 else ""
        label = _escaped(f"{_joined(edge.fields)}{times}")
        yield f'  {edge.parent} -->|"{label}"| {edge.child}'


def _joined(fields: tuple[str, ...]) -> str:
    """`query_tpl, key_tpl`; of a list, `block_tpls.0 to 4` where they follow each other."""
    stems = {field.rpartition(".")[0] for field in fields}
    numbers = [field.rpartition(".")[2] for field in fields]
    if len(fields) > 2 and len(stems) == 1 and all(map(str.isdecimal, numbers)):
        first, last = int(numbers[0]), int(numbers[-1])
        if list(map(int, numbers)) == list(range(first, last + 1)):
            return f"{stems.pop()}.{first} to {last}"
    return ", ".join(fields)


def _escaped(text: str) -> str:
    """Text in a label: Mermaid takes entity codes for what would end it or be read as HTML."""
    for character, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(character, code)
    return text
