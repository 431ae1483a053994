"""Models that recognize speech: CtcModel and TransducerModel.

Both have a front end of features, masks of features in training, and an encoder of frames. A batch
has `src` with `waveform` `[batch, samples]` and `lengths` int32 `[batch]`, or, without a front end,
`features` `[batch, frames, bins]` and `paddings` `[batch, frames]`. It has `tgt` with `labels`
int32 `[batch, labels]` and `paddings` `[batch, labels]`, 1 for padding. Id 0 is the blank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import NATS_PER_TOKEN, BaseModel, Metrics, WeightedScalar
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_sizes
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.elementwise import BaseActivation, Identity, Tanh
from layerkit.layers.basic.embeddings import ClassSoftmax, Embedding, FullSoftmax
from layerkit.layers.basic.linears import FeedForward
from layerkit.layers.speech.conformer import ConformerEncoder
from layerkit.layers.speech.log_mel import LogMel
from layerkit.layers.speech.spectrum_augmenter import SpectrumAugmenter
from layerkit.models.weighted_metrics import example_weights
from layerkit.ops.attention.masks import first_tokens
from layerkit.ops.losses.alignment import ctc_loss, transducer_loss
from layerkit.ops.losses.softmax import weighted_mean

BLANK = 0
_DENSE = {"activation_tpl": Identity.HParams.config()}


class CtcModel(BaseModel):
    """A model of speech whose frames emit labels or blanks (CTC; Graves et al., 2006).

    Attributes:
      vocab_size: Number of ids, the blank 0 included.
      frontend_tpl: Features of waveforms, such as `LogMel`; None for batches of features.
      augmenter_tpl: Masks of the features in training; None for none.
      encoder_tpl: Encoder of features.
      softmax_tpl: Map from outputs of the encoder, or of the joint network, to logits.
    """

    reported_metric: ClassVar[str | None] = "loss"
    metric_units: ClassVar[Mapping[str, str]] = {"loss": NATS_PER_TOKEN}

    vocab_size: int = 0
    frontend_tpl: Config[BaseLayer] | None = sub_config_field(LogMel.HParams)
    augmenter_tpl: Config[BaseLayer] | None = sub_config_field(SpectrumAugmenter.HParams)
    encoder_tpl: Config[BaseLayer] = sub_config_field(ConformerEncoder.HParams)
    softmax_tpl: Config[ClassSoftmax] = sub_config_field(FullSoftmax.HParams, use_bias=True)

    def setup(self) -> None:
        """Create the front end, the encoder and the softmax."""
        create_frontend(self)
        self.create_child("encoder", self.encoder_tpl)
        self._create_output(self.encoder.model_dims)

    def _create_output(self, dims: int) -> None:
        sizes = {"input_dims": dims, "num_classes": self.vocab_size}
        self.create_child("softmax", self.softmax_tpl, **sizes)

    def encode(self, src: NestedMap) -> NestedMap:
        """Return `encoded` `[batch, frames, dims]` and `paddings` of the sounds `src`."""
        encoded: NestedMap = self.encoder(**compute_features(self, src))
        return encoded

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute the losses of rows.

        Returns:
          A NestedMap of `per_example_xent` float32 `[batch]`, in nats, and `is_aligned` bool
          `[batch]`, False for rows with too few frames for their labels.
        """
        encoded = self.encode(batch.src)
        losses, is_aligned = ctc_loss(
            self.softmax.logits(encoded.encoded),
            batch.tgt.labels,
            logit_paddings=encoded.paddings,
            label_paddings=batch.tgt.paddings,
        )
        return NestedMap(per_example_xent=losses, is_aligned=is_aligned)

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute `loss`, in nats per label, and `scores` float32 `[batch]`.

        Rows with too few frames for their labels are left out of the loss. The metric
        `unaligned_rows` is their share.
        """
        losses, is_aligned = predictions.per_example_xent, predictions.is_aligned
        weights = example_weights(batch, len(losses))
        unaligned = WeightedScalar.of(weighted_mean(~is_aligned, weights), jnp.sum(weights))
        weights = weights * is_aligned
        total = jnp.sum(weights * jnp.sum(batch.tgt.paddings == 0, axis=1))
        loss = jnp.sum(weights * losses) / jnp.maximum(total, 1.0)
        outputs = NestedMap(per_example_xent=losses, scores=-losses)
        return {"loss": WeightedScalar.of(loss, total), "unaligned_rows": unaligned}, outputs

    def decode(self, batch: NestedMap) -> NestedMap:
        """Return the most likely label of each frame, without repetitions and blanks.

        Returns:
          A NestedMap of `ids` int32 `[batch, frames]` and their `log_probs` float32, both filled up
          with 0, `lengths` int32 `[batch]`, and `prompt_lengths`, which are 0.
        """
        encoded = self.encode(batch.src)
        log_probs = jax.nn.log_softmax(self.softmax.logits(encoded.encoded))
        ids = jnp.where(encoded.paddings == 0, jnp.argmax(log_probs, axis=-1), BLANK)
        before = jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]
        return collect_labels(jnp.where(ids == before, BLANK, ids), jnp.max(log_probs, axis=-1))


class TransducerModel(CtcModel):
    """A model of speech whose next label depends on the labels before (RNN-T; Graves, 2012).

    Logits are those of tanh(encoder + predictor). The predictor reads the last labels alone
    (Ghodsi et al., 2020, "RNN-Transducer with Stateless Prediction Network"). The other fields are
    those of `CtcModel`.

    Attributes:
      joint_dims: Size of the joint network.
      label_context: Number of labels that the predictor reads.
      embedding_tpl: Embedding of labels.
      projection_tpl: Maps from the encoder and from the embeddings into the joint network.
      activation_tpl: Activation of the joint network.
      chunk_size: Number of frames of each row whose logits `[batch, frames, labels, classes]` are
        in memory at once.
      max_labels_per_frame: Number of labels that decoding emits in one frame at most.
    """

    joint_dims: int = 0
    label_context: int = 2
    embedding_tpl: Config[BaseLayer] = sub_config_field(Embedding.HParams, activation_axes=None)
    projection_tpl: Config[BaseLayer] = sub_config_field(FeedForward.HParams, **_DENSE)
    activation_tpl: Config[BaseActivation] = sub_config_field(Tanh.HParams)
    softmax_tpl: Config[ClassSoftmax] = sub_config_field(
        FullSoftmax.HParams, use_bias=True, activation_axes=None
    )
    chunk_size: int = 16
    max_labels_per_frame: int = 2

    def _create_output(self, dims: int) -> None:
        check_sizes(self, label_context=self.label_context, chunk_size=self.chunk_size)
        check_sizes(self, max_labels_per_frame=self.max_labels_per_frame)
        sizes = {"num_classes": self.vocab_size, "input_dims": self.joint_dims}
        self.create_child("embedding", self.embedding_tpl, **sizes)
        context = self.label_context * self.joint_dims
        for name, size in (("from_encoder", dims), ("from_labels", context)):
            sizes = {"input_dims": size, "output_dims": self.joint_dims}
            self.create_child(name, self.projection_tpl, **sizes)
        self.create_child("activation", self.activation_tpl)
        super()._create_output(self.joint_dims)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Compute the losses of rows; see `CtcModel.compute_predictions`."""
        encoded, labels = self.encode(batch.src), batch.tgt.labels
        # Entry u holds the labels before label u.
        padded = jnp.pad(labels, ((0, 0), (self.label_context, 0)), constant_values=BLANK)
        index = jnp.arange(labels.shape[1] + 1)[:, None] + jnp.arange(self.label_context)
        predicted = self._predict(padded[:, index])

        def score(frame: jax.Array) -> tuple[jax.Array, jax.Array]:
            log_probs = self._joint(frame[:, None], predicted)
            chosen = jnp.take_along_axis(log_probs[:, :-1], labels[..., None], axis=-1)
            return log_probs[..., BLANK], chosen[..., 0]

        frames = jnp.moveaxis(self.from_encoder(encoded.encoded), 1, 0)
        # The backward pass computes the logits again.
        run = jax.checkpoint(score, prevent_cse=False)
        scores = jax.lax.map(run, frames, batch_size=min(self.chunk_size, len(frames)))
        blanks, label_scores = (jnp.moveaxis(x, 0, 1) for x in scores)
        num_frames = jnp.sum(encoded.paddings == 0, axis=1)
        losses = transducer_loss(
            blanks,
            label_scores,
            num_frames=jnp.maximum(num_frames, 1),
            num_labels=jnp.sum(batch.tgt.paddings == 0, axis=1),
        )
        return NestedMap(per_example_xent=losses, is_aligned=num_frames > 0)

    def decode(self, batch: NestedMap) -> NestedMap:
        """Return the labels of a greedy search; see `CtcModel.decode`."""
        encoded = self.encode(batch.src)
        frames = jnp.moveaxis(self.from_encoder(encoded.encoded), 1, 0)
        repeats = self.max_labels_per_frame
        # A frame is asked again until it emits a blank.
        is_first = jnp.tile(jnp.arange(repeats) == 0, len(frames))
        asked = jnp.repeat(frames, repeats, axis=0)
        padding = jnp.repeat(encoded.paddings.T != 0, repeats, axis=0)

        def emit(state: Any, inputs: Any) -> Any:
            context, is_done = state
            frame, is_padding, is_new = inputs
            log_probs = self._joint(frame, self._predict(context))
            is_done = (is_done & ~is_new) | is_padding
            ids = jnp.where(is_done, BLANK, jnp.argmax(log_probs, axis=-1))
            is_blank = ids == BLANK
            longer = jnp.concatenate([context[:, 1:], ids[:, None]], axis=1)
            context = jnp.where(is_blank[:, None], context, longer)
            return (context, is_done | is_blank), (ids, jnp.max(log_probs, axis=-1))

        batch_size = frames.shape[1]
        context = jnp.full((batch_size, self.label_context), BLANK)
        start = context, jnp.zeros(batch_size, bool)
        _, (ids, log_probs) = jax.lax.scan(emit, start, (asked, padding, is_first))
        return collect_labels(ids.T, log_probs.T)

    def _predict(self, context: jax.Array) -> jax.Array:
        """Return predictions `[..., joint_dims]` after labels `[..., label_context]`."""
        embedded = self.embedding(context)
        predicted: jax.Array = self.from_labels(embedded.reshape(*context.shape[:-1], -1))
        return predicted

    def _joint(self, frames: jax.Array, predicted: jax.Array) -> jax.Array:
        """Return log-probabilities float32 `[..., vocab_size]` of broadcast `[..., joint_dims]`."""
        logits = self.softmax.logits(self.activation(frames + predicted))
        return jax.nn.log_softmax(logits.astype(jnp.float32))


