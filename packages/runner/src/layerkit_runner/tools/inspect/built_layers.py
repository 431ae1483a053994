"""`--mode=inspect --inspect=layers`: every layer of a model with the values of its fields.

The configuration has templates. This mode builds layers from them, with the sizes that outer layers
set and the dtypes that they inherit. `train` is None unless a layer sets it, since training and
evaluation each set it. Devices are simulated, and no weight is made.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from layerkit.base_layer import INHERITED_FIELDS, BaseLayer
from layerkit.base_model import BaseModel
from layerkit.config import field_names, is_config
from layerkit.sharding import BoundSharding
from layerkit.weights import check_init, floating_dtype
from layerkit_runner.config.config_text import Name, plain_value, value_text
from layerkit_runner.config.config_tree import target_name
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import to_usage_error
from layerkit_runner.partitioning import Partitioner
from layerkit_runner.tools.plan.devices import start_simulated
from layerkit_runner.trainer.job import build_parts
from layerkit_runner.training.task import SingleTask

# The number of a layer in a list: the 3 of `layers_3`.
_NUMBER = re.compile(r"(?<=_)\d+(?=/|$)")

# Fields of every layer, without the name, which is in its path.
_COMMON = [name for name in field_names(BaseLayer) if name != "name"]


@dataclasses.dataclass(frozen=True)
class BuiltLayer:
    """A layer of a model.

    Attributes:
      path: Path of names, such as `lm/softmax`; "" for the model itself.
      cls: Class of the layer.
      fields: Values of the fields of its class, then of those that every layer has. `sharding` is
        left out if it is that of the model. A layer or template is the name of its class.
      changed: Names of the fields that differ from the defaults of the class.
    """

    path: str
    cls: type[BaseLayer]
    fields: dict[str, Any]
    changed: frozenset[str]


def describe_layers(resolved: ResolvedExperiment, options: RunOptions) -> str:
    """Return the layers of an experiment as text, or as JSON if `options.json` is set.

    Raises:
      UsageError: Fields or flags do not fit together.
    """
    partitioner, task = simulated_parts(resolved, num_devices=options.num_devices)
    try:
        layers = built_layers(task.model)
    except ValueError as error:
        raise to_usage_error(error, owner=resolved.name) from error
    mesh = {str(axis): size for axis, size in partitioner.mesh.shape.items()}
    if options.json:
        described = [
            {
                "path": layer.path,
                "class": f"{layer.cls.__module__}.{layer.cls.__qualname__}",
                "fields": {name: plain_value(value) for name, value in layer.fields.items()},
                "changed": [name for name in layer.fields if name in layer.changed],
            }
            for layer in layers
        ]
        return json.dumps({"experiment": resolved.name, "mesh": mesh, "layers": described})
    return "\n".join(_lines(resolved.name, mesh, layers))


def simulated_parts(
    resolved: ResolvedExperiment, *, num_devices: int | None
) -> tuple[Partitioner, SingleTask]:
    """Return the partitioner, started on simulated devices, and the task, bound to it.

    Raises:
      UsageError: Fields do not fit together, or `num_devices` contradicts the mesh.
    """
    partitioner, task = build_parts(resolved)
    start_simulated(partitioner, num_devices=num_devices)
    partitioner.bind(task)
    return partitioner, task


def built_layers(model: BaseModel) -> list[BuiltLayer]:
    """Return the layers of a model, outer ones first. A repeated body is one layer.

    Raises:
      ValueError: A field of a layer is wrong.
    """
    found: dict[str, BaseLayer] = {}

    def record(
        call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        layer = context.module
        # It is called on every layer, also inside of a scan.
        if isinstance(layer, BaseLayer) and context.method_name == "create_weights":
            found.setdefault("/".join(layer.path), layer)
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(lambda: model.init_boxed(jax.random.key(0)))
    return [_built_layer(path, layer, model.sharding) for path, layer in found.items()]


def _built_layer(path: str, layer: BaseLayer, sharding: BoundSharding | None) -> BuiltLayer:
    cls = type(layer)
    defaults = {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(cls)
    }
    names = [name for name in field_names(cls) if name not in (*_COMMON, "name")]
    fields = {name: getattr(layer, name) for name in (*names, *_COMMON)}
    for name in INHERITED_FIELDS:
        # Without a value of an outer layer, a field has the default of its kind.
        fields[name] = _effective(name, layer.inherited(name), owner=layer.path_name)
        defaults[name] = _effective(name, defaults[name], owner=layer.path_name)
    if path and fields["sharding"] == sharding:
        del fields["sharding"]
    changed = frozenset(name for name in fields if _differ(fields[name], defaults[name]))
    named = {name: _named(value) for name, value in fields.items()}
    return BuiltLayer(path, cls, named, changed)


def _differ(value: Any, default: Any) -> bool:
    if isinstance(value, nn.Module):  # its fields are listed separately
        return type(value) is not type(default)
    if isinstance(value, (np.ndarray, jax.Array)):
        return not np.array_equal(value, default)
    return bool(value != default)


def _effective(name: str, value: Any, *, owner: str) -> Any:
    """Return the effective value of an inherited field, which may be None."""
    if name in ("dtype", "fprop_dtype"):
        return floating_dtype(value, field=name, owner=owner).name
    return check_init(value, owner=owner, field=name) if name == "params_init" else value


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


def _lines(experiment: str, mesh: dict[str, int], layers: Sequence[BuiltLayer]) -> Iterator[str]:
    yield f"layers of {experiment}"
    yield f"on a mesh of {' × '.join(f'{axis} {size}' for axis, size in mesh.items())}"
    yield "`*`: differs from the default of the class"
    groups: dict[tuple[Any, ...], list[BuiltLayer]] = {}  # layers that differ only in their number
    for layer in layers:
        values = tuple(map(value_text, layer.fields.values()))
        key = (without_number(layer.path), layer.cls, values, layer.changed)
        groups.setdefault(key, []).append(layer)
    for group in groups.values():
        layer = group[0]
        depth = "  " * (len(layer.path.split("/")) if layer.path else 0)
        yield ""
        path = joint_path([each.path for each in group])
        yield f"{depth}{path or 'task.model'}: {layer.cls.__qualname__}"
        for name, value in layer.fields.items():
            mark = "*" if name in layer.changed else " "
            yield f"{depth}  {mark} {name} = {value_text(value)}"


def without_number(path: str) -> str:
    """Return a path with `#` for its number, or a path with several numbers unchanged."""
    return path if len(_NUMBER.findall(path)) > 1 else _NUMBER.sub("#", path)


def joint_path(paths: Sequence[str]) -> str:
    """Return one path for several that differ in one number.

    >>> joint_path(["stack/layers_0/w", "stack/layers_1/w", "stack/layers_2/w"])
    'stack/layers_0…2/w'
    >>> joint_path(["stack/layers_0/w", "stack/layers_2/w"])
    'stack/layers_0,2/w'
    """
    if len(paths) == 1:
        return paths[0]
    numbers = sorted(int(_NUMBER.findall(path)[0]) for path in paths)
    lowest, highest = numbers[0], numbers[-1]
    is_range = numbers == list(range(lowest, highest + 1))
    text = f"{lowest}…{highest}" if is_range else ",".join(map(str, numbers))
    return _NUMBER.sub(text, paths[0])
