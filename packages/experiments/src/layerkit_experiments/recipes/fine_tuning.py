"""Low-rank adapters of experiments that fine-tune."""

from __future__ import annotations

from typing import Any

from layerkit.config import Config


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
