"""`--mode=inspect --inspect=parameters`: every weight of an experiment, and what they add up to.

    runner --exp=… --mode=inspect --inspect=parameters                  on the experiment's mesh
    runner --exp=… --mode=inspect --inspect=parameters --num_devices=8  on as many as there will be
    runner --exp=… --mode=inspect --inspect=parameters --json           for programs

All is told by shapes: devices are simulated, and no weight is made.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from layerkit.base_layer import PARAMS
from layerkit.weights import WeightBox, WeightInit, is_box
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import to_usage_error
from layerkit_runner.files.byte_sizes import size_text
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.tools.inspect.built_layers import joint_path, without_number
from layerkit_runner.tools.plan.devices import num_planned_devices, simulated_devices
from layerkit_runner.tools.plan.memory import TensorMemory, tensor_memory
from layerkit_runner.trainer.job import build_parts
from layerkit_runner.training.task import SingleTask

_TOTALS = {
    "weights": "weights in all",
    "frozen": "of them frozen",
    "non_trainable": "non-trainable",
    "optimizer": "optimizer state",
    "averages": "averaged weights",
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A weight, or another variable of the model.

    Attributes:
      path: Path of the layer and the name: `lm/softmax/w`.
      shape: Whole shape, without padding.
      dtype: Name of the dtype.
      axes: A logical axis name or None for each dimension.
      sharding: The mesh axes that split each dimension.
      starts_as: First value in words; "" if it is not declared.
      count: Number of entries.
      bytes_per_device: Size of one shard, with padding.
      is_frozen: Whether it is a weight that is not trained.
    """

    path: str
    shape: list[int]
    dtype: str
    axes: list[str | None]
    sharding: list[list[str]]
    starts_as: str
    count: int
    bytes_per_device: int
    is_frozen: bool


