"""Configuration: configs, field types, checks of values, nested maps and lists of public names.

People import from here. The modules load neither JAX nor Flax, and import only each other and
`layerkit.errors`. A name loads its module, and with it Fiddle, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerkit.config.lazy_names import lazy_names

if TYPE_CHECKING:
    from layerkit.config.config import Config as Config
    from layerkit.config.config import Partial as Partial
    from layerkit.config.config import assigned_fields as assigned_fields
    from layerkit.config.config import build as build
    from layerkit.config.config import changed_fields as changed_fields
    from layerkit.config.config import copy_config as copy_config
    from layerkit.config.config import field_names as field_names
    from layerkit.config.config import fields_of as fields_of
    from layerkit.config.config import instance_field as instance_field
    from layerkit.config.config import is_config as is_config
    from layerkit.config.config import sub_config_field as sub_config_field
    from layerkit.config.config import target_of as target_of
    from layerkit.config.config import walk_configs as walk_configs
    from layerkit.config.hparams import BaseHParams as BaseHParams
    from layerkit.config.hparams import Conditions as Conditions
    from layerkit.config.hparams import Configurable as Configurable
    from layerkit.errors import UnknownFieldError as UnknownFieldError

__getattr__, __dir__, __all__ = lazy_names(__name__)
