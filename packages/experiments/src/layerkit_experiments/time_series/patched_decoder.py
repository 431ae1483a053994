"""The decoder of TimesFM (Das et al., 2024, arXiv:2310.10688) and its model.

A series is cut into patches, which a Transformer decoder reads as tokens. At each patch it predicts
the mean and quantiles of the values that follow. The weights have the shapes of the checkpoints
that Google released for Pax, and `layerkit.interop.praxis` maps their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_choice, check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit.layers import (
    Embedding,
    FeedForward,
    Identity,
    PositionalEmbedding,
    SiLU,
    StackedTransformer,
)
from layerkit.layers.transformer.transformer import gather_positions
from layerkit.models.weighted_metrics import example_weights
from layerkit.ops.attention.masks import AttentionMask, segments_from_paddings

# Smallest standard deviation of a series.
_TINY = 1e-7
# Values that the first patch of the statistics must have.
_MIN_VALUES = 3


class ResidualBlock(BaseLayer):
    """Two dense layers and a linear residual: output(silu(hidden(x))) + residual(x).

    Attributes:
      input_dims: Size of the last axis of the inputs.
      hidden_dims: Size between the two layers.
      output_dims: Size of the last axis of the outputs.
    """

    input_dims: int = 0
    hidden_dims: int = 0
    output_dims: int = 0

    def setup(self) -> None:
        """Create the layers."""
        linear, silu = Identity.HParams.config(), SiLU.HParams.config()
        for name, inputs, outputs, activation, axes in (
            ("hidden", self.input_dims, self.hidden_dims, silu, ("embed", "mlp")),
            ("output", self.hidden_dims, self.output_dims, linear, ("mlp", "embed")),
            ("residual", self.input_dims, self.output_dims, linear, (None, "embed")),
        ):
            layer = FeedForward.HParams.config(
                input_dims=inputs, output_dims=outputs, activation_tpl=activation
            )
            layer.linear_tpl.weight_axes = axes
            self.create_child(name, layer)

    def fprop(self, x: jax.Array) -> jax.Array:
        """Map `[..., input_dims]` to `[..., output_dims]`."""
        outputs: jax.Array = self.output(self.hidden(x)) + self.residual(x)
        return outputs


class PatchedDecoder(BaseModel):
    """A model that predicts the next values of a series, and quantiles of them, at each patch.

    A batch has `series` float32 `[batch, length]`, optionally `paddings` of the same shape, which
    is 1 where a value is missing, and `frequency` int32 `[batch]`, 0 if missing. The last
    `horizon_length` values of a window are those that follow its context. In decoding the whole
    series is context.

    A series is normalized by the mean and the deviation of its first patch with at least three
    values, and the predictions are scaled back.

    Attributes:
      patch_length: Values of a patch.
      horizon_length: Values that each patch predicts.
      model_dims: Size of the model dimension.
      hidden_dims: Size of the hidden dimensions; None for model_dims.
      num_layers: Depth of the stack.
      num_heads: Heads of a layer.
      quantiles: Quantiles that are predicted besides the mean.
      num_frequencies: Number of categories of the frequency.
      use_positions: True to add sinusoidal positions, which in evaluation count from the first
        patch with a value, in training from the first patch.
      loss_patches: `all` to train the prediction of every patch, as in pretraining, or `last` to
        train that of the last alone, as Pax's fine-tuning does.
      forecast_length: Values that `decode` predicts; None for horizon_length.
      stack_tpl: Stack of layers.
    """

    reported_metric: ClassVar[str | None] = "mse"
    metric_units: ClassVar[Mapping[str, str]] = {}

    patch_length: int = 32
    horizon_length: int = 128
    model_dims: int = 1280
    hidden_dims: int | None = None
    num_layers: int = 20
    num_heads: int = 16
    quantiles: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    num_frequencies: int = 3
    use_positions: bool = True
    loss_patches: Literal["all", "last"] = "all"
    forecast_length: int | None = None
    stack_tpl: Config[BaseLayer] = sub_config_field(StackedTransformer.HParams)

    def setup(self) -> None:
        """Check the fields and create the layers."""
        check_sizes(
            self,
            patch_length=self.patch_length,
            horizon_length=self.horizon_length,
            num_frequencies=self.num_frequencies,
            forecast_length=self.forecast_length,
        )
        check_choice(self, ("all", "last"), loss_patches=self.loss_patches)
        hidden = self.model_dims if self.hidden_dims is None else self.hidden_dims
        block = ResidualBlock.HParams.config(hidden_dims=hidden)
        self.create_child(
            "input", block.clone(input_dims=2 * self.patch_length, output_dims=self.model_dims)
        )
        num_outputs = self.horizon_length * (1 + len(self.quantiles))
        self.create_child(
            "horizon", block.clone(input_dims=self.model_dims, output_dims=num_outputs)
        )
        frequency = Embedding.HParams.config(activation_axes=None, weight_axes=(None, "embed"))
        self.create_child(
            "frequency", frequency, num_classes=self.num_frequencies, input_dims=self.model_dims
        )
        self.create_child("position", PositionalEmbedding.HParams.config(dims=self.model_dims))
        self.create_child(
            "stack",
            self.stack_tpl,
            num_layers=self.num_layers,
            input_dims=self.model_dims,
            hidden_dims=hidden,
            num_heads=self.num_heads,
        )

    def predict(self, series: jax.Array, paddings: jax.Array, frequency: jax.Array) -> jax.Array:
        """Predict the values after each patch.

        Args:
          series: float32 `[batch, length]`, a multiple of `patch_length`.
          paddings: float32 `[batch, length]`, 1 for a missing value.
          frequency: int32 `[batch]`.

        Returns:
          Mean and quantiles float32 `[batch, patches, horizon_length, 1 + quantiles]`.
        """
        rows, length = series.shape
        is_multiple = length % self.patch_length == 0
        expected = f"a multiple of patch_length={self.patch_length}"
        require(is_multiple, self, "length of the context", length, expected)
        by_patch = (rows, -1, self.patch_length)
        paddings = paddings.reshape(by_patch)
        patches = jnp.where(paddings == 1, 0.0, series.reshape(by_patch))
        mean, deviation = _statistics(patches, paddings)
        patches = (patches - mean[:, None, None]) / deviation[:, None, None] * (1.0 - paddings)
        x = self.input(jnp.concatenate([patches, paddings], axis=-1))
        is_empty = jnp.min(paddings, axis=-1)
        num_patches = patches.shape[1]
        positions = jnp.broadcast_to(jnp.arange(num_patches), (rows, num_patches))
        if self.use_positions:
            shown = positions
            if not self.is_training:
                shown = (positions - jnp.argmin(is_empty, axis=1)[:, None]) % num_patches
            x = x + self.position(shown)
        x = x + self.frequency(frequency)[:, None]
        segments = segments_from_paddings(is_empty)
        # A gap in a series leaves patches without a value between those of its segment.
        mask = AttentionMask.causal_mask(
            rows, num_patches, segment_ids=segments, segments_are_runs=False
        )
        x = self.constrain(self.cast(x), "batch", "residual_length", "act_embed")
        x = gather_positions(self, self.stack(x, mask=mask, positions=positions))
        outputs = self.horizon(x).astype(jnp.float32)
        outputs = outputs.reshape(rows, num_patches, self.horizon_length, -1)
        return outputs * deviation[:, None, None, None] + mean[:, None, None, None]

    def compute_predictions(self, batch: NestedMap) -> NestedMap:
        """Return the `forecasts` of the context of a window; see `predict`."""
        series, paddings, frequency = self._inputs(batch)
        context = series.shape[1] - self.horizon_length
        forecasts = self.predict(series[:, :context], paddings[:, :context], frequency)
        return NestedMap(forecasts=forecasts)

    def compute_loss(self, predictions: NestedMap, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        """Compute `loss`, the sum of `mse` of the mean and `quantile_loss` of all quantiles.

        The squared errors, and so the loss, have the scale of the series, as in Pax.
        """
        series, paddings, _ = self._inputs(batch)
        values = predictions.forecasts
        num_patches = values.shape[1]
        first = num_patches - 1 if self.loss_patches == "last" else 0
        starts = self.patch_length * jnp.arange(first + 1, num_patches + 1)
        times = starts[:, None] + jnp.arange(self.horizon_length)
        # [batch, patches, horizon, 1]
        actual, weights = series[:, times, None], 1.0 - paddings[:, times]
        # A patch before the first value of the series knows nothing of it.
        is_known = jnp.cumsum(1.0 - paddings, axis=1)[:, starts - 1] > 0
        weights *= is_known[..., None] * example_weights(batch, len(series))[:, None, None]
        values, total = values[:, first:], jnp.sum(weights)
        squares = jnp.square(values[..., 0] - actual[..., 0])
        errors = actual - values[..., 1:]
        quantiles = jnp.asarray(self.quantiles, jnp.float32)
        pinball = jnp.sum(2.0 * jnp.maximum(errors * quantiles, errors * (quantiles - 1.0)), -1)

        def mean(errors: jax.Array) -> jax.Array:
            return jnp.sum(errors * weights) / jnp.maximum(total, 1.0)

        metrics = {"mse": mean(squares), "quantile_loss": mean(pinball)}
        metrics["loss"] = metrics["mse"] + metrics["quantile_loss"]
        return {name: WeightedScalar.of(value, total) for name, value in metrics.items()}, (
            NestedMap(forecast=predictions.forecasts[:, -1])
        )

    def decode(self, batch: NestedMap) -> NestedMap:
        """Continue each series by `forecast_length` values, `horizon_length` at a time.

        Returns:
          `forecast` float32 `[batch, forecast_length, 1 + quantiles]`, mean and quantiles. Each
          step reads the means of the steps before it, in the window of the context.
        """
        series, paddings, frequency = self._inputs(batch)
        context = series.shape[1]
        length = self.horizon_length if self.forecast_length is None else self.forecast_length
        forecasts: list[jax.Array] = []
        for _ in range(-(-length // self.horizon_length)):
            values = self.predict(series[:, -context:], paddings[:, -context:], frequency)[:, -1]
            forecasts.append(values)
            series = jnp.concatenate([series, values[..., 0]], axis=1)
            paddings = jnp.pad(paddings, ((0, 0), (0, self.horizon_length)))
        return NestedMap(forecast=jnp.concatenate(forecasts, axis=1)[:, :length])

    def _inputs(self, batch: NestedMap) -> tuple[jax.Array, jax.Array, jax.Array]:
        series: Any = jnp.asarray(batch.series, jnp.float32)
        paddings = batch.get("paddings", jnp.zeros_like(series))
        return series, paddings, batch.get("frequency", jnp.zeros(len(series), jnp.int32))


def _statistics(patches: jax.Array, paddings: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and deviation `[batch]` of the first patch with enough values, or the last."""
    is_enough = jnp.sum(1.0 - paddings, axis=2) >= _MIN_VALUES
    place = jnp.where(jnp.any(is_enough, axis=1), jnp.argmax(is_enough, axis=1), -1)
    rows = jnp.arange(len(patches))
    values, weights = patches[rows, place], 1.0 - paddings[rows, place]
    total = jnp.maximum(jnp.sum(weights, axis=1), 1.0)
    mean = jnp.sum(values * weights, axis=1) / total
    variance = jnp.sum(jnp.square(values - mean[:, None]) * weights, axis=1) / total
    return mean, jnp.maximum(jnp.sqrt(variance), _TINY)
