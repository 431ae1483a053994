"""All families by their `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerkit.interop.hugging_face.families.bart import BART
from layerkit.interop.hugging_face.families.bert import BERT
from layerkit.interop.hugging_face.families.cohere import COHERE
from layerkit.interop.hugging_face.families.cohere2 import COHERE2
from layerkit.interop.hugging_face.families.deepseek_v2 import DEEPSEEK_V2
from layerkit.interop.hugging_face.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from layerkit.interop.hugging_face.families.ernie4_5 import ERNIE4_5
from layerkit.interop.hugging_face.families.gemma import GEMMA
from layerkit.interop.hugging_face.families.gemma2 import GEMMA2
from layerkit.interop.hugging_face.families.gemma3 import GEMMA3
from layerkit.interop.hugging_face.families.gemma4 import GEMMA4, GEMMA4_TEXT
from layerkit.interop.hugging_face.families.glm4_moe import GLM4_MOE
from layerkit.interop.hugging_face.families.gpt2 import GPT2
from layerkit.interop.hugging_face.families.gpt_neox import GPT_NEOX
from layerkit.interop.hugging_face.families.gpt_oss import GPT_OSS
from layerkit.interop.hugging_face.families.gptj import GPTJ
from layerkit.interop.hugging_face.families.granite import GRANITE
from layerkit.interop.hugging_face.families.granite_moe_hybrid import GRANITE_MOE_HYBRID
from layerkit.interop.hugging_face.families.llama import LLAMA
from layerkit.interop.hugging_face.families.llama4 import LLAMA4, LLAMA4_TEXT
from layerkit.interop.hugging_face.families.minicpm import MINICPM
from layerkit.interop.hugging_face.families.mistral import MISTRAL
from layerkit.interop.hugging_face.families.mixtral import MIXTRAL
from layerkit.interop.hugging_face.families.modernbert import MODERNBERT
from layerkit.interop.hugging_face.families.olmo2 import OLMO2
from layerkit.interop.hugging_face.families.olmo3 import OLMO3
from layerkit.interop.hugging_face.families.olmoe import OLMOE
from layerkit.interop.hugging_face.families.phi3 import PHI3
from layerkit.interop.hugging_face.families.qwen2 import QWEN2
from layerkit.interop.hugging_face.families.qwen2_moe import QWEN2_MOE
from layerkit.interop.hugging_face.families.qwen3 import QWEN3
from layerkit.interop.hugging_face.families.qwen3_moe import QWEN3_MOE
from layerkit.interop.hugging_face.families.roberta import ROBERTA, XLM_ROBERTA
from layerkit.interop.hugging_face.families.seed_oss import SEED_OSS
from layerkit.interop.hugging_face.families.smollm3 import SMOLLM3
from layerkit.interop.hugging_face.families.stablelm import STABLELM
from layerkit.interop.hugging_face.families.starcoder2 import STARCODER2
from layerkit.interop.hugging_face.families.t5 import T5
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import UnsupportedModelError

# Order in which export tries the families.
FAMILIES: tuple[Family, ...] = (
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K2,
    GPT_OSS,
    GLM4_MOE,
    LLAMA4_TEXT,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4_TEXT,
    PHI3,
    OLMO2,
    OLMOE,
    OLMO3,
    SMOLLM3,
    GRANITE,
    GRANITE_MOE_HYBRID,
    MINICPM,
    GPT_NEOX,
    STABLELM,
    GPTJ,
    COHERE,
    COHERE2,
    STARCODER2,
    SEED_OSS,
    ERNIE4_5,
    T5,
    BART,
    BERT,
    ROBERTA,
    XLM_ROBERTA,
    MODERNBERT,
)


# Models of which the text is read, and exported as another family.
_IMPORTED_ONLY = (LLAMA4, GEMMA4)
_BY_TYPE = {family.model_type: family for family in (*FAMILIES, *_IMPORTED_ONLY)}


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
