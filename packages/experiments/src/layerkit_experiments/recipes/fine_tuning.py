"""Fine-tuning: initial weights, low-rank adapters, and the tokenizer of a folder."""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit_inputs import tokenizer_config


def add_adapters(fields: Any, model: Config, **options: Any) -> Config:
    """Return the config of a model with low-rank adapters (Hu et al., 2021; arXiv:2106.09685).

    `--mode=export` merges the adapters into the weights, unless --adapters_only is set.

    Args:
      fields: Experiment with LORA_RANK, LORA_ALPHA, LORA_DROPOUT_RATE and LORA_ONLY.
      model: Config of the model.
      **options: Further arguments of `add_lora`.
    """
    from layerkit.layers.quantization.lora import add_lora  # Few experiments have adapters.

    return add_lora(
        model,
        rank=fields.LORA_RANK,
        alpha=fields.LORA_ALPHA,
        dropout_rate=fields.LORA_DROPOUT_RATE,
        only=fields.LORA_ONLY,
        **options,
    )


def folder_tokenizer(fields: Any, folder: str | None) -> Config:
    """Return the config of the tokenizer that TOKENIZER names, or else of a folder of weights.

    Args:
      fields: Experiment with the fields of `LocalFiles`.
      folder: Folder of the initial weights; None if there is none.

    Raises:
      ConfigError: Neither a tokenizer nor a folder is set.
    """
    name = folder if fields.TOKENIZER is None else fields.TOKENIZER
    if name is None:
        expected = "a tokenizer, since no folder of initial weights has one"
        raise ConfigError(field="TOKENIZER", value=None, expected=expected)
    return tokenizer_config(name, special_tokens_in_text=fields.SPECIAL_TOKENS_IN_TEXT)