@dataclasses.dataclass(frozen=True)
class Total:
    """Sums over arrays; `bytes` is the size without copies on several devices."""

    count: int
    bytes: int
    bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class ParameterTable:
    """All arrays of a training state; the JSON form has these keys.

    Attributes:
      experiment: Full name.
      num_devices: Devices of the mesh.
      mesh: Size of each mesh axis.
      parameters: Weights, by path.
      non_trainable: Other variables of the model, such as moving statistics.
      modules: Totals of the weights by the first layers at which the model branches.
      totals: Totals of `weights`, `trained` and `frozen` weights, and of the rest of a state:
        `non_trainable`, `optimizer`, `averages`.
      loads: What sets weights before the first step; None for nothing.
      padded: Weights that the mesh does not divide, and their padding; "" for none.
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
    """The table of an experiment as text, or as one JSON object where `options.json` is set.

    Raises:
      UsageError: fields or flags that do not fit together, or a mesh that does not divide a weight.
    """
    partitioner, task = build_parts(resolved)
    count = num_planned_devices(partitioner, num_devices=options.num_devices)
    partitioner.start(simulated_devices(count))
    partitioner.bind(task)
    table = parameter_table(resolved.name, partitioner, task)
    return json.dumps(dataclasses.asdict(table)) if options.json else table_text(table)


def parameter_table(experiment: str, partitioner: Partitioner, task: SingleTask) -> ParameterTable:
    """The table of a task.

    Args:
      experiment: Name, for the head of the table.
      partitioner: Started.
      task: Bound to it.

    Raises:
      UsageError: a layer refuses its fields, or the mesh does not divide a weight.
    """
    try:
        on_devices = partitioner.abstract_state(task)
        state = partitioner.abstract_stored_state(task)
        boxed = jax.eval_shape(lambda: task.model.init_boxed(jax.random.key(0)))
        trained = task.train.learner.trained_weights.select(state.params)
    except ValueError as error:
        raise to_usage_error(error, owner=experiment) from error
    tensors = {tensor.path: tensor for tensor in tensor_memory(on_devices, {}, stored=state)}
    boxes = dict(_by_path(boxed))
    paths = [path for path, _ in _by_path({PARAMS: state.params})]
    frozen_paths = set(paths) - {path for path, _ in _by_path({PARAMS: trained})}

    def rows(prefix: str) -> list[Parameter]:
        return [
            _parameter(path, tensors[path], boxes, is_frozen=path in frozen_paths)
            for path, _ in _by_path({prefix: getattr(state, prefix)})
        ]

    groups = {
        "weights": [tensors[path] for path in paths],
        "trained": [tensors[path] for path in paths if path not in frozen_paths],
        "frozen": [tensors[path] for path in paths if path in frozen_paths],
    }
    for name, fields in (
        ("non_trainable", ("non_trainable", "overwrite_with_gradient")),
        ("optimizer", ("opt_state",)),
        ("averages", ("ema",)),
    ):
        groups[name] = [each for path, each in tensors.items() if path.split("/")[0] in fields]
    loads = task.initial_weights
    return ParameterTable(
        experiment=experiment,
        num_devices=partitioner.mesh.size,
        mesh={str(axis): size for axis, size in partitioner.mesh.shape.items()},
        parameters=rows(PARAMS),
        non_trainable=[*rows("non_trainable"), *rows("overwrite_with_gradient")],
        modules=_module_totals(groups["weights"]),
        totals={name: _total(group) for name, group in groups.items()},
        loads=None if loads is None else type(loads).__qualname__,
        padded=partitioner.padding_text(task),
    )


def _by_path(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves, or boxes, by the names on the way to them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
        names = [getattr(part, "key", getattr(part, "idx", part)) for part in path]
        # The collection of the model and the field of a state differ in this one name.
        yield "/".join(map(str, names)).removeprefix("_"), leaf


def _parameter(
    path: str, tensor: TensorMemory, boxes: dict[str, Any], *, is_frozen: bool
) -> Parameter:
    box = boxes.get(path)
    declared = box if isinstance(box, WeightBox) else None
    return Parameter(
        path=path.partition("/")[2],
        shape=tensor.shape,
        dtype=tensor.dtype,
        axes=[None] * len(tensor.shape) if declared is None else list(declared.axes),
        sharding=tensor.sharding,
        starts_as="" if declared is None else init_in_words(declared.init, declared.fans),
        count=math.prod(tensor.shape),
        bytes_per_device=tensor.bytes_per_device,
        is_frozen=is_frozen,
    )


def init_in_words(init: WeightInit | None, fans: tuple[int, int] | None) -> str:
    """How a weight is drawn, with the numbers worked out.

    >>> init_in_words(WeightInit.FanIn(), (64, 8))
    'normal, deviation 0.125 = 1/√64'
    >>> init_in_words(WeightInit.Constant(1.0), None)
    'ones'

    Args:
      init: None where nobody declared it.
      fans: (fan_in, fan_out); None where nobody declared them.
    """
    if init is None:
        return ""
    scale, (fan_in, fan_out) = init.scale, fans or (1, 1)
    if init.method == "constant":
        return {0.0: "zeros", 1.0: "ones"}.get(scale, f"all {scale:.4g}")
    if init.method == "xavier":
        bound = scale * math.sqrt(6 / (fan_in + fan_out))
        factor = "" if scale == 1 else f"{scale:.4g}·"
        return f"uniform in ±{bound:.3g} = {factor}√(6/({fan_in} + {fan_out}))"
    if init.method == "fan_in":
        return f"normal, deviation {scale / math.sqrt(fan_in):.3g} = {scale:.4g}/√{fan_in}"
    words = {
        "gaussian": f"normal, deviation {scale:.3g}",
        "truncated_gaussian": f"normal, deviation {scale:.3g}, cut at ±{2 * scale:.3g}",
        "uniform": f"uniform in ±{scale:.3g}",
    }
    return words.get(init.method, f"{init.method}, scale {scale:.3g}")


def _module_totals(weights: Sequence[TensorMemory]) -> dict[str, Total]:
    """Totals by the first names at which the paths of the weights branch."""
    paths = [tensor.path.split("/")[1:] for tensor in weights]
    depth = 0
    while paths and all(len(path) > depth + 1 for path in paths):
        if len({path[depth] for path in paths}) > 1:
            break
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


def table_text(table: ParameterTable) -> str:
    """Return the table as text."""
    return "\n".join(_lines(table))


def _lines(table: ParameterTable) -> Iterator[str]:
    mesh = " × ".join(f"{axis} {size}" for axis, size in table.mesh.items())
    yield f"weights of {table.experiment}"
    yield f"on a mesh of {mesh}"
    yield "`embed 512/fsdp`: 512 entries on the logical axis embed, split over the mesh axis fsdp"
    yield ""
    yield from _rows(table.parameters)
    if table.non_trainable:
        yield ""
        yield "not trained, changed by the model itself"
        yield from _rows(table.non_trainable)
    yield ""
    width = max([0, *map(len, table.modules)])
    weights = table.totals["weights"]
    for name, total in table.modules.items():
        share = 100 * total.count / max(weights.count, 1)
        yield f"{name:<{width}}  {total.count:>16,}  {share:5.1f} %  {_sizes(total)}"
    yield ""
    for name, words in _TOTALS.items():
        total = table.totals[name]
        if total.count or name in ("weights", "non_trainable", "optimizer"):
            yield f"{words:<16}  {total.count:>16,}  {_sizes(total)}"
    if table.padded:
        yield f"padded on the devices: {table.padded}"
    if table.loads is not None:
        yield f"task.initial_weights ({table.loads}) sets weights before the first step"


def _sizes(total: Total) -> str:
    return f"{size_text(total.bytes)}, {size_text(total.bytes_per_device)} on each device"


def _rows(parameters: Sequence[Parameter]) -> Iterator[str]:
    """A line for each weight, and one for those of numbered layers that are alike."""
    groups: dict[tuple[str, ...], list[Parameter]] = {}
    for row in parameters:
        starts_as = f"{row.starts_as}{' (frozen)' if row.is_frozen else ''}"
        key = (
            without_number(row.path),
            f"{row.count:,}",
            row.dtype,
            dimensions_text(row),
            starts_as,
        )
        groups.setdefault(key, []).append(row)
    cells = [
        (
            joint_path([row.path for row in group]),
            f"{len(group)} × {count}" if len(group) > 1 else count,
            *others,
        )
        for (_, count, *others), group in groups.items()
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for path, count, dtype, dimensions, starts_as in cells:
        yield (
            f"{path:<{widths[0]}}  {count:>{widths[1]}}  {dtype:<{widths[2]}}"
            f"  {dimensions:<{widths[3]}}  {starts_as}"
        ).rstrip()


def dimensions_text(row: Parameter) -> str:
    """`layers 18 × embed 3072/fsdp × mlp 12288/tensor`; `scalar` for no dimension."""
    parts = []
    for size, axis, split in zip(row.shape, row.axes, row.sharding, strict=True):
        over = "".join(f"/{name}" for name in split)
        parts.append(f"{size}{over}" if axis is None else f"{axis} {size}{over}")
    return " × ".join(parts) or "scalar"
