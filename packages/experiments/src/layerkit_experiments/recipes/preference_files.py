"""Preferences in files of this machine as training data, and the models that they train."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from layerkit.config import Config, field_names, walk_configs
from layerkit.config.checks import require
from layerkit.layers.quantization.lora import is_lora
from layerkit.models import KtoModel, PreferenceModel, RewardModel
from layerkit_experiments.recipes.chat_files import ChatFiles
from layerkit_experiments.recipes.local_files import split_inputs
from layerkit_experiments.recipes.training import TrainedExperiment
from layerkit_inputs import JudgementInput, PairInput
from layerkit_inputs.mixing.stored_rows import add_stored_arrays
from layerkit_runner.config.stages import stages_of

# Losses with a reference that can be stored; and the models of other losses than those of pairs.
_STORED = ("sigmoid", "hinge", "ipo")
_MODELS: dict[str, Any] = {"kto": KtoModel, "reward": RewardModel}
# Fields of the models that are fields of the experiment.
_WEIGHTS = ("desirable_weight", "undesirable_weight", "centering")
_MODEL_FIELDS = ("beta", "label_smoothing", "gamma", *_WEIGHTS)


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
    """Folder of log-probabilities of pairs, which `reference_log_probs` computed for `StoredRows`.
    None computes them in each step."""

    PERCORE_BATCH_SIZE = 4.0
    LEARNING_RATE = 1e-6
    WARMUP_STEPS = 50
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 200

    unused_fields: ClassVar[tuple[str, ...]] = ("LOSS_ON", "PACKING", "TOO_LONG")

    def validate(self) -> None:
        """Raise an error if a stage of KTO has a single row in a batch, or microbatch."""
        super().validate()
        least = 2 * self.GRADIENT_ACCUMULATION_STEPS if self.LOSS == "kto" else 1
        expected = f"at least {least}, 2 in a microbatch, to mismatch answers (LOSS='kto')"
        for index, stage in enumerate(stages_of(self)):
            rows = stage.batch
            require(rows is None or rows >= least, f"STAGES[{index}]", "batch", rows, expected)

    def check_init_from(self, folder: str) -> None:
        """Raise ConfigError if the stored reference is of other weights than those of a folder."""
        from layerkit_runner.init_from.sources import weights_digest

        base, stored = getattr(self, "HF_FOLDER", None), self.REFERENCE_FOLDER
        expected = f"None, since it is of HF_FOLDER={base}, whose weights --init_from replaces"
        is_known = base is not None and stored is not None
        has_adapters = bool(getattr(self, "ADAPTERS", None))
        is_start = not is_known or (
            not has_adapters and weights_digest(folder) == weights_digest(str(base))
        )
        require(is_start, type(self).__qualname__, "REFERENCE_FOLDER", stored, expected)

    def task(self) -> Config:
        """Return the config of the task, whose model learns by LOSS."""
        task, model_class = super().task(), _MODELS.get(self.LOSS, PreferenceModel)
        names = [name for name in _MODEL_FIELDS if name in field_names(model_class)]
        unread = [name.upper() for name in _MODEL_FIELDS if name not in names]
        for name in [*unread, *(["REFERENCE_FOLDER"] if self.LOSS not in _STORED else [])]:
            value, default = getattr(self, name), getattr(PreferenceFiles, name)
            expected = f"{default}, since LOSS={self.LOSS!r} does not read it"
            require(value == default, None, name, value, expected)
        fields: dict[str, Any] = {name: getattr(self, name.upper()) for name in names}
        learner = task.train.learner
        if model_class is RewardModel:
            del task.model.decoder
            if task.initial_weights is not None:
                task.initial_weights.draw = ("score/.*",)
            if learner.trainable is not None:
                learner.trainable = [*learner.trainable, "score/.*"]
        else:
            fields["reference"] = self._reference(task.model)
        if model_class is PreferenceModel:
            fields["loss"] = self.LOSS
        if self.LOSS == "orpo":
            task.loss_weights = {"odds_ratio": 1.0, "xent": 1.0}
        task.model = task.model.with_class(model_class, **fields)
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
        kind = JudgementInput if self.LOSS == "kto" else PairInput
        inputs = split_inputs(self, kind, **self._conversations())
        if (stored := self.REFERENCE_FOLDER) is None:
            return inputs
        from layerkit_runner.init_from.sources import weights_digest

        folder, adapters = getattr(self, "HF_FOLDER", None), getattr(self, "ADAPTERS", None)
        about: dict[str, Any] = {"reference": "" if folder is None else weights_digest(folder)}
        if adapters:
            about["adapters"] = [[weights_digest(one), scale] for one, scale in adapters.items()]
        return [add_stored_arrays(config, folder=stored, about=about) for config in inputs]

    def decode_datasets(self) -> list[Config]:
        """Return the config of held-out prompts; a reward model has none."""
        return [] if self.LOSS == "reward" else super().decode_datasets()
