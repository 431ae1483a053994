"""Fine-tuning of a Hugging Face model on local text, fully or by LoRA.

`runner --exp=lm.fine_tune.FineTune --fdl.HF_FOLDER=Llama-3.2-1B --fdl.TEXT_FILES='["notes/*.md"]'`
"""

from __future__ import annotations

from layerkit_experiments.recipes.fine_tuning import FolderText, Lora
from layerkit_experiments.recipes.hugging_face import HuggingFaceLm
from layerkit_experiments.recipes.meshes import Spmd
from layerkit_experiments.recipes.optimizers import AdamWCosine


class FineTune(AdamWCosine, Spmd, FolderText, HuggingFaceLm):
    """All weights of the model in HF_FOLDER, on all devices."""

    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    MAX_SEQ_LEN = 1024
    LEARNING_RATE = 1e-5
    WARMUP_STEPS = 50
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 200

    @property
    def VOCAB_SIZE(self) -> int:  # type: ignore[override]  # noqa: N802
        """Vocabulary size of the model in the folder."""
        size: int = self.model().lm_tpl.vocab_size
        return size

    @property
    def weights_folder(self) -> str:
        """The Hugging Face folder."""
        return self.HF_FOLDER


class FineTuneLora(Lora, FineTune):
    """LoRA adapters of the queries and values of the model in HF_FOLDER."""

    LEARNING_RATE = 3e-4
    WEIGHT_DECAY = 0.0
