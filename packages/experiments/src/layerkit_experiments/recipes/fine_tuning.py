"""Fine-tuning: initial weights, LoRA, and text in the tokenizer of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit.layers.quantization.lora import LORA_WEIGHTS, with_lora
from layerkit_experiments.recipes.local_files import LocalFiles
from layerkit_inputs import tokenizer_config
from layerkit_runner.init_from import InitFrom, Source


def weights_of(folder: str) -> Config:
    """Return the config of initial weights from a folder."""
    config: Config = InitFrom.HParams.config(sources=[Source.HParams.config(folder=folder)])
    return config


class InitialWeights:
    """Initial weights from a folder with the model of the experiment."""

    tags: ClassVar[tuple[str, ...]] = ("fine_tune",)

    INIT_FROM: str | None = None
    """Hugging Face folder, job folder or checkpoint, read when training starts. None: random
    weights. `--init_from` takes precedence."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {"INIT_FROM": None}

    @property
    def weights_folder(self) -> str | None:
        """The folder of the initial weights; None if there is none."""
        return self.INIT_FROM

    def task(self) -> Config:
        """Return the config of the task."""
        task: Config = super().task()  # type: ignore[misc]  # of the experiment
        if self.weights_folder is None:
            return task
        task.initial_weights = weights_of(self.weights_folder)
        return task


class Lora:
    """Training of low-rank adapters only (Hu et al., 2021; arXiv:2106.09685).

    It must be the first base class. `--mode=export` merges the adapters into the weights.
    """

    tags: ClassVar[tuple[str, ...]] = ("lora",)

    LORA_RANK: int = 8
    LORA_ALPHA: float = 16.0
    """Adapters are multiplied by LORA_ALPHA / LORA_RANK."""
    LORA_DROPOUT_RATE: float = 0.0
    LORA_ONLY: str = ".*(query|value)_tpl"
    """Pattern of field paths of products with an adapter; `.*_tpl` matches all."""

    def model(self) -> Config:
        """Return the config of the model with adapters."""
        return with_lora(
            super().model(),  # type: ignore[misc]  # of the experiment
            rank=self.LORA_RANK,
            alpha=self.LORA_ALPHA,
            dropout_rate=self.LORA_DROPOUT_RATE,
            only=self.LORA_ONLY,
        )

    def learner(self) -> Config:
        """Return the config of the learner, which trains only adapters."""
        learner: Config = super().learner()  # type: ignore[misc]
        return learner.set(trainable=(LORA_WEIGHTS,))


class FolderText(LocalFiles, abstract=True):
    """Local text, encoded by the tokenizer of the folder of initial weights."""

    TOKENIZER: str | None = None  # type: ignore[assignment]
    """Tokenizer as in `LocalFiles`; None for that of the folder."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {"MAX_SEQ_LEN": 64, "PERCORE_BATCH_SIZE": 8.0}

    @property
    def weights_folder(self) -> str | None:
        """The folder of the initial weights; None if there is none."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define weights_folder")

    def tokenizer(self) -> Config:
        """Return the config of the tokenizer.

        Raises:
          ConfigError: No tokenizer and no folder are set.
        """
        name = self.weights_folder if self.TOKENIZER is None else self.TOKENIZER
        if name is None:
            raise ConfigError(
                field="TOKENIZER",
                value=None,
                expected="a tokenizer, since no folder of initial weights has one",
            )
        return tokenizer_config(name, special_tokens_in_text=self.SPECIAL_TOKENS_IN_TEXT)

    def validate(self) -> None:
        """Check the fields; a tokenizer of a missing folder is checked when the run starts."""
        folder = self.weights_folder
        if self.TOKENIZER is None and folder is not None and not Path(folder).exists():
            super(LocalFiles, self).validate()
        else:
            super().validate()
