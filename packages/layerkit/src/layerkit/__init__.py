"""layerkit: configuration, layers, models and decoding for JAX.

The names below are the public API. The first use of a name imports its module, so that
`from layerkit import Config` imports neither JAX nor Flax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit._version import __version__ as __version__
    from layerkit.base.base_layer import BaseLayer as BaseLayer
    from layerkit.base.base_model import BaseModel as BaseModel
    from layerkit.base.base_model import WeightedScalar as WeightedScalar
    from layerkit.base.sharding import DEFAULT_RULES as DEFAULT_RULES
    from layerkit.base.sharding import BoundSharding as BoundSharding
    from layerkit.base.sharding import ShardingRules as ShardingRules
    from layerkit.base.weights import WeightHParams as WeightHParams
    from layerkit.base.weights import WeightInit as WeightInit
    from layerkit.config import BaseHParams as BaseHParams
    from layerkit.config import Config as Config
    from layerkit.config import Configurable as Configurable
    from layerkit.config import Partial as Partial
    from layerkit.config import build as build
    from layerkit.config import instance_field as instance_field
    from layerkit.config import sub_config_field as sub_config_field
    from layerkit.config.nested_map import NestedMap as NestedMap

__getattr__, __dir__, __all__ = lazy_names(__name__)
