"""`--mode=inspect --inspect=layers` and `--inspect=parameters`: the model of an experiment.

    layers        every layer, with the values of its fields
    parameters    every weight, with its shape, sharding and size, and totals

The configuration has templates. This mode builds layers from them, with the sizes that outer layers
set and the dtypes that they inherit. Devices are simulated, and no weight is made.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from layerkit.base.base_layer import INHERITED_FIELDS, PARAMS, BaseLayer, visit_layers
from layerkit.base.base_model import BaseModel
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import WeightInit, floating_dtype, is_box
from layerkit.config import field_names, is_config
from layerkit_runner.config.config_tree import Name, target_name, value_text
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.errors import as_usage_error
from layerkit_runner.files.text import draw_table, size_text
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.run.job import build_parts
from layerkit_runner.run_options import RunOptions
from layerkit_runner.step.task import SingleTask
from layerkit_runner.tools.pages.page import render_page, write_page
from layerkit_runner.tools.pages.shards import dimension_names, weight_table
from layerkit_runner.tools.plan.memory import TensorMemory, join_layers, tensor_memory
from layerkit_runner.tools.plan.targets import start_simulated

_TOTALS = {
    "weights": "weights in all",
    "frozen": "of them frozen",
    "non_trainable": "non-trainable",
    "optimizer": "optimizer state",
    "averages": "averaged weights",
}
# Fields of the training state by the name of their total.
_STATE_FIELDS = {
    "non_trainable": ("non_trainable", "overwrite_with_gradient"),
    "optimizer": ("opt_state",),
    "averages": ("ema", "ema_statistics"),
}


def describe_layers(resolved: ResolvedExperiment, options: RunOptions) -> str:
    """Return the layers of an experiment as text, outer ones first."""
    _, task = _bound_parts(resolved, options)
    with as_usage_error(ValueError):
        layers = built_layers(task.model)
    lines = [f"layers of {resolved.name}"]
    for path, fields in layers.items():
        indent = "  " * (path.count("/") + 1) if path else ""
        lines += ["", f"{indent}{path or 'task.model'}: {fields.pop('class')}"]
        lines += [f"{indent}  {name} = {value_text(value)}" for name, value in fields.items()]
    return "\n".join(lines)


def built_layers(model: BaseModel) -> dict[str, dict[str, Any]]:
    """Return the class and the fields of each layer by its path. A repeated body is one layer.

    `train` is None unless a layer sets it, since training and evaluation each set it.
    """
    layers: dict[str, dict[str, Any]] = {}

    def record(layer: BaseLayer) -> None:
        names = [name for name in field_names(type(layer)) if name not in ("name", "sharding")]
        named = {name: _named(_value(layer, name)) for name in names}
        layers.setdefault("/".join(layer.path), {"class": type(layer).__qualname__, **named})

    visit_layers(model, record)
    return layers


def _value(layer: BaseLayer, name: str) -> Any:
    """Return the effective value of a field, which an outer layer or a default may give."""
    value = layer.inherited(name) if name in INHERITED_FIELDS else getattr(layer, name)
    if name in ("dtype", "fprop_dtype"):
        return floating_dtype(value, field=name, owner=layer.path_name).name
    return value or WeightInit.Xavier() if name == "params_init" else value


def _named(value: Any) -> Any:
    """Return the value with layers and templates replaced by the names of their classes."""
    if is_config(value):
        return Name(target_name(value))
    if isinstance(value, (nn.Module, BoundSharding)):
        return Name(type(value).__qualname__)
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_named(item) for item in value)
    return value


def _bound_parts(
    resolved: ResolvedExperiment, options: RunOptions
) -> tuple[Partitioner, SingleTask]:
    """Return the partitioner of an experiment on simulated devices, and the task bound to it."""
    partitioner, task = build_parts(resolved)
    start_simulated(partitioner, num_devices=options.num_devices)
    partitioner.bind(task)
    return partitioner, task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter(TensorMemory):
    """A weight, or another variable of the model; `count` is without padding."""

    axes: list[str | None]
    starts_as: str
    count: int
    is_frozen: bool


@dataclasses.dataclass(frozen=True)
class Total:
    """Sums over arrays. `bytes` counts an array once, however many devices have a copy."""

    count: int
    bytes: int
    bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class ParameterTable:
    """All arrays of a training state. The JSON form has these keys.

    `modules` are totals by the first layers at which the model branches, and `totals` those of
    weights and of the rest of a state. `loads` is the class that sets weights before the first
    step.
    """

    experiment: str
    num_devices: int
    mesh: dict[str, int]
    parameters: list[Parameter]
    non_trainable: list[Parameter]
    modules: dict[str, Total]
    totals: dict[str, Total]
    loads: str | None
    padded: str


def describe_parameters(resolved: ResolvedExperiment, options: RunOptions) -> str:
    """Return the table of an experiment as text, or as JSON if `options.json` is set."""
    partitioner, task = _bound_parts(resolved, options)
    table = parameter_table(resolved.name, partitioner, task)
    if options.html:
        write_page(options.html, table_html(table, [*partitioner.mesh.device_ids.flat]))
    return json.dumps(dataclasses.asdict(table)) if options.json else table_text(table)


def parameter_table(experiment: str, partitioner: Partitioner, task: SingleTask) -> ParameterTable:
    """Return the table of a task that is bound to a started partitioner."""
    with as_usage_error(ValueError):
        on_devices = partitioner.abstract_state(task)
        state = partitioner.abstract_stored_state(task)
        boxes = dict(_sort_paths(jax.eval_shape(lambda: task.model.init_boxed(jax.random.key(0)))))
        trained = task.train.learner.trained_weights.select(state.params)
    tensors = {tensor.path: tensor for tensor in tensor_memory(on_devices, {}, stored=state)}
    paths = [path for path, _ in _sort_paths({PARAMS: state.params})]
    frozen_paths = set(paths) - {path for path, _ in _sort_paths({PARAMS: trained})}

    def rows(field: str) -> list[Parameter]:
        return [
            _parameter(tensors[path], boxes.get(path), is_frozen=path in frozen_paths)
            for path, _ in _sort_paths({field: getattr(state, field)})
        ]

    groups = {
        "weights": [tensors[path] for path in paths],
        "trained": [tensors[path] for path in paths if path not in frozen_paths],
        "frozen": [tensors[path] for path in paths if path in frozen_paths],
    }
    for name, fields in _STATE_FIELDS.items():
        groups[name] = [tensor for path, tensor in tensors.items() if path.split("/")[0] in fields]
    loads = task.initial_weights
    return ParameterTable(
        experiment=experiment,
        num_devices=partitioner.mesh.size,
        mesh={str(axis): size for axis, size in partitioner.mesh.shape.items()},
        parameters=rows(PARAMS),
        non_trainable=[row for field in _STATE_FIELDS["non_trainable"] for row in rows(field)],
        modules=_module_totals(groups["weights"]),
        totals={name: _total(group) for name, group in groups.items()},
        loads=None if loads is None else type(loads).__qualname__,
        padded=partitioner.padding_text(task),
    )


def _sort_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of leaves, or of boxes of leaves."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # A collection of the model may start with `_`, which the field of a state lacks.
        yield name.removeprefix("_"), leaf


def _parameter(tensor: TensorMemory, box: Any, *, is_frozen: bool) -> Parameter:
    return Parameter(
        **{**dataclasses.asdict(tensor), "path": tensor.path.partition("/")[2]},
        axes=list(getattr(box, "axes", [None] * len(tensor.shape))),
        starts_as=f"{init.method} {init.scale:.3g}" if (init := getattr(box, "init", None)) else "",
        count=math.prod(tensor.shape),
        is_frozen=is_frozen,
    )


def _module_totals(weights: Sequence[TensorMemory]) -> dict[str, Total]:
    """Return totals by the first names at which the paths of the weights branch."""
    paths = [tensor.path.split("/")[1:] for tensor in weights]
    depth = 0
    while all(len(path) > depth + 1 for path in paths) and len({p[depth] for p in paths}) == 1:
        depth += 1
    modules: dict[str, list[TensorMemory]] = {}
    for path, tensor in zip(paths, weights, strict=True):
        modules.setdefault("/".join(path[: depth + 1]), []).append(tensor)
    return {name: _total(group) for name, group in modules.items()}


def _total(tensors: Sequence[TensorMemory]) -> Total:
    counts = [math.prod(tensor.shape) for tensor in tensors]
    sizes = [jax.numpy.dtype(tensor.dtype).itemsize for tensor in tensors]
    return Total(
        count=sum(counts),
        bytes=sum(count * size for count, size in zip(counts, sizes, strict=True)),
        bytes_per_device=sum(tensor.bytes_per_device for tensor in tensors),
    )


def table_html(table: ParameterTable, devices: Sequence[int]) -> str:
    """Return the table as a page; `devices` are their numbers, in row-major order of the mesh."""
    groups = {"trained or frozen": table.parameters, "changed by the model": table.non_trainable}
    return render_page(
        "inspect/parameters.html.jinja",
        title=f"weights of {table.experiment}",
        table=table,
        sums=[[*_module_rows(table)], [*_total_rows(table.totals)]],
        weights={n: weight_table(_rows(p), table.mesh, devices) for n, p in groups.items() if p},
    )


def table_text(table: ParameterTable) -> str:
    """Return the table as text."""
    lines = [
        f"weights of {table.experiment}",
        f"on a mesh of {' × '.join(f'{axis} {size}' for axis, size in table.mesh.items())}",
        "`embed 512/fsdp`: 512 entries on the logical axis embed, split over the mesh axis fsdp",
        "",
        *draw_table(_rows(table.parameters), right=[1]),
        "",
    ]
    if table.non_trainable:
        rows = draw_table(_rows(table.non_trainable), right=[1])
        lines += ["not trained, changed by the model itself", *rows, ""]
    lines += draw_table(_module_rows(table), right=[1, 2])
    lines += ["", *draw_table(_total_rows(table.totals), right=[1])]
    if table.padded:
        lines.append(f"padded on the devices: {table.padded}")
    if table.loads is not None:
        lines.append(f"task.initial_weights ({table.loads}) sets weights before the first step")
    return "\n".join(lines)


def _module_rows(table: ParameterTable) -> Iterator[tuple[str, ...]]:
    in_all = max(table.totals["weights"].count, 1)
    for name, total in table.modules.items():
        share = f"{100 * total.count / in_all:.1f} %"
        yield name, f"{total.count:,}", share, *_size_texts(total)


def _total_rows(totals: Mapping[str, Total]) -> Iterator[tuple[str, ...]]:
    for name, words in _TOTALS.items():
        total = totals[name]
        if total.count or name in ("weights", "non_trainable", "optimizer"):
            yield words, f"{total.count:,}", *_size_texts(total)


def _size_texts(total: Total) -> tuple[str, str]:
    return size_text(total.bytes), f"{size_text(total.bytes_per_device)} on each device"


def _rows(parameters: Sequence[Parameter]) -> dict[tuple[str, ...], list[Parameter]]:
    """Return weights by the texts about them; equal weights of numbered layers share a row."""

    def texts(row: Parameter) -> tuple[str, ...]:
        dimensions = " × ".join(dimension_names(row.shape, row.sharding, row.axes))
        starts_as = f"{row.starts_as}{' (frozen)' if row.is_frozen else ''}"
        return f"{row.count:,}", row.dtype, dimensions or "scalar", starts_as

    return join_layers(parameters, texts)
