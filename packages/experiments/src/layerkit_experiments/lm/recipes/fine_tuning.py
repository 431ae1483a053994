"""Going on from weights that exist: where they come from, LoRA, and text in their own words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.layers.adapters import LORA_WEIGHTS, with_lora
from layerkit_experiments.lm.recipes.data import LocalFiles
from layerkit_inputs import tokenizer_config
from layerkit_runner.init_from import InitFrom, Source


class InitialWeights:
    """First values from a folder, whose model is the one that the experiment describes."""

    tags: ClassVar[tuple[str, ...]] = ("fine_tune",)

    INIT_FROM: str | None = None
    """Of Hugging Face, of a job, or of its checkpoints; looked at when training begins. None draws
    all weights, to try things out. `--init_from` takes its place."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {"INIT_FROM": None}

    @property
    def weights_folder(self) -> str | None:
        """Where the first weights come from, if from anywhere."""
        return self.INIT_FROM

    def task(self) -> Config:
        """The config of the task."""
        task: Config = super().task()  # type: ignore[misc]  # of the experiment
        if self.INIT_FROM is None:
            return task
        task.initial_weights = InitFrom.HParams.config(
            sources=[Source.HParams.config(folder=self.INIT_FROM)]
        )
        return task


class Lora:
    """Trains low-rank adapters alone (Hu et al., 2021; arXiv:2106.09685); put it first.

    `--mode=export` adds them to the weights beside them.
    """

    tags: ClassVar[tuple[str, ...]] = ("lora",)

    LORA_RANK: int = 8
    LORA_ALPHA: float = 16.0
    """Adapters are multiplied by LORA_ALPHA / LORA_RANK."""
    LORA_DROPOUT_RATE: float = 0.0
    LORA_ONLY: str = ".*(query|value)_tpl"
    """Which products have one: a pattern of paths of fields, such as `.*_tpl` for all of them."""

    def model(self) -> Config:
        """The config of the model with adapters."""
        return with_lora(
            super().model(),  # type: ignore[misc]  # of the experiment
            rank=self.LORA_RANK,
            alpha=self.LORA_ALPHA,
            dropout_rate=self.LORA_DROPOUT_RATE,
            only=self.LORA_ONLY,
        )

    def learner(self) -> Config:
        """The config of the learner, which trains nothing else."""
        learner: Config = super().learner()  # type: ignore[misc]
        return learner.set(trainable=(LORA_WEIGHTS,))


class FolderText(LocalFiles, abstract=True):
    """Local text in the words of the folder that the first weights come from."""

    TOKENIZER: str | None = None  # type: ignore[assignment]
    """As for `LocalFiles`; None for that of the folder."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {"MAX_SEQ_LEN": 64, "PERCORE_BATCH_SIZE": 8.0}

    @property
    def weights_folder(self) -> str | None:
        """Where the first weights come from, if from anywhere."""
        raise NotImplementedError(f"{type(self).__qualname__} does not say where weights are")

    def tokenizer(self) -> Config:
        """The config of the tokenizer.

        Raises:
          ValueError: neither a tokenizer nor a folder is named.
        """
        name = self.weights_folder if self.TOKENIZER is None else self.TOKENIZER
        if name is None:
            raise ValueError("TOKENIZER=None takes that of the first weights, which are drawn here")
        return tokenizer_config(name, special_tokens_in_text=self.SPECIAL_TOKENS_IN_TEXT)

    def validate(self) -> None:
        """As for `LocalFiles`, but a folder that is not there yet is not missed before a run."""
        folder = self.weights_folder
        if self.TOKENIZER is None and folder is not None and not Path(folder).exists():
            super(LocalFiles, self).validate()
        else:
            super().validate()
