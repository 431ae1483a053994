"""Products of 8-bit or 4-bit numbers in the layers of a language model."""

from __future__ import annotations

from typing import Literal

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


class QuantizedProducts:
    """A language model whose layers can multiply 8-bit or 4-bit numbers.

    Embedding and softmax keep FPROP_DTYPE.
    """

    QUANTIZATION: Literal["fp8_delayed", "fp8_current", "mxfp8", "nvfp4", "int8"] | None = None
    """Products of the layers: `fp8_delayed`, `fp8_current` (Hopper and later GPUs), `mxfp8`,
    `nvfp4` (Blackwell), `int8` (TPUs); None for FPROP_DTYPE. See docs/quantization.md."""

    def quantized(self, model: Config) -> Config:
        """Return the config of a LanguageModel with the products of QUANTIZATION."""
        name = self.quantization()
        if name is None:
            return model
        dot = getattr(layers, _DOTS[name])
        return layers.with_dots(model, dot.HParams.config(), only=_LAYERS)

    def quantization(self) -> str | None:
        """Return the name of the products; None for FPROP_DTYPE."""
        return self.QUANTIZATION


class Fp8Field(QuantizedProducts):
    """The field with which NVIDIA's scripts select products in fp8."""

    USE_FP8: bool = False
    """Pax's name of `QUANTIZATION="fp8_delayed"`."""

    def quantization(self) -> str | None:
        """Return QUANTIZATION, or `fp8_delayed` if USE_FP8 is set; None for FPROP_DTYPE.

        Raises:
          ConfigError: Both fields are set and differ.
        """
        if not self.USE_FP8:
            return self.QUANTIZATION
        if self.QUANTIZATION not in (None, "fp8_delayed"):
            raise ConfigError(
                field="QUANTIZATION",
                value=self.QUANTIZATION,
                expected="None or 'fp8_delayed' with USE_FP8=True",
            )
        return "fp8_delayed"
