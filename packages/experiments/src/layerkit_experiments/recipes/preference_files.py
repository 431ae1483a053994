"""Preferences in files of this machine as training data, and the models that they train."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from layerkit.config import Config, walk_configs
from layerkit.config.checks import require
from layerkit.layers.quantization.lora import is_lora
from layerkit.models import KtoModel, PreferenceModel, RewardModel
from layerkit_experiments.recipes.chat_files import ChatFiles
from layerkit_experiments.recipes.training import TrainedExperiment
from layerkit_inputs import JudgementInput, PairInput

# Model of each loss, and the fields of the experiment that it reads.
_PAIR_MODEL: tuple[Any, tuple[str, ...]] = PreferenceModel, ("beta", "label_smoothing", "gamma")
_OTHER_MODELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "kto": (KtoModel, ("beta", "desirable_weight", "undesirable_weight")),
    "reward": (RewardModel, ("centering",)),
}
_ALL_MODELS = (_PAIR_MODEL, *_OTHER_MODELS.values())
_NUM_LAST_BYTES = 1 << 16


class PreferenceFiles(ChatFiles, TrainedExperiment, abstract=True):
    """Fields and inputs of preferences, on which a policy or a reward model is trained.

    Put it before an experiment with a language model, as `ChatFiles`. Preferences with longer
    answers than a row are dropped, and counted.
    """

    LOSS: Literal["sigmoid", "hinge", "ipo", "simpo", "orpo", "kto", "reward"] = "sigmoid"
    """Loss of pairs: `sigmoid` (DPO), `hinge` (SLiC), `ipo`, or `simpo` and `orpo`, which have no
    reference; `kto` for judgements; or `reward` for a reward model."""
    BETA: float = 0.1
    """Strength of the penalty on deviations from the start."""
    LABEL_SMOOTHING: float = 0.0
    """Assumed share of pairs whose preference is wrong, for `sigmoid`."""
    GAMMA: float = 0.0
    """Least difference of the rewards to aim for, for `simpo`."""
    DESIRABLE_WEIGHT: float = 1.0
    UNDESIRABLE_WEIGHT: float = 1.0
    """Weights of answers with a label of 1 and of 0, for `kto`."""
    CENTERING: float = 0.0
    """Weight of the squared sum of both rewards, for `reward`."""
    REFERENCE_FOLDER: str | None = None
    """Folder with train.npz and heldout.npz, log-probabilities of pairs that
    `PairInput.store_reference` wrote. None computes them in each step."""

    PERCORE_BATCH_SIZE = 4.0
    LEARNING_RATE = 1e-6
    WARMUP_STEPS = 50
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 200

    unused_fields: ClassVar[tuple[str, ...]] = ("LOSS_ON", "PACKING", "TOO_LONG")

    def task(self) -> Config:
        """Return the config of the task, in which a reference with weights of its own is frozen."""
        task = super().task()
        model_class, names = _OTHER_MODELS.get(self.LOSS, _PAIR_MODEL)
        fields: dict[str, Any] = {name: getattr(self, name.upper()) for name in names}
        for name in {name for _, names in _ALL_MODELS for name in names} - set(names):
            value, default = getattr(self, name.upper()), getattr(PreferenceFiles, name.upper())
            expected = f"{default}, since LOSS={self.LOSS!r} does not read it"
            require(value == default, None, name.upper(), value, expected)
        if model_class is RewardModel:
            del task.model.decoder
            if task.initial_weights is not None:
                task.initial_weights.draw = ("score/.*",)
        else:
            fields["reference"] = self._reference(task.model)
        if model_class is PreferenceModel:
            fields["loss"] = self.LOSS
        task.model = task.model.with_class(model_class, **fields)
        learner = task.train.learner
        if fields.get("reference") == "frozen" and learner.trainable is None:
            learner.frozen = [*learner.frozen, "reference_lm/.*"]
        elif fields.get("reference") == "frozen":
            learner.trainable = [f"(?!reference_lm/){one}" for one in learner.trainable]
        return task

    def _reference(self, model: Config) -> str:
        """Return the source of the log-probabilities of the reference, for a language model."""
        if self.LOSS in ("simpo", "orpo"):
            return "none"
        if self.REFERENCE_FOLDER is not None:
            return "batch"
        # Adapters that are trained further are a part of the start.
        has_new = any(map(is_lora, walk_configs(model))) and not getattr(self, "ADAPTERS", None)
        return "base" if has_new else "frozen"

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        rows = {
            **self._conversations(),
            "seq_length": self.MAX_SEQ_LEN,
            "percore_batch_size": self.PERCORE_BATCH_SIZE,
        }
        kind: Any = JudgementInput if self.LOSS == "kto" else PairInput
        inputs = [
            kind.HParams.config(name="train", split="train", is_training=True, **rows),
            kind.HParams.config(name="heldout", split="heldout", **rows),
        ]
        if self.REFERENCE_FOLDER is not None:
            reference_id = _weights_digest(getattr(self, "HF_FOLDER", None))
            for one in inputs:
                file = str(Path(self.REFERENCE_FOLDER, f"{one.split}.npz"))
                one.set(reference_file=file, reference_id=reference_id)
        return inputs

    def decode_datasets(self) -> list[Config]:
        """Return the config of held-out prompts; a reward model has none."""
        return [] if self.LOSS == "reward" else super().decode_datasets()


def _weights_digest(folder: str | None) -> str:
    """Return a digest of the names, sizes and last bytes of the weights in a folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")) if folder is not None else ():
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _NUM_LAST_BYTES, 0))
            digest.update(f"{path.name} {size}".encode() + file.read())
    return digest.hexdigest()