def create_frontend(model: Any) -> None:
    """Create the children `frontend` and `augmenter` of a model with these templates."""
    for name in ("frontend", "augmenter"):
        if (template := getattr(model, f"{name}_tpl")) is not None:
            model.create_child(name, template)


def compute_features(model: Any, src: NestedMap) -> NestedMap:
    """Return `features` `[batch, frames, bins]`, masked in training, and `paddings` of sounds."""
    if model.frontend_tpl is not None:
        src = model.frontend(src.waveform, lengths=src.lengths)
    features = src.features
    if model.augmenter_tpl is not None:
        features = model.augmenter(features, paddings=src.paddings)
    return NestedMap(features=features, paddings=src.paddings)


def collect_labels(ids: jax.Array, log_probs: jax.Array) -> NestedMap:
    """Return the labels of each row that are no blanks, in their order; see `CtcModel.decode`.

    Args:
      ids: int32 `[batch, frames]`.
      log_probs: float32 `[batch, frames]`.
    """
    order = jnp.argsort(ids == BLANK, axis=1, stable=True)
    lengths = jnp.sum(ids != BLANK, axis=1, dtype=jnp.int32)
    is_label = first_tokens(lengths, ids.shape[1])
    ids, log_probs = (jnp.take_along_axis(x, order, axis=1) for x in (ids, log_probs))
    return NestedMap(
        ids=jnp.where(is_label, ids, BLANK).astype(jnp.int32),
        log_probs=jnp.where(is_label, log_probs, 0.0),
        lengths=lengths,
        prompt_lengths=jnp.zeros_like(lengths),
    )
