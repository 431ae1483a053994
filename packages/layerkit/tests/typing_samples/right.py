"""Configs that type checkers accept."""

from __future__ import annotations

from typing import assert_type

from layerkit.base.base_layer import BaseLayer
from layerkit.config import BaseHParams, Config, Configurable, sub_config_field
from layerkit.layers.basic.elementwise import BaseActivation, ReLU
from layerkit.layers.basic.linears import Linear
from layerkit.models.language_model import LanguageModel


class Custom(BaseLayer):
    dims: int = 0
    activation_tpl: Config[BaseActivation] = sub_config_field(ReLU.HParams)


class Nested(BaseLayer):
    class HParams(BaseHParams):
        size: int = 1


class Schedule(Configurable):
    rate: float = 0.1
    model: LanguageModel | None = None


assert_type(Linear.HParams.config(input_dims=3), Config[Linear])
assert_type(Linear.HParams.config(input_dims=3).Instantiate(), Linear)
assert_type(Config(Linear, input_dims=3), Config[Linear])
Custom.HParams.config(dims=3, activation_tpl=ReLU.HParams.config())
Nested.HParams.config(size=2)
Schedule.HParams.config(rate=1).set(rate=2)
Linear.HParams.partial(input_dims=3)
