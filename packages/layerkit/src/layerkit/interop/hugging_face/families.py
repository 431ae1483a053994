"""All families by their `model_type`."""

from __future__ import annotations

from typing import Any

from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.gemma2 import GEMMA2
from layerkit.interop.hugging_face.gemma3 import GEMMA3
from layerkit.interop.hugging_face.gpt2 import GPT2
from layerkit.interop.hugging_face.keys import UnsupportedModelError
from layerkit.interop.hugging_face.llama import LLAMA
from layerkit.interop.hugging_face.mistral import MISTRAL
from layerkit.interop.hugging_face.mixtral import MIXTRAL
from layerkit.interop.hugging_face.olmo2 import OLMO2
from layerkit.interop.hugging_face.phi3 import PHI3
from layerkit.interop.hugging_face.qwen2 import QWEN2
from layerkit.interop.hugging_face.qwen3 import QWEN3
from layerkit.interop.hugging_face.t5 import T5

# Order in which export tries the families.
FAMILIES: tuple[Family, ...] = (
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    T5,
)


def family_of(model_type: Any) -> Family:
    """Return the family of a `model_type`.

    Raises:
      UnsupportedModelError: The type is not supported.
    """
    known = {family.model_type: family for family in FAMILIES}
    if model_type not in known:
        raise UnsupportedModelError(
            owner="config.json", field="model_type", value=model_type, choices=known
        )
    return known[model_type]
