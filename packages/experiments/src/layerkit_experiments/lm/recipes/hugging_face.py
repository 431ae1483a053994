"""Fine-tuning a model that lies in a Hugging Face folder."""

from __future__ import annotations

from typing import ClassVar

from layerkit.config import Config, field_names, target_of
from layerkit.decoding import SampleDecoder
from layerkit_experiments.lm.recipes.model import remat_policy
from layerkit_experiments.lm.recipes.optimization import TrainingLength
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.training.task import SingleTask


class HuggingFaceLm(TrainingLength, BaseExperiment, abstract=True):
    """Model and first weights from a folder; add one class each of optimization and data.

    `--mode=export --export_dir=DIR` writes what was trained as such a folder again.
    """

    tags: ClassVar[tuple[str, ...]] = ("lm", "fine_tune")

    HF_FOLDER: str
    """With config.json and safetensors files."""
    FPROP_DTYPE: str = "float32"
    """Of the computation; weights are float32."""
    USE_REPEATED_LAYER: bool = True
    """One scan over stacked weights instead of a layer after a layer."""
    CHECKPOINT_POLICY: str = "none"
    """What the backward pass keeps; see `layerkit.layers.remat`."""
    MAX_DECODE_STEPS: int = 64
    TEMPERATURE: float = 1.0
    EOS_ID: int | None = None
    """The token that ends a continuation; None for that of the folder, or those."""

    def model(self) -> Config:
        """The config of the model in the folder.

        Raises:
          ValueError: no such folder, or a model that is not supported, or is no language model.
        """
        from layerkit.interop import hugging_face

        try:
            model = hugging_face.model_config(
                self.HF_FOLDER, repeated=self.USE_REPEATED_LAYER, fprop_dtype=self.FPROP_DTYPE
            )
        except OSError as error:
            raise ValueError(f"HF_FOLDER: {error}") from error
        if "lm_tpl" not in field_names(model):
            raise ValueError(
                f"HF_FOLDER: {self.HF_FOLDER} holds a {target_of(model).__qualname__}, which reads"
                " one text and writes another; HuggingFaceLm trains language models"
            )
        model.lm_tpl.stack_tpl.remat = remat_policy(self.CHECKPOINT_POLICY)
        model.decoder = SampleDecoder.HParams.config(
            max_decode_steps=self.MAX_DECODE_STEPS,
            temperature=self.TEMPERATURE,
            eos_id=hugging_face.eos_id(self.HF_FOLDER) if self.EOS_ID is None else self.EOS_ID,
        )
        return model

    def validate(self) -> None:
        """Refuses a folder that cannot be read, or a model that is not supported or too small."""
        super().validate()
        known = self.model().lm_tpl.vocab_size
        needed = getattr(self, "VOCAB_SIZE", 0)
        if needed > known:
            raise ValueError(
                f"the data have VOCAB_SIZE={needed} ids, but the model in {self.HF_FOLDER} knows"
                f" {known}: the loss of the others would be NaN"
            )

    def learner(self) -> Config:
        """The config of the learner; an optimization recipe defines it."""
        raise NotImplementedError(
            f"{type(self).__qualname__} needs an optimization recipe, such as AdamWCosine"
        )

    def task(self) -> Config:
        """The config of the task."""
        from layerkit.interop.hugging_face import HuggingFaceWeights

        return SingleTask.HParams.config(
            name="lm",
            model=self.model(),
            train=self.train_config(self.learner()),
            initial_weights=HuggingFaceWeights.HParams.config(folder=self.HF_FOLDER),
        )
