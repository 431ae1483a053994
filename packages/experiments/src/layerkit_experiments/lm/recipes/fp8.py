"""Products of 8-bit floats in the layers of a language model."""

from __future__ import annotations

from layerkit.config import Config
from layerkit.layers import Fp8Dot, with_dots
from layerkit_experiments.lm.recipes.experiment import LmExperiment


class Fp8Products(LmExperiment, abstract=True):
    """A decoder whose layers can multiply by fp8; embedding and softmax keep FPROP_DTYPE."""

    USE_FP8: bool = False
    """Multiply in fp8 with delayed scaling in attention and feed-forward; for Hopper GPUs."""

    def task(self) -> Config:
        """Return the config of the task."""
        task = super().task()
        if self.USE_FP8:
            task.model = with_dots(
                task.model, Fp8Dot.HParams.config(), only=r"lm_tpl\.stack_tpl\..*"
            )
        return task
