"""Recipes of translation experiments: the encoder-decoder model and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from layerkit.base.weights import WeightInit
from layerkit.config import Config, build
from layerkit.config.checks import check_sizes, require
from layerkit.decoding import BeamSearch, SampleDecoder
from layerkit.errors import ConfigError
from layerkit.layers import (
    PositionalEmbedding,
    ReLU,
    StackedTransformer,
    StackedTransformerRepeated,
    Transformer,
)
from layerkit.layers.attention.cross import CrossAttention
from layerkit.models import SequenceModel, TransformerEncoderDecoder
from layerkit_experiments.recipes.language_model import remat_policy
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_experiments.translation.seqio_task import translation_task
from layerkit_inputs import NumberWords, ParallelText, SeqIOInput, Tokenizer, tokenizer_config
from layerkit_inputs.base.tokenizer_interface import target_start_id
from layerkit_runner.step.task import SingleTask


class TranslationExperiment(TrainedExperiment, abstract=True):
    """The Transformer of 2017 (arXiv:1706.03762): norms after the residual, one shared embedding.

    Data are pairs of texts: two files with parallel lines, a TFDS data set, or numbers in words.
    Files are opened when the first batch is read.
    """

    tags: ClassVar[tuple[str, ...]] = ("translation",)

    NUM_ENCODER_LAYERS: int = 6
    NUM_DECODER_LAYERS: int = 6
    MODEL_DIMS: int = 512
    HIDDEN_DIMS: int = 2048
    NUM_HEADS: int = 8
    VOCAB_SIZE: int = 259
    NORM_POLICY: Literal["pre", "post"] = "post"
    """Place of norms: `post`, as published, or `pre`, which learns without a long warmup."""
    DROPOUT_RATE: float = 0.1
    LABEL_SMOOTHING: float = 0.1
    FPROP_DTYPE: str = "float32"
    """Dtype of the computation; weights are float32."""
    USE_REPEATED_LAYER: bool = True
    """Run layers as a scan over stacked weights instead of unrolled."""
    CHECKPOINT_POLICY: str = "none"
    """Rematerialization policy; see `layerkit.ops.remat`."""
    BEAM_SIZE: int | None = None
    """Number of beams; None decodes greedily."""
    LENGTH_NORM_ALPHA: float = 0.6
    MAX_DECODE_STEPS: int = 64
    START_ID: int = 1
    """First input of the decoder, the start token of the tokenizer."""
    EOS_ID: int = 2

    DATA_FORMAT: Literal["files", "seqio", "number_words"] = "files"
    """`files`: files of DATA_FOLDER; `seqio`: TFDS_NAME through SeqIO; `number_words`: synthetic
    English and German number words, as bytes."""
    DATA_FOLDER: str = "."
    """Folder of `{train,heldout}.SOURCE` and `{train,heldout}.TARGET`, for `files`."""
    TFDS_NAME: str = "wmt14_translate/de-en:1.0.0"
    """TFDS name of a data set with a feature for each language, for `seqio`."""
    TFDS_DATA_DIR: str | None = None
    """Folder of TFDS data for `seqio`; None for the default of TensorFlow Datasets."""
    SOURCE: str = "en"
    TARGET: str = "de"
    TOKENIZER: str = "bytes"
    """Tokenizer of both languages: `bytes`, a SentencePiece `.model`, or a `tokenizer.json`."""
    PERCORE_BATCH_SIZE: float = 8.0
    """Rows per device; training rows hold several pairs."""
    MAX_SEQ_LEN: int = 256
    """Length of a row of sources and of a row of targets; longer texts are cut."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "NUM_ENCODER_LAYERS": 2,
        "NUM_DECODER_LAYERS": 2,
        "MODEL_DIMS": 64,
        "HIDDEN_DIMS": 256,
        "NUM_HEADS": 4,
        "FPROP_DTYPE": "float32",
        "DROPOUT_RATE": 0.0,
        "MAX_DECODE_STEPS": 16,
        "DATA_FORMAT": "number_words",
        "TOKENIZER": "bytes",
        "VOCAB_SIZE": 259,
        "START_ID": 1,
        "EOS_ID": 2,
        "PERCORE_BATCH_SIZE": 8.0,
        "MAX_SEQ_LEN": 64,
    }

    def model(self) -> Config:
        """Return the config of the SequenceModel."""
        check_sizes(None, MODEL_DIMS=self.MODEL_DIMS)
        network: Config = TransformerEncoderDecoder.HParams.config(
            vocab_size=self.VOCAB_SIZE,
            model_dims=self.MODEL_DIMS,
            hidden_dims=self.HIDDEN_DIMS,
            num_encoder_layers=self.NUM_ENCODER_LAYERS,
            num_decoder_layers=self.NUM_DECODER_LAYERS,
            num_heads=self.NUM_HEADS,
            position_tpl=PositionalEmbedding.HParams.config(),
            encoder_stack_tpl=self._stack(self._layer()),
            dropout_rate=self.DROPOUT_RATE,
            params_init=WeightInit.Xavier(),
        )
        decoder_layer = self._layer()
        decoder_layer.cross_attention_tpl = CrossAttention.HParams.config()
        network.decoder_stack_tpl = self._stack(decoder_layer)
        if self.NORM_POLICY == "post":
            network.set(encoder_norm_tpl=None, decoder_norm_tpl=None)
        network.softmax_tpl.set(
            scale_by_sqrt_dims=True,
            label_smoothing=self.LABEL_SMOOTHING,
            weight_init=WeightInit.Gaussian(self.MODEL_DIMS**-0.5),
        )
        return SequenceModel.HParams.config(
            model_tpl=network,
            fprop_dtype=self.FPROP_DTYPE,
            start_id=self.START_ID,
            decoder=self._decoder(),
        )

    def task(self) -> Config:
        """Return the config of the task."""
        return SingleTask.HParams.config(
            name="translation", model=self.model(), train=train_config(self, self.learner())
        )

    def _layer(self) -> Config:
        layer: Config = Transformer.HParams.config(
            norm_policy=self.NORM_POLICY, dropout_rate=self.DROPOUT_RATE
        )
        layer.feed_forward_tpl.set(has_bias=True, activation_tpl=ReLU.HParams.config())
        return layer

    def _stack(self, layer: Config) -> Config:
        stack = StackedTransformerRepeated if self.USE_REPEATED_LAYER else StackedTransformer
        return stack.HParams.config(layer_tpl=layer, remat=remat_policy(self.CHECKPOINT_POLICY))

    def _decoder(self) -> Config:
        if self.BEAM_SIZE is None:
            return SampleDecoder.HParams.config(
                max_decode_steps=self.MAX_DECODE_STEPS, temperature=0.0, eos_id=self.EOS_ID
            )
        return BeamSearch.HParams.config(
            beam_size=self.BEAM_SIZE,
            length_norm_alpha=self.LENGTH_NORM_ALPHA,
            max_decode_steps=self.MAX_DECODE_STEPS,
            eos_id=self.EOS_ID,
        )

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return {
            "files": f"{self.DATA_FOLDER}/train.{{{self.SOURCE},{self.TARGET}}}",
            "seqio": f"{self.TFDS_NAME} (seqio)",
            "number_words": "number words, synthetic",
        }[self.DATA_FORMAT]

    def validate(self) -> None:
        """Check vocabulary size, start and end tokens against the tokenizer.

        Raises:
          ConfigError: VOCAB_SIZE is smaller than the tokenizer's, START_ID or EOS_ID differ from
            the tokenizer's, or TOKENIZER is not `bytes` for number words.
        """
        super().validate()
        is_valid = self.DATA_FORMAT != "number_words" or self.TOKENIZER == "bytes"
        expected = "'bytes', since DATA_FORMAT='number_words'"
        require(is_valid, None, "TOKENIZER", self.TOKENIZER, expected)
        if self.DATA_FORMAT == "seqio":
            self._check_ids("SeqIO", start_id=0, eos_id=1)
            return
        tokenizer: Tokenizer = build(tokenizer_config(self.TOKENIZER))
        where = f"TOKENIZER={self.TOKENIZER!r}"
        self._check_ids(where, start_id=target_start_id(tokenizer), eos_id=tokenizer.eos_id)
        size, expected = self.VOCAB_SIZE, f"at least {tokenizer.vocab_size}, the size of {where}"
        require(tokenizer.vocab_size <= size, None, "VOCAB_SIZE", size, expected)

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        return [
            self._pairs("train", name="train", is_training=True),
            self._pairs("heldout", name="heldout"),
        ]

    def decode_datasets(self) -> list[Config]:
        """Return the config of the held-out sources, one per row."""
        return [self._pairs("heldout", name="translations")]

    def _check_ids(self, where: str, *, start_id: int, eos_id: int | None) -> None:
        for field, known in (("START_ID", start_id), ("EOS_ID", eos_id)):
            if (value := getattr(self, field)) != known:
                raise ConfigError(field=field, value=value, expected=f"{known}, as in {where}")

    def _pairs(self, split: Literal["train", "heldout"], **fields: Any) -> Config:
        fields["percore_batch_size"] = self.PERCORE_BATCH_SIZE
        if self.DATA_FORMAT == "seqio":
            return self._seqio_pairs(split, **fields)
        fields |= {"inputs_length": self.MAX_SEQ_LEN, "targets_length": self.MAX_SEQ_LEN}
        if self.DATA_FORMAT == "number_words":
            return NumberWords.HParams.config(split=split, trim=True, **fields)
        return ParallelText.HParams.config(
            source_file=f"{self.DATA_FOLDER}/{split}.{self.SOURCE}",
            target_file=f"{self.DATA_FOLDER}/{split}.{self.TARGET}",
            tokenizer=tokenizer_config(self.TOKENIZER),
            trim=True,
            **fields,
        )

    def _seqio_pairs(self, split: str, **fields: Any) -> Config:
        task = Config(
            translation_task,
            tfds_name=self.TFDS_NAME,
            vocab_path=self.TOKENIZER,
            vocab_size=self.VOCAB_SIZE,
            source=self.SOURCE,
            target=self.TARGET,
        )
        return SeqIOInput.HParams.config(
            mixture_or_task=task,
            split_name="train" if split == "train" else "validation",
            task_feature_lengths={"inputs": self.MAX_SEQ_LEN, "targets": self.MAX_SEQ_LEN},
            feature_converter="encoder_decoder",
            tfds_data_dir=self.TFDS_DATA_DIR,
            **fields,
        )
