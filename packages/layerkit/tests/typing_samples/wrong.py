"""Configs that type checkers reject, each with the code of mypy's error."""

from __future__ import annotations

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, Configurable, sub_config_field
from layerkit.layers.basic.elementwise import BaseActivation, ReLU
from layerkit.layers.basic.linears import Linear


class Custom(BaseLayer):
    dims: int = 0
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)


class Schedule(Configurable):
    rate: float = 0.1


Linear.HParams.config(input_dims="two")  # [arg-type]
Linear.HParams.config(input_dimz=2)  # [call-arg]
Custom.HParams.config(dims=2.5)  # [arg-type]
Custom.HParams.config(activation_tpl=3)  # [arg-type]
Schedule.HParams.config(rate="fast")  # [arg-type]
Schedule.HParams.config(rates=0.1)  # [call-arg]
