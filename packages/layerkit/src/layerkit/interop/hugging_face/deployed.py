"""Conversion of a training setup to the model that is deployed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerkit.base.base_layer import PARAMS
from layerkit.config import Config, target_of
from layerkit.layers.quantization.lora import remove_lora
from layerkit.layers.quantization.stored_weights import dequantize_model
from layerkit.models.language_model import LanguageModel
from layerkit.models.preference_model import DpoModel
from layerkit.models.transformer_lm import TransformerLm


def deployed_model(model: Config, variables: Mapping[str, Any]) -> tuple[Config, Mapping[str, Any]]:
    """Return the model that others load, and its weights.

    A `DpoModel` becomes a `LanguageModel` of its policy, without the reference. A bare
    `TransformerLm` becomes the network of a `LanguageModel`. Weights in integers become floats, and
    LoRA adapters are added to the weights beside them.

    Args:
      model: Config of a model or of a network.
      variables: Variables of the model, `{'params': …}`.

    Raises:
      ConfigError: The adapters cannot be merged, such as those with several alphas.
    """
    if issubclass(target_of(model), DpoModel):
        model, params = model.lm_tpl, variables[PARAMS]["lm"]
        variables = {PARAMS: params}
    if issubclass(target_of(model), TransformerLm):
        model = LanguageModel.HParams.config(lm_tpl=model)
        variables = {PARAMS: {"lm": variables[PARAMS]}}
    return remove_lora(*dequantize_model(model, variables))
