"""AttentionDecoderModel: speech recognition by an encoder of sounds and a Transformer decoder.

Sources: Chan et al., 2015 (arXiv:1508.01211), with a Transformer; the joint loss with CTC is that
of Kim et al., 2016 (arXiv:1609.06773).
"""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import Metrics, WeightedScalar
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_rates, require
from layerkit.config.hparams import Conditions
from layerkit.config.nested_map import NestedMap
from layerkit.decoding.loop import SampledRows
from layerkit.layers.basic.embeddings import ClassSoftmax, FullSoftmax
from layerkit.layers.speech.conformer import ConformerEncoder
from layerkit.layers.speech.log_mel import LogMel
from layerkit.layers.speech.spectrum_augmenter import SpectrumAugmenter
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
from layerkit.models.sequence_model import SequenceModel
from layerkit.models.speech_model import compute_features, create_frontend
from layerkit.models.weighted_metrics import example_weights
from layerkit.ops.losses.alignment import ctc_loss
from layerkit.ops.losses.softmax import weighted_mean


class AttentionDecoderModel(SequenceModel):
    """A model of speech whose decoder attends to the encoded sounds.

    Batches are those of `CtcModel`. The decoder reads `start_id`, `prompt_ids` and the labels, and
    predicts the labels and the end, the first of `decoder.eos_id`. The network has an
    `encoder_tpl`. The other fields are those of `SequenceModel`.

    Attributes:
      frontend_tpl: Features of waveforms, such as `LogMel`; None for batches of features.
      augmenter_tpl: Masks of the features in training; None for none.
      ctc_weight: Weight w of the loss of CTC from the encoder in `loss`, (1 - w)·xent + w·ctc, in
        nats per predicted token, from 0 for none to below 1. Id 0 is its blank.
      ctc_softmax_tpl: Map from outputs of the encoder to the logits of CTC.

    Raises:
      ConfigError: The decoder has no end, the network no `encoder_tpl`, or the weight is not in
        [0, 1).
    """

    used_only_if: ClassVar[Conditions] = {
        # The weights of examples are always applied, as in other models of speech.
        "apply_eval_sample_weights": "never",
        "ctc_softmax_tpl": "ctc_weight",
    }

    frontend_tpl: Config[BaseLayer] | None = sub_config_field(LogMel.HParams)
    augmenter_tpl: Config[BaseLayer] | None = sub_config_field(SpectrumAugmenter.HParams)
    model_tpl: Config[BaseLayer] = sub_config_field(
        TransformerEncoderDecoder.HParams, encoder_tpl=ConformerEncoder.HParams.config()
    )
    ctc_weight: float = 0.0
    ctc_softmax_tpl: Config[ClassSoftmax] = sub_config_field(FullSoftmax.HParams, use_bias=True)

    def setup(self) -> None:
        """Create the front end, the network and the softmax of CTC."""
        super().setup()
        create_frontend(self)
        check_rates(self, ctc_weight=self.ctc_weight)
        has_encoder, expected = self.model.encoder_tpl is not None, "an encoder of features"
        require(has_encoder, self, "model_tpl.encoder_tpl", None, expected)
        if self.ctc_weight:
            sizes = {"input_dims": self.model.encoder.model_dims}
            sizes["num_classes"] = self.model.vocab_size
            self.create_child("ctc_softmax", self.ctc_softmax_tpl, **sizes)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Return the outputs of `TransformerEncoderDecoder.fprop`, per token `[batch, target]`.

        Their tokens are those of `prompt_ids`, the labels and the end. With a `ctc_weight`,
        `ctc_xent` float32 `[batch]`, in nats, and `is_aligned` bool `[batch]` are those of
        `CtcModel`.
        """
        predictions = super().compute_predictions(self._as_sequences(batch))
        if self.ctc_weight:
            predictions.ctc_xent, predictions.is_aligned = ctc_loss(
                self.ctc_softmax.logits(predictions.encoded),
                batch.tgt.labels,
                logit_paddings=predictions.encoded_segment_ids == 0,
                label_paddings=batch.tgt.paddings,
            )
        return predictions

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute the metrics of `SequenceModel.compute_loss`, and those of CTC.

        With a `ctc_weight`, `ctc` is its loss, in nats per token, in which rows with too few frames
        for their labels have no part. The metric `unaligned_rows` is their share.
        """
        metrics, outputs = super().compute_loss(predictions, NestedMap(tgt=self._target(batch)))
        if self.ctc_weight:
            total, weights = metrics["loss"].weight, example_weights(batch, len(batch.tgt.labels))
            unaligned = weighted_mean(~predictions.is_aligned, weights)
            losses = jnp.where(predictions.is_aligned, predictions.ctc_xent, 0.0)
            ctc = jnp.sum(weights * losses) / jnp.maximum(total, 1.0)
            loss = (1.0 - self.ctc_weight) * metrics["loss"].value + self.ctc_weight * ctc
            metrics["loss"] = WeightedScalar.of(loss, total)
            metrics["ctc"] = WeightedScalar.of(ctc, total)
            metrics["unaligned_rows"] = WeightedScalar.of(unaligned, jnp.sum(weights))
        return metrics, outputs

    def decode(self, batch: NestedMap) -> NestedMap:
        """Decode the labels of sounds; see `SequenceModel.decode`, without `source`."""
        return super().decode(self._as_sequences(batch, has_target=False))

    def start_decoding(self, batch: NestedMap) -> SampledRows:
        """Return the rows of labels before the first; see `SequenceModel.start_decoding`."""
        return super().start_decoding(self._as_sequences(batch, has_target=False))

    def _as_sequences(self, batch: NestedMap, *, has_target: bool = True) -> NestedMap:
        """Return a batch of `SequenceModel` with the features of the sounds."""
        others = {name: value for name, value in batch.items() if name not in ("src", "tgt")}
        target = {"tgt": self._target(batch)} if has_target else {}
        return NestedMap(others, src=compute_features(self, batch.src), **target)

    def _target(self, batch: NestedMap) -> NestedMap:
        labels, num_labels = batch.tgt.labels, jnp.sum(batch.tgt.paddings == 0, axis=1)
        ends, expected = self.decoder.eos_ids, "the id that ends a text"
        require(bool(ends), self, "decoder.eos_id", None, expected)
        batch_size, length = labels.shape
        first = jnp.array([self.start_id, *self.prompt_ids], labels.dtype)
        first = jnp.broadcast_to(first, (batch_size, len(first)))
        place, end = jnp.arange(length + 1), num_labels[:, None]
        ended = jnp.where(place == end, ends[0], jnp.pad(labels, ((0, 0), (0, 1))))
        is_predicted = jnp.float32(place <= end) * example_weights(batch, batch_size)[:, None]
        return NestedMap(
            ids=jnp.concatenate([first, labels], axis=1),
            labels=jnp.concatenate([first[:, 1:], ended], axis=1),
            weights=jnp.pad(is_predicted, ((0, 0), (first.shape[1] - 1, 0))),
        )
