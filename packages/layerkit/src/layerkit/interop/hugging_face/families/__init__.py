"""All families by their `model_type`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import UnsupportedModelError

# fmt: off
MODULES = (
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe",
    "qwen3_next", "qwen3_5", "qwen2_5_vl",
    "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "llama4", "gemma", "gemma2", "gemma3",
    "gemma4", "phi3", "olmo2", "olmoe", "olmo3", "olmo_hybrid", "smollm3", "granite",
    "granite_moe_hybrid", "mamba2", "nemotron_h", "falcon_h1", "lfm2", "minicpm", "gpt_neox",
    "stablelm", "gptj", "cohere", "cohere2", "starcoder2", "seed_oss", "ernie4_5", "t5", "bart",
    "bert", "roberta", "modernbert", "vit", "clip", "whisper",
)
# fmt: on
"""Modules of the families, in the order in which export tries these."""

_BY_TYPE: dict[str, Family] = {
    value.model_type: value
    for name in MODULES
    for value in vars(importlib.import_module(f"{__name__}.{name}")).values()
    if isinstance(value, Family)
}
# The text of the others is exported as another family.
FAMILIES = tuple(family for family in _BY_TYPE.values() if family.text_of is None)


def family_of(model_type: str) -> Family:
    """Return the family of a `model_type`.

    Raises:
      UnsupportedModelError: The type is not supported.
    """
    return family_in({"model_type": model_type})


def family_in(content: Mapping[str, Any]) -> Family:
    """Return the family of the model that the content of a config.json describes.

    Raises:
      UnsupportedModelError: Its type is not supported.
    """
    model_type, text = content.get("model_type"), content.get("text_config")
    if isinstance(model_type, str) and model_type in _BY_TYPE:
        return _BY_TYPE[model_type]
    if model_type is None:  # MiniCPM is published without a type.
        for family in FAMILIES:
            if content.get("architectures") == [family.architecture]:
                return family
    part = text.get("model_type") if isinstance(text, dict) else None
    if model_type is None:
        hint = "This config.json describes no model of Hugging Face."
    elif isinstance(part, str) and part in _BY_TYPE:
        hint = f"Its language model alone ({part!r}) is supported: save that with Transformers."
    else:
        hint = "Another type is another architecture, even under a similar name."
    raise UnsupportedModelError(
        owner="config.json",
        field="model_type",
        value=model_type,
        expected=f"one of {', '.join(_BY_TYPE)}",
        hint=hint,
    )
