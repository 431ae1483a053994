"""Recipe of speech recognition by a Conformer, and of its pre-training by BEST-RQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from layerkit.config import Config, build
from layerkit.config.checks import require
from layerkit.layers import (
    LayerNorm,
    PositionalEmbedding,
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.models import AttentionDecoderModel, BestRqModel, CtcModel, TransducerModel
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_experiments.speech.spoken_digits import SpokenDigits
from layerkit_inputs import AudioFiles, tokenizer_config
from layerkit_runner.init_from import InitFrom, Source
from layerkit_runner.step.task import SingleTask

_MODELS = {
    "ctc": CtcModel,
    "transducer": TransducerModel,
    "attention": AttentionDecoderModel,
    "best_rq": BestRqModel,
}


class SpeechExperiment(TrainedExperiment, abstract=True):
    """A Conformer (Gulati et al., 2020, arXiv:2005.08100), trained with the loss LOSS."""

    tags: ClassVar[tuple[str, ...]] = ("speech",)

    LOSS: Literal["ctc", "transducer", "attention", "best_rq"] = "ctc"
    """`attention`: a Transformer decoder; `best_rq`: pre-training, which reads no transcripts."""
    INIT_FROM: str | None = None
    """Job or checkpoint of a LOSS other than `attention`, whose encoder the run starts with. None:
    random weights. `--init_from` takes precedence."""
    NUM_LAYERS: int = 16
    MODEL_DIMS: int = 144
    NUM_HEADS: int = 4
    KERNEL_SIZE: int = 32
    CONV_NORM: Literal["batch", "layer"] = "batch"
    """Norm in the convolutions of layers. The moving averages of `batch` need many steps."""
    NUM_CHANNELS: int = 144
    """Channels of the convolutions that subsample frames."""
    JOINT_DIMS: int = 640
    """Size of the joint network of a transducer."""
    NUM_DECODER_LAYERS: int = 6
    """Layers of the decoder of `attention`."""
    NUM_CODES: int = 8192
    """Codes of a codebook of `best_rq`."""
    NUM_CODEBOOKS: int = 1
    """Codebooks of `best_rq`, each with a projection of its own to 16 dimensions."""
    MASK_PROB: float = 0.01
    """Probability that `best_rq` masks a span that begins at a frame of 10 ms."""
    MASK_FRAMES: int = 40
    """Frames of a span."""
    VOCAB_SIZE: int = 259
    """Number of ids, of which 0 is the blank."""
    DROPOUT_RATE: float = 0.1
    SAMPLE_RATE: int = 16_000
    NUM_BINS: int = 80
    TIME_MASKS: int = 10
    """Number of masks of frames; see `SpectrumAugmenter`."""
    FPROP_DTYPE: str = "float32"
    USE_REPEATED_LAYER: bool = True
    """Run layers as a scan over stacked weights instead of unrolled."""

    DATA_FORMAT: Literal["digits", "files"] = "files"
    """`digits`: synthetic spoken digits; `files`: recordings of DATA_FOLDER."""
    DATA_FOLDER: str = "."
    """Folder of `train` and `heldout`, folders of recordings and transcripts."""
    TOKENIZER: str = "bytes"
    """Tokenizer of transcripts: `bytes`, a SentencePiece `.model`, or a `tokenizer.json`."""
    MAX_SECONDS: float = 16.8
    """Length of a row; longer recordings are left out."""
    MAX_LABELS: int = 400
    NUM_TRAIN: int | None = None
    """Number of rows of an epoch, for `digits`; None for an endless stream."""
    NUM_HELDOUT: int = 256
    """Number of rows of an evaluation, for `digits`."""
    PERCORE_BATCH_SIZE: float = 8.0

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "NUM_LAYERS": 2,
        "MODEL_DIMS": 64,
        "NUM_HEADS": 4,
        "KERNEL_SIZE": 7,
        "NUM_CHANNELS": 16,
        "CONV_NORM": "layer",
        "JOINT_DIMS": 64,
        "NUM_DECODER_LAYERS": 2,
        "NUM_CODES": 64,
        "VOCAB_SIZE": 259,
        "DROPOUT_RATE": 0.0,
        "TIME_MASKS": 0,
        "SAMPLE_RATE": 8000,
        "NUM_BINS": 40,
        "FPROP_DTYPE": "float32",
        "DATA_FORMAT": "digits",
        "TOKENIZER": "bytes",
        "MAX_SECONDS": 2.75,
        "MAX_LABELS": 9,
        "NUM_HELDOUT": 32,
        "PERCORE_BATCH_SIZE": 8.0,
    }

    def validate(self) -> None:
        """Check that the ids of the tokenizer of transcripts fit the vocabulary."""
        super().validate()
        if self.DATA_FORMAT == "files" and self.LOSS != "best_rq":
            least = build(tokenizer_config(self.TOKENIZER)).vocab_size
            expected = f"at least {least}, the size of TOKENIZER={self.TOKENIZER!r}"
            require(least <= self.VOCAB_SIZE, None, "VOCAB_SIZE", self.VOCAB_SIZE, expected)

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return "spoken digits, synthetic" if self.DATA_FORMAT == "digits" else self.DATA_FOLDER

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        return [
            self._sounds("train", name="train", is_training=True),
            self._sounds("heldout", name="heldout"),
        ]

    def decode_datasets(self) -> list[Config]:
        """Return the config of the held-out sounds, which `best_rq` does not decode."""
        is_decoded = self.LOSS != "best_rq"
        return [self._sounds("heldout", name="transcripts")] if is_decoded else []

    def _sounds(self, split: str, **fields: Any) -> Config:
        fields |= {
            "percore_batch_size": self.PERCORE_BATCH_SIZE,
            "sample_rate": self.SAMPLE_RATE,
            "max_samples": round(self.MAX_SECONDS * self.SAMPLE_RATE),
            "max_labels": self.MAX_LABELS,
        }
        if self.DATA_FORMAT == "digits":
            num_examples = self.NUM_TRAIN if split == "train" else self.NUM_HELDOUT
            return SpokenDigits.HParams.config(num_examples=num_examples, **fields)
        return AudioFiles.HParams.config(
            path=f"{self.DATA_FOLDER}/{split}",
            tokenizer=tokenizer_config(self.TOKENIZER),
            skips_longer=True,
            **fields,
        )

    def model(self) -> Config:
        """Return the config of the model."""
        model: Config = _MODELS[self.LOSS].HParams.config(fprop_dtype=self.FPROP_DTYPE)
        match self.LOSS:
            case "transducer":
                model.set(vocab_size=self.VOCAB_SIZE, joint_dims=self.JOINT_DIMS)
            case "attention":
                self._set_decoder(model)
            case "best_rq":
                model.set(mask_prob=self.MASK_PROB, mask_frames=self.MASK_FRAMES)
                model.quantizer_tpl.set(
                    num_classes=self.NUM_CODES,
                    num_groups=self.NUM_CODEBOOKS,
                    projection_dims=16 * self.NUM_CODEBOOKS,
                )
            case _:
                model.vocab_size = self.VOCAB_SIZE
        model.frontend_tpl.set(
            sample_rate=self.SAMPLE_RATE,
            frame_length=self.SAMPLE_RATE // 40,
            hop_length=self.SAMPLE_RATE // 100,
            fft_length=self.SAMPLE_RATE // 40,
            num_bins=self.NUM_BINS,
            normalization="utterance",
        )
        if self.LOSS != "best_rq":
            model.augmenter_tpl.time_mask_count = self.TIME_MASKS
        self._set_encoder(model.model_tpl if self.LOSS == "attention" else model)
        return model

    def _set_encoder(self, network: Config) -> None:
        encoder = network.encoder_tpl.set(
            num_bins=self.NUM_BINS,
            num_channels=self.NUM_CHANNELS,
            num_layers=self.NUM_LAYERS,
            **self._sizes(),
        )
        layer = encoder.stack_tpl.layer_tpl.set(dropout_rate=self.DROPOUT_RATE)
        layer.conv_tpl.kernel_size = self.KERNEL_SIZE
        if self.CONV_NORM == "layer":
            layer.conv_tpl.norm_tpl = LayerNorm.HParams.config()
        for block in (layer.feed_forward_tpl, layer.feed_forward_start_tpl):
            block.dropout_rate = self.DROPOUT_RATE
        stack = StackedTransformerRepeated if self.USE_REPEATED_LAYER else StackedTransformer
        encoder.stack_tpl = stack.HParams.config(layer_tpl=layer)

    def _set_decoder(self, model: Config) -> None:
        end = build(tokenizer_config(self.TOKENIZER)).eos_id
        model.decoder.set(temperature=0.0, max_decode_steps=self.MAX_LABELS + 1, eos_id=end)
        model.model_tpl.set(
            vocab_size=self.VOCAB_SIZE,
            num_decoder_layers=self.NUM_DECODER_LAYERS,
            position_tpl=PositionalEmbedding.HParams.config(),
            **self._sizes(),
        )

    def _sizes(self) -> dict[str, Any]:
        return {
            "model_dims": self.MODEL_DIMS,
            "hidden_dims": 4 * self.MODEL_DIMS,
            "num_heads": self.NUM_HEADS,
            "dropout_rate": self.DROPOUT_RATE,
        }

    def task(self) -> Config:
        """Return the config of the task."""
        task: Config = SingleTask.HParams.config(
            name="speech", model=self.model(), train=train_config(self, self.learner())
        )
        if self.INIT_FROM is not None:
            rules = [(r"(?:model/)?(encoder/.*)", r"\1")]
            source = Source.HParams.config(folder=self.INIT_FROM, rules=rules)
            task.initial_weights = InitFrom.HParams.config(sources=[source], missing="draw")
        return task
