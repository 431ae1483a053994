"""Products of 8-bit or 4-bit numbers in the layers of a language model."""

from __future__ import annotations

from typing import Any

from layerkit import layers
from layerkit.config import Config
from layerkit.errors import ConfigError

# Names in `layerkit.layers`, which imports a layer when it is used.
_DOTS = {
    "fp8_delayed": "Fp8Dot",
    "fp8_current": "Fp8CurrentDot",
    "mxfp8": "MxFp8Dot",
    "nvfp4": "NvFp4Dot",
    "int8": "Int8Dot",
}
_LAYERS = r"lm_tpl\.stack_tpl\..*"


def quantized(fields: Any, model: Config) -> Config:
    """Return the config of a LanguageModel with the products of QUANTIZATION in its layers.

    Embedding and softmax keep FPROP_DTYPE. `USE_FP8`, which some experiments have from Pax, is
    another name of `QUANTIZATION="fp8_delayed"`.

    Raises:
      ConfigError: QUANTIZATION and USE_FP8 are set and differ.
    """
    name = fields.QUANTIZATION
    if getattr(fields, "USE_FP8", False):
        if name not in (None, "fp8_delayed"):
            expected = "None or 'fp8_delayed' with USE_FP8=True"
            raise ConfigError(field="QUANTIZATION", value=name, expected=expected)
        name = "fp8_delayed"
    if name is None:
        return model
    dot = getattr(layers, _DOTS[name])
    return layers.replace_dots(model, dot.HParams.config(), only=_LAYERS)
