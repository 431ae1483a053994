"""BestRqModel: self-supervised training of an encoder of speech on sounds without transcripts.

Source: Chiu et al., 2022 (arXiv:2202.01855). Several codebooks are those of Zhang et al., 2023
(arXiv:2303.01037).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_non_negative, check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.embeddings import ClassSoftmax, FullSoftmax
from layerkit.layers.basic.sequential import StackingOverTime
from layerkit.layers.basic.vector_quantizers import RandomVectorQuantizer, codebook_usage
from layerkit.layers.speech.conformer import ConformerEncoder
from layerkit.layers.speech.log_mel import LogMel
from layerkit.models.weighted_metrics import example_weights, row_scores
from layerkit.ops.losses.softmax import weighted_mean


class BestRqModel(BaseModel):
    """A model of speech whose encoder predicts the codes of masked frames (BEST-RQ).

    Noise replaces random spans of frames. The targets are codes of the original frames by a random
    quantizer, whose weights are state that nothing trains. Batches have `src` as those of
    `CtcModel`. Features without a front end need mean 0 and variance 1, or few codes occur.

    The weights of `encoder` have the same paths as those of `CtcModel`.

    Attributes:
      frontend_tpl: Features of waveforms, such as `LogMel`; None for batches of features.
      encoder_tpl: Encoder of features.
      stacking_tpl: Stack of the frames that an output of the encoder covers.
      quantizer_tpl: Quantizer of stacked frames. It has a codebook for each of its `num_groups`,
        whose part of `projection_dims` is a projection of its own.
      softmax_tpl: Map from outputs of the encoder to the logits of a codebook, one for each.
      mask_prob: Probability that a span begins at a frame, in (0, 1].
      mask_frames: Number of frames of a span.
      noise_std: Standard deviation of the noise.
      evaluation_seed: Random seed of the spans and the noise of evaluations.

    Raises:
      ConfigError: A number is out of range, or stacks and outputs differ in number.
    """

    reported_metric: ClassVar[str | None] = "loss"
    metric_units: ClassVar[Mapping[str, str]] = {"loss": "nats per masked frame"}

    frontend_tpl: Config[BaseLayer] | None = sub_config_field(
        LogMel.HParams, normalization="utterance"
    )
    encoder_tpl: Config[BaseLayer] = sub_config_field(ConformerEncoder.HParams)
    stacking_tpl: Config[BaseLayer] = sub_config_field(StackingOverTime.HParams, right=3, stride=4)
    quantizer_tpl: Config[BaseLayer] = sub_config_field(
        RandomVectorQuantizer.HParams,
        num_classes=8192,
        normalize_latents=True,
        normalize_codebook=True,
    )
    softmax_tpl: Config[ClassSoftmax] = sub_config_field(FullSoftmax.HParams, use_bias=True)
    mask_prob: float = 0.01
    mask_frames: int = 40
    noise_std: float = 0.1
    evaluation_seed: int = 0

    def setup(self) -> None:
        """Create the front end, the encoder, the quantizer and the softmax layers."""
        is_valid, expected = 0.0 < self.mask_prob <= 1.0, "a number in (0, 1]"
        require(is_valid, self, "mask_prob", self.mask_prob, expected)
        check_sizes(self, mask_frames=self.mask_frames)
        check_non_negative(self, noise_std=self.noise_std)
        if self.frontend_tpl is not None:
            self.create_child("frontend", self.frontend_tpl)
        for name in ("encoder", "stacking"):
            self.create_child(name, getattr(self, f"{name}_tpl"))
        num_frames = self.stacking.left + 1 + self.stacking.right
        input_dims = num_frames * self.encoder.num_bins
        self.create_child("quantizer", self.quantizer_tpl, input_dims=input_dims)
        sizes = {"input_dims": self.encoder.model_dims, "num_classes": self.quantizer.num_classes}
        num_codes = self.quantizer.num_quantizers * self.quantizer.num_groups
        self.create_children("softmax", [self.softmax_tpl] * num_codes, **sizes)

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Predict the codes of masked frames.

        An output of the encoder has a loss if all of its frames are masked.

        Returns:
          A NestedMap of `codes` int32 `[batch, outputs, codebooks]`, `is_token` bool
          `[batch, outputs]`, `weights` float32 `[batch, outputs]`, and, as means over codebooks,
          the outputs of `FullSoftmax.fprop`.
        """
        src = batch.src
        if self.frontend_tpl is not None:
            src = self.frontend(src.waveform, lengths=src.lengths)
        features = jnp.where(src.paddings[..., None] == 0, src.features, 0.0)
        codes, is_token = self.quantize(features, paddings=src.paddings)
        inputs, is_masked = self.mask_spans(features, is_frame=src.paddings == 0)
        encoded = self.encoder(inputs, paddings=src.paddings).encoded
        lengths, expected = encoded.shape[1], f"{codes.shape[1]}, the stacks of stacking_tpl"
        require(lengths == codes.shape[1], self, "outputs of the encoder", lengths, expected)
        # Frames of padding hide nothing of a stack.
        is_hidden = self.stacking.stack_paddings(jnp.float32(is_masked | (src.paddings != 0)))
        weights = is_hidden * is_token * example_weights(batch, len(codes))[:, None]
        outputs = [
            softmax(encoded, labels=codes[..., place], weights=weights)
            for place, softmax in enumerate(self.softmax)
        ]
        means = jax.tree.map(lambda *x: jnp.mean(jnp.stack(x), axis=0), *outputs)
        return NestedMap(means, codes=codes, is_token=is_token, weights=weights)

    def quantize(self, features: jax.Array, *, paddings: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the targets of whole utterances.

        Args:
          features: `[batch, frames, bins]`.
          paddings: `[batch, frames]`, 1 for frames of padding, which are last.

        Returns:
          (codes int32 `[batch, outputs, codebooks]`, 0 in padding; bool `[batch, outputs]`, False
          for padding).
        """
        is_token = self.stacking.stack_paddings(paddings) == 0
        _, codes = self.quantizer(self.stacking(features), is_token=is_token)
        return codes, is_token

    def mask_spans(
        self, features: jax.Array, *, is_frame: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Replace random spans of frames by noise.

        The draws of a frame do not depend on the number of frames or rows behind it.

        Args:
          features: `[batch, frames, bins]`.
          is_frame: bool `[batch, frames]`, False for padding, which is not masked.

        Returns:
          (features `[batch, frames, bins]`, masked frames bool `[batch, frames]`).
        """
        batch_size, length, num_bins = features.shape
        key = self.next_prng_key() if self.is_training else jax.random.key(self.evaluation_seed)

        def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            span_key, noise_key = jax.random.split(key)
            is_start = jax.random.bernoulli(span_key, self.mask_prob, (length,))
            return is_start, jax.random.normal(noise_key, (length, num_bins), features.dtype)

        is_start, noise = jax.vmap(draw)(jax.random.split(key, batch_size))
        begun = jnp.cumsum(is_start, axis=1)
        ended = jnp.pad(begun, ((0, 0), (self.mask_frames, 0)))[:, :length]
        is_masked = (begun > ended) & is_frame
        return jnp.where(is_masked[..., None], self.noise_std * noise, features), is_masked

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute metrics of the codes, as means over codebooks, and outputs per row `[batch, …]`.

        `loss` (with label smoothing), `xent` (nats) and `accuracy` are those of masked frames.
        `code_perplexity` and `code_coverage` are those of `codebook_usage` in all frames: the
        effective number, and the share, of the codes that occur in a batch.
        """
        frame_means = {name: predictions[name] for name in ("loss", "xent")}
        weights, total = predictions.weights, predictions.total_weight
        frame_means["accuracy"] = weighted_mean(predictions.correct, weights)
        metrics = {name: WeightedScalar.of(value, total) for name, value in frame_means.items()}
        is_token = predictions.is_token & (example_weights(batch, len(weights)) > 0)[:, None]
        num_classes, count = self.quantizer.num_classes, jnp.sum(is_token)
        usage = codebook_usage(predictions.codes, num_classes, is_token=is_token)
        for name, value in zip(("code_perplexity", "code_coverage"), usage, strict=True):
            metrics[name] = WeightedScalar.of(value, count)
        per_token_xent = predictions.per_token_xent
        scores = row_scores(per_token_xent, weights)
        return metrics, NestedMap(per_token_xent=per_token_xent, scores=scores)
