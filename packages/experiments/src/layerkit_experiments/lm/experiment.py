"""Base class of language-model experiments."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp

from layerkit.base.weights import canonical_dtype
from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit_experiments.recipes.decoder import TransformerLmModel
from layerkit_experiments.recipes.optimizers import TrainingLength
from layerkit_experiments.recipes.quantization import QuantizedProducts
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.step.task import SingleTask


class LmExperiment(
    TransformerLmModel, QuantizedProducts, TrainingLength, BaseExperiment, abstract=True
):
    """Base class; a subclass also inherits recipes of optimization, parallelism and data."""

    tags: ClassVar[tuple[str, ...]] = ("lm",)

    def validate(self) -> None:
        """Raise an error if fields are invalid or contradict each other."""
        super().validate()
        dtype = canonical_dtype(self.FPROP_DTYPE, field="FPROP_DTYPE")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ConfigError(
                field="FPROP_DTYPE",
                value=self.FPROP_DTYPE,
                expected="a floating dtype, such as bfloat16",
            )
        self.quantized(self.model())
        self._check_prompts()

    def _check_prompts(self) -> None:
        """Raise an error if decoding needs more learned positions than there are."""
        field = "MAX_SEQ_LEN" if self.MAX_POSITIONS is None else "MAX_POSITIONS"
        positions = getattr(self, field)
        for prompts in self.decode_datasets() if "trainable" in self.POSITIONS else ():
            longest = getattr(prompts, "prompt_length", 0) + self.MAX_DECODE_STEPS
            if longest > positions:
                most = positions - prompts.prompt_length
                raise ConfigError(
                    field="MAX_DECODE_STEPS",
                    value=self.MAX_DECODE_STEPS,
                    expected=f"at most {most} after prompts of {prompts.prompt_length} ids, since"
                    f" POSITIONS={self.POSITIONS!r} has {field}={positions} positions",
                )

    def learner(self) -> Config:
        """Return the config of the learner, which an optimization recipe defines."""
        raise NotImplementedError(
            f"{type(self).__qualname__} needs an optimization recipe, such as AdamWCosine"
        )

    def task(self) -> Config:
        """Return the config of the task."""
        return SingleTask.HParams.config(
            name="lm",
            model=self.quantized(self.model()),
            train=self.train_config(self.learner()),
        )
