"""Distillation of a teacher, a Hugging Face model or that of a job, into a smaller model.

`runner --exp=lm.distill.Distill --fdl.HF_FOLDER=Qwen3-0.6B --fdl.TEACHER=Qwen3-8B …`
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from layerkit.config import Config, build, field_names
from layerkit.errors import ConfigError
from layerkit.models.distillation_model import TEACHER_WEIGHTS, DistillationModel
from layerkit_experiments.lm.fine_tune import HuggingFaceLm
from layerkit_experiments.recipes.chat_files import ChatFiles
from layerkit_experiments.recipes.language_model import LmExperiment
from layerkit_experiments.recipes.local_files import LocalFiles
from layerkit_inputs import TeacherRows
from layerkit_inputs.base.tokenizer_interface import first_difference
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

    def model(self) -> Config:
        """Return the config of the student with its teacher."""
        student, teacher = super().model(), self.teacher.task.model.lm_tpl  # type: ignore[misc]
        config: Config = DistillationModel.HParams.config(
            lm_tpl=student.lm_tpl,
            decoder=student.decoder,
            fprop_dtype=student.fprop_dtype,
            beta=self.KL_BETA,
            temperature=self.KL_TEMPERATURE,
            alpha=self.ALPHA,
            features=tuple(self.FEATURES.items()),
            on_policy_fraction=self.ON_POLICY_FRACTION,
        )
        if self.TEACHER_LOGITS is None:
            config.teacher_tpl = teacher
        else:
            config.num_ids = min(student.lm_tpl.vocab_size, teacher.vocab_size)
        if self.ON_POLICY_FRACTION:
            config.prompt_length = getattr(self, "PROMPT_LENGTH", config.prompt_length)
        return config

    def learner(self) -> Config:
        """Return the config of the learner, which trains maps of features and not the teacher."""
        learner: Config = super().learner()  # type: ignore[misc]
        if learner.trainable is not None:
            trainable = [f"(?!teacher/){pattern}" for pattern in learner.trainable]
            return learner.set(trainable=[*trainable, "feature_.*"] if self.FEATURES else trainable)
        has_teacher = self.TEACHER_LOGITS is None
        return learner.set(frozen=[*learner.frozen, *([TEACHER_WEIGHTS] if has_teacher else [])])

    def task(self) -> Config:
        """Return the config of the task, whose teacher has the weights of its folder."""
        task: Config = super().task()
        if self.TEACHER_LOGITS is not None:
            return task
        rules = [(TEACHER_WEIGHTS, r"lm/\1")]
        sources = [Source.HParams.config(folder=self.TEACHER, rules=rules)]
        initial = InitFrom.HParams.config(sources=sources, missing="draw")
        if task.initial_weights is not None:
            initial.set(sources=[*task.initial_weights.sources, *sources], missing="error")
            initial.draw = ("feature_.*",) if self.FEATURES else ()
        return task.set(initial_weights=initial)

    def datasets(self) -> list[Config]:
        """Return the data sets of the student, with the tokens of TEACHER_LOGITS if it is set."""
        from layerkit_runner.init_from.sources import weights_digest

        configs = super().datasets()
        if self.TEACHER_LOGITS is None:
            return configs
        about = {
            "teacher": weights_digest(self.TEACHER),
            "temperature": self.KL_TEMPERATURE,
            "num_ids": self.model().num_ids,
        }
        fields: dict[str, Any] = {"folder": self.TEACHER_LOGITS, "about": about}
        names = ("name", "is_training", "percore_batch_size", "batch_size")
        return [
            TeacherRows.HParams.config(source=c, **{n: getattr(c, n) for n in names}, **fields)
            for c in configs
        ]

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

    TOKENIZER: str | None = None  # type: ignore[assignment]
    """Tokenizer as in `LocalFiles`; None for that of HF_FOLDER."""

    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    MAX_SEQ_LEN = 1024
    LEARNING_RATE = 1e-5
    WARMUP_STEPS = 50
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 200

    @property
    def VOCAB_SIZE(self) -> int:  # type: ignore[override]  # noqa: N802
        """Vocabulary size of the model in the folder."""
        size: int = self.model().lm_tpl.vocab_size
        return size


class OnPolicy(Distilled, ChatFiles, HuggingFaceLm):
    """The model in HF_FOLDER, which learns from the teacher's judgement of its own answers."""

    unused_fields: ClassVar[tuple[str, ...]] = ("WEIGHT_FORMAT",)

    KL_BETA = 1.0
    ON_POLICY_FRACTION = 1.0
    TEMPERATURE = 1.0
    PACKING = "none"

    FPROP_DTYPE = "bfloat16"
    CHECKPOINT_POLICY = "full"
    LEARNING_RATE = 1e-5
    WARMUP_STEPS = 50
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 200


class DistillText(Distilled, LocalFiles, LmExperiment):
    """A new model of a quarter of the weights of the quickstart, from a teacher of bytes."""

    NUM_LAYERS = 4
    MODEL_DIMS = 64
    HIDDEN_DIMS = 256
    NUM_HEADS = 2
    NUM_KV_HEADS = 1
    NORM = "rms_norm"
    ACTIVATION = "silu"
    USE_GATED_ACTIVATION = True
    POSITIONS = "rotary"
    MAX_SEQ_LEN = 128
    MAX_STEPS = 2000
    LEARNING_RATE = 2e-3
    WARMUP_STEPS = 200
    EVAL_INTERVAL_STEPS = 500
    CHECKPOINT_EVERY_N_STEPS = 500
    TEMPERATURE = 0.7
    PROMPT_LENGTH = 32
    MAX_DECODE_STEPS = 96
    EOS_ID = 2
