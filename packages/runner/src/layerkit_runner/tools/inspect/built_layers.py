"""`--mode=inspect --inspect=layers`: every layer of a model with the values of its fields.

The configuration has templates. This mode builds layers from them, with the sizes that outer layers
set and the dtypes that they inherit. `train` is None unless a layer sets it, since training and
evaluation each set it. Devices are simulated, and no weight is made.
"""

from __future__ import annotations

from typing import Any

from flax import linen as nn

from layerkit.base_layer import INHERITED_FIELDS, BaseLayer
from layerkit.base_model import BaseModel
from layerkit.config import field_names, is_config
from layerkit.layer_visits import visit_layers
from layerkit.sharding import BoundSharding
from layerkit.weights import check_init, floating_dtype
from layerkit_runner.config.config_text import Name, value_text
from layerkit_runner.config.config_tree import target_name
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import ResolvedExperiment
from layerkit_runner.errors import as_usage_error
from layerkit_runner.tools.plan.devices import start_simulated
from layerkit_runner.trainer.job import build_parts


def describe_layers(resolved: ResolvedExperiment, options: RunOptions) -> str:
    """Return the layers of an experiment as text, outer ones first."""
    partitioner, task = build_parts(resolved)
    start_simulated(partitioner, num_devices=options.num_devices)
    partitioner.bind(task)
    with as_usage_error(ValueError, owner=resolved.name):
        layers = built_layers(task.model)
    lines = [f"layers of {resolved.name}"]
    for path, fields in layers.items():
        indent = "  " * (path.count("/") + 1) if path else ""
        lines += ["", f"{indent}{path or 'task.model'}: {fields.pop('class')}"]
        lines += [f"{indent}  {name} = {value_text(value)}" for name, value in fields.items()]
    return "\n".join(lines)


def built_layers(model: BaseModel) -> dict[str, dict[str, Any]]:
    """Return the class and the fields of each layer by its path. A repeated body is one layer."""
    found: dict[str, dict[str, Any]] = {}

    def record(layer: BaseLayer) -> None:
        names = [name for name in field_names(type(layer)) if name not in ("name", "sharding")]
        named = {name: _named(_value(layer, name)) for name in names}
        found.setdefault("/".join(layer.path), {"class": type(layer).__qualname__, **named})

    visit_layers(model, record)
    return found


def _value(layer: BaseLayer, name: str) -> Any:
    """Return the effective value of a field, which an outer layer or a default may give."""
    value = layer.inherited(name) if name in INHERITED_FIELDS else getattr(layer, name)
    if name in ("dtype", "fprop_dtype"):
        return floating_dtype(value, field=name, owner=layer.path_name).name
    return check_init(value, owner=layer.path_name, field=name) if name == "params_init" else value


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
