"""Fine-tuning of a Hugging Face model on local text, fully or by LoRA.

`runner --exp=lm.fine_tune.FineTune --fdl.HF_FOLDER=Llama-3.2-1B --fdl.TEXT_FILES='["notes/*.md"]'`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config, build, field_names, target_of
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit.layers.quantization.lora import LORA_WEIGHTS
from layerkit_experiments.recipes.fine_tuning import add_adapters
from layerkit_experiments.recipes.language_model import remat_policy
from layerkit_experiments.recipes.local_files import LocalFiles
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_inputs.base.tokenizer_interface import end_ids
from layerkit_runner.init_from.settings import weights_of
from layerkit_runner.step.task import SingleTask


class HuggingFaceLm(TrainedExperiment, abstract=True):
    """Model and initial weights of a folder, trained by AdamW; a subclass adds the data.

    With LORA_RANK or ADAPTERS, only adapters are trained. `--mode=export --export_dir=DIR` writes
    the trained model in the same format.
    """

    tags: ClassVar[tuple[str, ...]] = ("lm", "fine_tune")

    HF_FOLDER: str
    """Folder with config.json and safetensors files."""
    FPROP_DTYPE: str = "bfloat16"
    """Dtype of the computation; weights are float32."""
    USE_REPEATED_LAYER: bool = True
    """Run layers as a scan over stacked weights instead of unrolled."""
    CHECKPOINT_POLICY: str = "full"
    """Rematerialization policy; see `layerkit.ops.remat`."""
    MAX_DECODE_STEPS: int = 64
    TEMPERATURE: float | None = None
    """Divisor of the logits in sampling; None for the default of the folder, as its other options
    of decoding."""
    EOS_ID: int | None = None
    """Token that ends a continuation; None for each end token of the folder and the tokenizer."""
    LORA_RANK: int | None = None
    """Rank of new LoRA adapters; None to train all weights, or ADAPTERS."""
    LORA_ALPHA: float = 16.0
    """Adapters are multiplied by LORA_ALPHA / LORA_RANK."""
    LORA_DROPOUT_RATE: float = 0.0
    LORA_ONLY: str = ".*(query|value)_tpl"
    """Pattern of field paths of products with an adapter; `.*_tpl` matches all."""
    LORA_RANK_STABILIZED: bool = False
    """Multiply adapters by LORA_ALPHA / √LORA_RANK (rsLoRA)."""
    LORA_MAGNITUDE: bool = False
    """Also train the norms of the columns of the adapted weights (DoRA)."""
    ADAPTERS: dict[str, float] | None = None
    """Weights of folders of PEFT, whose summed adapters are trained further, in place of those of
    the fields above."""
    WEIGHT_FORMAT: str | None = None
    """Format in which frozen weights beside adapters are stored, such as `nf4:64` (QLoRA, see
    docs/quantization.md); None for floats."""

    LEARNING_RATE = 1e-5
    WARMUP_STEPS = 50
    MAX_STEPS = 1000
    CHECKPOINT_EVERY_N_STEPS = 200

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
        is_decoder = {"lm_tpl", "decoder"} <= set(field_names(model))
        expected = f"a decoder-only language model, not a {target_of(model).__qualname__}"
        require(is_decoder, None, "HF_FOLDER", self.HF_FOLDER, expected)
        model.lm_tpl.stack_tpl.remat = remat_policy(self.CHECKPOINT_POLICY)
        decoder.max_length, decoder.max_decode_steps = None, self.MAX_DECODE_STEPS
        decoder.min_decode_steps = min(decoder.min_decode_steps, self.MAX_DECODE_STEPS)
        if self.TEMPERATURE is not None:
            decoder.temperature = self.TEMPERATURE
        if self.EOS_ID is not None:
            decoder.eos_id = self.EOS_ID
        model.set(decoder=decoder, weight_format=self.WEIGHT_FORMAT)
        if self.LORA_RANK is None or self.ADAPTERS:
            return model
        return add_adapters(
            self,
            model,
            rank_stabilized=self.LORA_RANK_STABILIZED,
            has_magnitude=self.LORA_MAGNITUDE,
        )

    def learner(self) -> Config:
        """Return the config of the learner, which trains only adapters if there are any."""
        learner = super().learner()
        has_adapters = self.LORA_RANK or self.ADAPTERS
        return learner.set(trainable=(LORA_WEIGHTS,)) if has_adapters else learner

    def start_notes(self) -> list[str]:
        """Return notes, also about the decoding defaults of the folder."""
        from layerkit.interop import hugging_face

        decoder = self.model().decoder
        return [*super().start_notes(), *hugging_face.generation_notes(self.HF_FOLDER, decoder)]

    def validate(self) -> None:
        """Raise an error if the model is not supported, or does not fit the data.

        A model would train without an error on longer rows than those for which it was made.
        """
        from layerkit.interop import hugging_face

        super().validate()
        names = [name for name in vars(HuggingFaceLm) if name.startswith("LORA_")]
        for name in names if self.ADAPTERS else ():
            value, default = getattr(self, name), getattr(type(self), name)
            expected = f"{default!r}, since the folders of ADAPTERS have their own"
            require(value == default, None, name, value, expected)
        has_adapters = self.LORA_RANK or self.ADAPTERS or self.WEIGHT_FORMAT is None
        expected = "None, since weights in integers are not trained, or adapters (LORA_RANK)"
        require(has_adapters, None, "WEIGHT_FORMAT", self.WEIGHT_FORMAT, expected)
        needed, known = getattr(self, "VOCAB_SIZE", 0), self.model().lm_tpl.vocab_size
        length, positions = getattr(self, "MAX_SEQ_LEN", 0), hugging_face.max_length(self.HF_FOLDER)
        expected = f"at most {positions}, the positions in {self.HF_FOLDER}/config.json"
        require(positions is None or length <= positions, None, "MAX_SEQ_LEN", length, expected)
        expected = f"at most {known}, the vocabulary of the model in {self.HF_FOLDER}"
        require(needed <= known, None, "VOCAB_SIZE", needed, expected)

    def task(self) -> Config:
        """Return the config of the task, whose decoder ends at each end token that is declared."""
        model = self.model()
        tokenizer = getattr(self, "tokenizer", None)
        if self.EOS_ID is None and tokenizer is not None:
            decoder_ends = build(model.decoder).eos_ids
            ends = tuple(dict.fromkeys((*decoder_ends, *end_ids(build(tokenizer())))))
            model.decoder.eos_id = ends if len(ends) > 1 else next(iter(ends), None)
        if self.ADAPTERS:
            # Imported late, since few runs read folders of PEFT.
            from layerkit.interop import peft

            try:
                model = peft.add_adapters(model, self.ADAPTERS)
            except OSError as error:
                raise ConfigError(str(error), owner="ADAPTERS") from error
        return SingleTask.HParams.config(
            name="lm",
            model=model,
            train=train_config(self, self.learner()),
            initial_weights=weights_of(self.HF_FOLDER, self.ADAPTERS),
        )


def folder_vocab_size(experiment: HuggingFaceLm) -> int:
    """Return the vocabulary size of the model in the folder."""
    size: int = experiment.model().lm_tpl.vocab_size
    return size


class FineTune(LocalFiles, HuggingFaceLm):
    """All weights of the model in HF_FOLDER, on all devices."""

    MAX_SEQ_LEN = 1024
    VOCAB_SIZE = property(folder_vocab_size)

    reduced_fields: ClassVar[Mapping[str, Any]] = {"PERCORE_BATCH_SIZE": 8.0}


class FineTuneLora(FineTune):
    """LoRA adapters of the queries and values of the model in HF_FOLDER."""

    tags: ClassVar[tuple[str, ...]] = ("lora",)

    LORA_RANK = 8
    LEARNING_RATE = 3e-4
    WEIGHT_DECAY = 0.0
