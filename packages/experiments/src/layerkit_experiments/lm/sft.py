"""Fine-tuning of a Hugging Face model on conversations, fully, by LoRA or by QLoRA.

`runner --exp=lm.sft.Chat --fdl.HF_FOLDER=Qwen3-0.6B --fdl.CHAT_FILES='["chat.jsonl"]'`
"""

from __future__ import annotations

from typing import ClassVar

from layerkit_experiments.lm.fine_tune import HuggingFaceLm
from layerkit_experiments.recipes.chat_files import ChatFiles


class Chat(ChatFiles, HuggingFaceLm):
    """All weights of the model in HF_FOLDER, on conversations."""

    MAX_DECODE_STEPS = 256


class ChatLora(ChatFiles, HuggingFaceLm):
    """LoRA adapters of all products of the layers of the model in HF_FOLDER."""

    tags: ClassVar[tuple[str, ...]] = ("lora",)

    LORA_RANK = 16
    LORA_ALPHA = 32.0
    LORA_ONLY = r".*stack_tpl\..*_tpl"
    LEARNING_RATE = 2e-4
    WEIGHT_DECAY = 0.0
    MAX_DECODE_STEPS = 256


class ChatQlora(ChatLora):
    """LoRA adapters of all products of the layers, beside weights in 4 bits (QLoRA)."""

    WEIGHT_FORMAT = "nf4:64"
