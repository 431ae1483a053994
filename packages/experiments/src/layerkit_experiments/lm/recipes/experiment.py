"""The base of language-model experiments: a task from the model and the optimization recipe."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp

from layerkit.config import Config
from layerkit.weights import canonical_dtype
from layerkit_experiments.lm.recipes.model import TransformerLmModel
from layerkit_experiments.lm.recipes.optimization import TrainingLength
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.training.task import SingleTask


class LmExperiment(TransformerLmModel, TrainingLength, BaseExperiment, abstract=True):
    """Inherit this, one class each of optimization, parallelism and data, and set values."""

    tags: ClassVar[tuple[str, ...]] = ("lm",)

    def validate(self) -> None:
        """Refuses fields that name what does not exist, or that do not fit together."""
        super().validate()
        dtype = canonical_dtype(self.FPROP_DTYPE, field="FPROP_DTYPE")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"FPROP_DTYPE={self.FPROP_DTYPE!r} is not a floating dtype, such as bfloat16"
            )
        self.model()
        self._check_prompts()

    def _check_prompts(self) -> None:
        """A learnt position exists only up to MAX_SEQ_LEN, which decoding meets after training."""
        for prompts in self.decode_datasets() if self.POSITIONS == "trainable" else ():
            longest = getattr(prompts, "prompt_length", 0) + self.MAX_DECODE_STEPS
            if longest > self.MAX_SEQ_LEN:
                raise ValueError(
                    f"MAX_DECODE_STEPS={self.MAX_DECODE_STEPS} after prompts of"
                    f" {prompts.prompt_length} ids need {longest} positions, and"
                    f" POSITIONS='trainable' has MAX_SEQ_LEN={self.MAX_SEQ_LEN}"
                )

    def learner(self) -> Config:
        """The config of the learner; an optimization recipe defines it."""
        raise NotImplementedError(
            f"{type(self).__qualname__} needs an optimization recipe, such as AdamWCosine"
        )

    def task(self) -> Config:
        """The config of the task."""
        return SingleTask.HParams.config(
            name="lm", model=self.model(), train=self.train_config(self.learner())
        )
