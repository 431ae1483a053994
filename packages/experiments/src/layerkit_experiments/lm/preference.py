"""Training of a Hugging Face model on preferences: DPO and its relatives, KTO and reward models.

`runner --exp=lm.preference.Dpo --fdl.HF_FOLDER=Qwen3-0.6B --fdl.CHAT_FILES='["pairs.jsonl"]'`
"""

from __future__ import annotations

from typing import ClassVar

from layerkit_experiments.lm.fine_tune import HuggingFaceLm
from layerkit_experiments.recipes.preference_files import PreferenceFiles


class Dpo(PreferenceFiles, HuggingFaceLm):
    """DPO of all weights of the model in HF_FOLDER; LOSS selects its relatives."""


class DpoLora(PreferenceFiles, HuggingFaceLm):
    """DPO of LoRA adapters, whose reference is the model without them."""

    tags: ClassVar[tuple[str, ...]] = ("lora",)

    LORA_RANK = 16
    LORA_ALPHA = 32.0
    LORA_ONLY = r".*stack_tpl\..*_tpl"
    LEARNING_RATE = 1e-5
    WEIGHT_DECAY = 0.0


class Simpo(PreferenceFiles, HuggingFaceLm):
    """SimPO, without a reference."""

    LOSS = "simpo"
    BETA = 2.0
    GAMMA = 1.0


class Orpo(PreferenceFiles, HuggingFaceLm):
    """ORPO, which also fine-tunes on the chosen answers and so needs no start that can chat."""

    LOSS = "orpo"
    LEARNING_RATE = 8e-6


class Kto(PreferenceFiles, HuggingFaceLm):
    """KTO on single answers with a label."""

    LOSS = "kto"


class Reward(PreferenceFiles, HuggingFaceLm):
    """A reward model, with a head at the last token."""

    LOSS = "reward"
    LEARNING_RATE = 1e-5
