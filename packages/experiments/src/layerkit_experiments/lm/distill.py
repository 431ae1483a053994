"""Distillation of a teacher, a Hugging Face model or that of a job, into a smaller model.

`runner --exp=lm.distill.Distill --fdl.HF_FOLDER=Qwen3-0.6B --fdl.TEACHER=Qwen3-8B …`
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from layerkit.config import Config, build, field_names
from layerkit.errors import ConfigError
from layerkit.models.distillation_model import TEACHER_WEIGHTS, DistillationModel
from layerkit_experiments.lm.fine_tune import HuggingFaceLm, folder_vocab_size
from layerkit_experiments.recipes.chat_files import ChatFiles
from layerkit_experiments.recipes.local_files import LocalFiles
from layerkit_inputs.base.tokenizer_interface import first_difference
from layerkit_inputs.mixing.stored_rows import add_stored_arrays
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.init_from.settings import InitFrom, Source


class Distilled(BaseExperiment, abstract=True):
    """Fields of the teacher and of the loss. Put it before the experiment of the student."""

    tags: ClassVar[tuple[str, ...]] = ("distillation",)

    TEACHER: str
    """Folder of a Hugging Face model, of a job, or of one of its checkpoints."""
    TEACHER_LOGITS: str | None = None
    """Folder that `--mode=top_logits` wrote with these fields. The student learns from its tokens,
    and the network of the teacher is not loaded."""
    TEACHER_RULES: dict[str, str | None] = {}
    """Mesh axes of logical axes of the teacher's weights, where they differ from the student's."""
    KL_BETA: float = 0.0
    """0 for KL(teacher‖student), 1 for KL(student‖teacher), between them the Jensen–Shannon
    divergence of GKD."""
    KL_TEMPERATURE: float = 1.0
    """Divisor of both logits in the divergence."""
    ALPHA: float = 0.9
    """Weight of the divergence; 1 − ALPHA is that of the data's cross-entropy."""
    FEATURES: dict[int, int] = {}
    """Layers of the teacher by the layers of the student that learn their outputs."""
    ON_POLICY_FRACTION: float = 0.0
    """Share of the steps that learn from samples of the student in place of the data. They continue
    what precedes the first token with a loss, or PROMPT_LENGTH tokens where all have one."""

    @functools.cached_property
    def teacher(self) -> Any:
        """The resolved experiment of the teacher's folder.

        Its weights and computation keep their dtype.

        Raises:
          ConfigError: The folder has no decoder-only language model.
        """
        # Imported late, since listing experiments needs no loader.
        from layerkit_runner.interface.loading import folder_experiment

        resolved, _ = folder_experiment(self.TEACHER)
        model = resolved.task.model
        if "lm_tpl" not in field_names(model):
            expected = "the folder of a decoder-only language model"
            raise ConfigError(field="TEACHER", value=self.TEACHER, expected=expected)
        for name in ("dtype", "fprop_dtype"):
            kept = getattr(model.lm_tpl, name) or getattr(model, name) or "float32"
            setattr(model.lm_tpl, name, kept)
        return resolved

    def task(self) -> Config:
        """Return the config of the task, in which a teacher has the weights of its folder."""
        task: Config = super().task()
        fields: dict[str, Any] = {
            "beta": self.KL_BETA,
            "temperature": self.KL_TEMPERATURE,
            "alpha": self.ALPHA,
            "features": tuple(self.FEATURES.items()),
            "on_policy_fraction": self.ON_POLICY_FRACTION,
        }
        if self.ON_POLICY_FRACTION and hasattr(self, "PROMPT_LENGTH"):
            fields["prompt_length"] = self.PROMPT_LENGTH
        learner, initial = task.train.learner, task.initial_weights
        if self.FEATURES and learner.trainable is not None:
            learner.trainable = [*learner.trainable, "feature_.*"]
        if self.TEACHER_LOGITS is not None:
            fields["num_ids"] = self._num_ids()
            return task.set(model=task.model.with_class(DistillationModel, **fields))
        fields["teacher_tpl"] = self.teacher.task.model.lm_tpl
        rules = [(TEACHER_WEIGHTS, r"lm/\1")]
        use_ema = self.teacher.task.train.decode_use_ema_states
        sources = [Source.HParams.config(folder=self.TEACHER, rules=rules, use_ema=use_ema)]
        if initial is None:
            initial = InitFrom.HParams.config(sources=sources, missing="draw")
        else:
            draw = ("feature_.*",) if self.FEATURES else ()
            initial.set(sources=[*initial.sources, *sources], draw=draw)
        model = task.model.with_class(DistillationModel, **fields)
        return task.set(model=model, initial_weights=initial)

    def _num_ids(self) -> int:
        """Return the number of ids that both vocabularies have."""
        models = (self.model(), self.teacher.task.model)  # type: ignore[attr-defined]
        return min(model.lm_tpl.vocab_size for model in models)

    def datasets(self) -> list[Config]:
        """Return the data sets of the student, with the tokens of TEACHER_LOGITS if it is set."""
        from layerkit_runner.init_from.sources import weights_digest

        configs = super().datasets()
        if self.TEACHER_LOGITS is None:
            return configs
        about = {
            "teacher": weights_digest(self.TEACHER),
            "temperature": self.KL_TEMPERATURE,
            "num_ids": self._num_ids(),
        }
        return [add_stored_arrays(c, folder=self.TEACHER_LOGITS, about=about) for c in configs]

    def partitioner(self) -> Config:
        """Return the config of the partitioner, with the rules of the teacher."""
        partitioner = super().partitioner()
        rules = {f"teacher_{name}": axes for name, axes in self.TEACHER_RULES.items()}
        return partitioner.set(rules=partitioner.rules.extend(**rules)) if rules else partitioner

    def start_notes(self) -> list[str]:
        """Return notes, also about a teacher whose tokenizer is not known."""
        is_known = self.teacher.experiment.tokenizer() is not None
        unknown = f"teacher      {self.TEACHER} has no tokenizer to compare with that of the data"
        return [*super().start_notes(), *([] if is_known else [unknown])]

    def validate(self) -> None:
        """Raise an error if the teacher reads the ids of the data as other text."""
        super().validate()
        configs = (self.tokenizer(), self.teacher.experiment.tokenizer())
        known = [build(config) for config in configs if config is not None]
        difference = first_difference(*known) if len(known) == len(configs) else None
        if difference is not None:
            raise ConfigError(
                f"the tokenizers of the data and of the teacher differ: {difference}",
                field="TEACHER",
                value=self.TEACHER,
                expected="a model with the tokenizer of the student and its data",
            )


class Distill(Distilled, LocalFiles, HuggingFaceLm):
    """The model in HF_FOLDER, which learns the distributions of the model in TEACHER on text."""

    unused_fields: ClassVar[tuple[str, ...]] = ("WEIGHT_FORMAT",)

    MAX_SEQ_LEN = 1024
    VOCAB_SIZE = property(folder_vocab_size)


class OnPolicy(Distilled, ChatFiles, HuggingFaceLm):
    """The model in HF_FOLDER, which learns from the teacher's judgement of its own answers."""

    unused_fields: ClassVar[tuple[str, ...]] = ("WEIGHT_FORMAT",)

    KL_BETA = 1.0
    ON_POLICY_FRACTION = 1.0
    TEMPERATURE = 1.0
    PACKING = "none"
