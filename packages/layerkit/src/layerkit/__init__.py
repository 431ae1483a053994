"""layerkit: configuration, layers, models and decoding for JAX.

The names below are the public face; each is imported when it is first used, so that
`from layerkit import Config` costs neither JAX nor Flax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from layerkit._version import __version__ as __version__

if TYPE_CHECKING:
    from layerkit.base_layer import BaseLayer as BaseLayer
    from layerkit.base_model import BaseModel as BaseModel
    from layerkit.base_model import WeightedScalar as WeightedScalar
    from layerkit.config import BaseHParams as BaseHParams
    from layerkit.config import Config as Config
    from layerkit.config import Configurable as Configurable
    from layerkit.config import Partial as Partial
    from layerkit.config import build as build
    from layerkit.config import instance_field as instance_field
    from layerkit.config import sub_config_field as sub_config_field
    from layerkit.nested_map import NestedMap as NestedMap
    from layerkit.sharding import DEFAULT_RULES as DEFAULT_RULES
    from layerkit.sharding import BoundSharding as BoundSharding
    from layerkit.sharding import ShardingRules as ShardingRules
    from layerkit.weights import WeightHParams as WeightHParams
    from layerkit.weights import WeightInit as WeightInit

_MODULE_OF = {
    "BaseHParams": "config",
    "BaseLayer": "base_layer",
    "BaseModel": "base_model",
    "BoundSharding": "sharding",
    "Config": "config",
    "Configurable": "config",
    "DEFAULT_RULES": "sharding",
    "NestedMap": "nested_map",
    "Partial": "config",
    "ShardingRules": "sharding",
    "WeightHParams": "weights",
    "WeightInit": "weights",
    "WeightedScalar": "base_model",
    "build": "config",
    "instance_field": "config",
    "sub_config_field": "config",
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from layerkit.near_names import near_names

        raise AttributeError(f"layerkit has no name {name!r}{near_names(name, __all__)}")
    return getattr(importlib.import_module(f"layerkit.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
