"""The base of language-model experiments: a task from the model and the optimization recipe."""

from __future__ import annotations

from layerkit.config import Config
from layerkit.weights import canonical_dtype
from layerkit_experiments.lm.recipes.model import TransformerLmModel
from layerkit_experiments.lm.recipes.optimization import TrainingLength
from layerkit_runner.experiment import BaseExperiment
from layerkit_runner.task import SingleTask


class LmExperiment(TransformerLmModel, TrainingLength, BaseExperiment, abstract=True):
    """Inherit this, one class each of optimization, parallelism and data, and set values."""

    def validate(self) -> None:
        """Refuses fields that name what does not exist."""
        super().validate()
        canonical_dtype(self.FPROP_DTYPE, field="FPROP_DTYPE")
        self.model()

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
