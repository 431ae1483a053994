"""The base of language-model experiments: a task from the model and the optimization recipe."""

from __future__ import annotations

from layerkit.config import Config
from layerkit_runner.experiment import BaseExperiment
from layerkit_runner.task import SingleTask

from layerkit_experiments.lm.recipes.model import TransformerLmModel


class LmExperiment(TransformerLmModel, BaseExperiment, abstract=True):
    """Inherit this, one class each of optimization, parallelism and data, and set values."""

    def task(self) -> Config:
        """The config of the task."""
        return SingleTask.HParams.config(
            name="lm", model=self.model(), train=self.train_config(self.learner())
        )
