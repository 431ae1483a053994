"""Fine-tuning of a model of a Hugging Face folder."""

from __future__ import annotations

from typing import ClassVar

from layerkit.config import Config, build, field_names, target_of
from layerkit.errors import ConfigError
from layerkit_experiments.recipes.decoder import remat_policy
from layerkit_experiments.recipes.fine_tuning import weights_of
from layerkit_experiments.recipes.optimizers import TrainingLength
from layerkit_inputs.base.special_ids import end_ids
from layerkit_runner.config.experiment import BaseExperiment
from layerkit_runner.step.task import SingleTask


class HuggingFaceLm(TrainingLength, BaseExperiment, abstract=True):
    """Model and initial weights of a folder; add a recipe of optimization and one of data.

    `--mode=export --export_dir=DIR` writes the trained model in the same format.
    """

    tags: ClassVar[tuple[str, ...]] = ("lm", "fine_tune")

    HF_FOLDER: str
    """Folder with config.json and safetensors files."""
    FPROP_DTYPE: str = "float32"
    """Dtype of the computation; weights are float32."""
    USE_REPEATED_LAYER: bool = True
    """Run layers as a scan over stacked weights instead of unrolled."""
    CHECKPOINT_POLICY: str = "none"
    """Rematerialization policy; see `layerkit.ops.remat`."""
    MAX_DECODE_STEPS: int = 64
    TEMPERATURE: float | None = None
    """Divisor of the logits in sampling; None for the default of the folder, as its other options
    of decoding."""
    EOS_ID: int | None = None
    """Token that ends a continuation; None for each end token of the folder and the tokenizer."""

    def model(self) -> Config:
        """Return the config of the model in the folder.

        Raises:
          ConfigError: The folder does not exist, or holds no supported language model.
        """
        from layerkit.interop import hugging_face

        try:
            model = hugging_face.model_config(
                self.HF_FOLDER, repeated=self.USE_REPEATED_LAYER, fprop_dtype=self.FPROP_DTYPE
            )
            decoder = hugging_face.decoder_config(self.HF_FOLDER)
        except OSError as error:
            raise ConfigError(str(error), owner="HF_FOLDER") from error
        if "lm_tpl" not in field_names(model):
            raise ConfigError(
                field="HF_FOLDER",
                value=self.HF_FOLDER,
                expected=f"a decoder-only language model, not a {target_of(model).__qualname__}",
            )
        model.lm_tpl.stack_tpl.remat = remat_policy(self.CHECKPOINT_POLICY)
        decoder.max_length, decoder.max_decode_steps = None, self.MAX_DECODE_STEPS
        decoder.min_decode_steps = min(decoder.min_decode_steps, self.MAX_DECODE_STEPS)
        if self.TEMPERATURE is not None:
            decoder.temperature = self.TEMPERATURE
        if self.EOS_ID is not None:
            decoder.eos_id = self.EOS_ID
        return model.set(decoder=decoder)

    def start_notes(self) -> list[str]:
        """Return notes, also about the decoding defaults of the folder."""
        from layerkit.interop import hugging_face

        decoder = self.model().decoder
        return [*super().start_notes(), *hugging_face.generation_notes(self.HF_FOLDER, decoder)]

    def validate(self) -> None:
        """Raise an error if the model is not supported, or does not fit the data.

        A model would train without an error on bytes instead of the tokens that it knows, and on
        longer rows than those for which it was made.
        """
        from layerkit.interop import hugging_face

        super().validate()
        known = self.model().lm_tpl.vocab_size
        tokenizer = hugging_face.tokenizer_file(self.HF_FOLDER)
        if tokenizer is not None and getattr(self, "TOKENIZER", None) == "bytes":
            raise ConfigError(
                field="TOKENIZER",
                value="bytes",
                expected=f"the tokenizer of {self.HF_FOLDER}, with which its model was trained",
                hint="lm.fine_tune.FineTune reads the tokenizer and its size from the folder.",
                settings={"TOKENIZER": tokenizer, "VOCAB_SIZE": known},
            )
        length, positions = getattr(self, "MAX_SEQ_LEN", 0), hugging_face.max_length(self.HF_FOLDER)
        if positions is not None and length > positions:
            raise ConfigError(
                field="MAX_SEQ_LEN",
                value=length,
                expected=f"at most {positions}, the positions in {self.HF_FOLDER}/config.json",
            )
        needed = getattr(self, "VOCAB_SIZE", 0)
        if needed > known:
            raise ConfigError(
                field="VOCAB_SIZE",
                value=needed,
                expected=f"at most {known}, the vocabulary of the model in {self.HF_FOLDER}",
            )

    def learner(self) -> Config:
        """Return the config of the learner; an optimization recipe defines it."""
        raise NotImplementedError(
            f"{type(self).__qualname__} needs an optimization recipe, such as AdamWCosine"
        )

    def task(self) -> Config:
        """Return the config of the task, whose decoder ends at each end token that is declared."""
        model = self.model()
        tokenizer = getattr(self, "tokenizer", None)
        if self.EOS_ID is None and tokenizer is not None:
            decoder_ends = build(model.decoder).eos_ids
            ends = tuple(dict.fromkeys((*decoder_ends, *end_ids(build(tokenizer())))))
            model.decoder.eos_id = ends if len(ends) > 1 else next(iter(ends), None)
        return SingleTask.HParams.config(
            name="lm",
            model=model,
            train=self.train_config(self.learner()),
            initial_weights=weights_of(self.HF_FOLDER),
        )
