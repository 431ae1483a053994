"""Vector quantizers, which replace vectors by the nearest entries of codebooks.

With several groups each part of a vector has a codebook (product quantization; Jégou et al., 2011).
With several quantizers each one replaces what those before it leave of a vector (residual
quantization; Zeghidour et al., 2021, arXiv:2107.03312). Padding, where `is_token` is False, has
the code 0 and a vector of zeros, and counts in no loss, average or summary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import (
    check_divisible,
    check_last_axis,
    check_non_negative,
    check_rates,
    check_sizes,
)


class BaseVectorQuantizer(BaseLayer):
    """The base class of quantizers. A call returns vectors and codes, see `fprop`.

    It reports the summaries `perplexity` and `coverage` of `codebook_usage`.

    Attributes:
      input_dims: Size of the inputs.
      num_classes: Number of entries of a codebook.
      num_groups: Number of groups of adjacent features, each with a codebook.
      num_quantizers: Number of quantizers in sequence.
      normalize_latents: True to compare latents of unit length with the codebook.
      normalize_codebook: True for entries of unit length.
      codebook_init: Initializer of the codebooks.
    """

    input_dims: int = 0
    num_classes: int = 0
    num_groups: int = 1
    num_quantizers: int = 1
    normalize_latents: bool = False
    normalize_codebook: bool = False
    codebook_init: WeightInit = WeightInit.Gaussian()

    def _create_codebooks(self, dims: int, *, trainable: bool) -> None:
        """Check the fields and create `entries` `[quantizers, classes, groups, group_dims]`."""
        sizes = {"num_classes": self.num_classes, "num_groups": self.num_groups}
        check_sizes(self, input_dims=self.input_dims, num_quantizers=self.num_quantizers, **sizes)
        check_divisible(self, by=("num_groups", self.num_groups), dims=dims)
        shape = (self.num_quantizers, *sizes.values(), dims // self.num_groups)
        self._create_float32("entries", shape, self.codebook_init, trainable=trainable)

    def _create_float32(
        self, name: str, shape: tuple[int, ...], init: WeightInit | None, *, trainable: bool = False
    ) -> None:
        axes = (None,) * len(shape)
        weight = WeightHParams(shape, axes, init=init, dtype=jnp.float32, decays=False)
        self.create_variable(name, weight, trainable=trainable)

    def _entries(self) -> jax.Array:
        return self.get_var("entries")

    def codebooks(self) -> jax.Array:
        """Return all entries `[num_quantizers, num_classes, num_groups, group_dims]`."""
        return _normalize(self._entries()) if self.normalize_codebook else self._entries()

    def look_up(self, codes: jax.Array) -> jax.Array:
        """Return the vectors `[…, dims]` of codes `[…, num_quantizers * num_groups]`."""
        codes = codes.reshape(*codes.shape[:-1], self.num_quantizers, self.num_groups)
        selected = jax.nn.one_hot(codes, self.num_classes)
        vectors = jnp.einsum("...ngv,nvgd->...gd", selected, self.codebooks())
        return vectors.reshape(*vectors.shape[:-2], -1)

    def fprop(
        self, x: jax.Array, *, is_token: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Quantize vectors.

        Args:
          x: `[batch, length, input_dims]`.
          is_token: bool `[batch, length]`, False for padding; None if all are tokens.

        Returns:
          (vectors `[batch, length, dims]` in the compute dtype, int32 codes
          `[batch, length, num_quantizers * num_groups]`).
        """
        check_last_axis(self, x, input_dims=self.input_dims)
        is_token = jnp.ones(x.shape[:-1], bool) if is_token is None else is_token
        vectors, codes = self._quantize(jnp.where(is_token[..., None], x, 0), is_token)
        codes = codes.reshape(*x.shape[:-1], -1)
        perplexity, coverage = codebook_usage(codes, self.num_classes, is_token=is_token)
        self.add_summary("perplexity", perplexity)
        self.add_summary("coverage", coverage)
        return self.cast(vectors), codes

    def _quantize(self, x: jax.Array, is_token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return vectors `[…, dims]` and codes `[…, quantizers, groups]`; `x` is 0 at padding."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define _quantize")

    def _assign(self, x: jax.Array, is_token: jax.Array) -> tuple[jax.Array, ...]:
        """Return what each quantizer reads and finds, with an axis of them before the last of `x`.

        These are inputs and vectors `[…, quantizers, dims]`, compared latents `[…, quantizers,
        groups, group_dims]`, and codes `[…, quantizers, groups]`.
        """
        stages: list[tuple[jax.Array, ...]] = []
        for book in self.codebooks():
            latents = x.reshape(*x.shape[:-1], self.num_groups, -1)
            latents = _normalize(latents) if self.normalize_latents else latents
            products = jnp.einsum("...gd,vgd->...gv", latents, book)
            codes = jnp.argmin(jnp.sum(jnp.square(book), axis=-1).T - 2 * products, axis=-1)
            codes = jnp.where(is_token[..., None], codes, 0)
            selected = jax.nn.one_hot(codes, self.num_classes) * is_token[..., None, None]
            vectors = jnp.einsum("...gv,vgd->...gd", selected, book).reshape(x.shape)
            stages.append((x, vectors, latents, codes))
            x = x - jax.lax.stop_gradient(vectors)
        return tuple(jnp.stack(arrays, axis=x.ndim - 1) for arrays in zip(*stages, strict=True))


class RandomVectorQuantizer(BaseVectorQuantizer):
    """A quantizer of x·w + b that is never trained (BEST-RQ; Chiu et al., 2022, arXiv:2202.01855).

    Its codes are targets of self-supervised training. No gradient reaches the inputs. The other
    fields are those of `BaseVectorQuantizer`.

    Attributes:
      projection_dims: Size of the projection and of the vectors.
    """

    projection_dims: int = 16

    def setup(self) -> None:
        """Create the projection and the codebooks."""
        check_sizes(self, projection_dims=self.projection_dims)
        self._create_codebooks(self.projection_dims, trainable=False)
        self._create_float32("w", (self.input_dims, self.projection_dims), None)
        self._create_float32("b", (self.projection_dims,), WeightInit.Constant(0.0))

    def _quantize(self, x: jax.Array, is_token: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.lax.stop_gradient(x) @ self.get_var("w") + self.get_var("b")
        _, vectors, _, codes = self._assign(x, is_token)
        return jnp.sum(vectors, axis=-2), codes


class VectorQuantizer(BaseVectorQuantizer):
    """A quantizer with trained codebooks (VQ-VAE; van den Oord et al., 2017, arXiv:1711.00937).

    The gradient of the vectors passes to the inputs unchanged. Training adds the auxiliary loss
    commitment_weight·(x - sg(q))² and, without `decay`, (sg(x) - q)², as means over tokens and
    features. The other fields are those of `BaseVectorQuantizer`.

    Attributes:
      commitment_weight: Weight of the loss that draws inputs to their entries.
      decay: Weight of the old values in moving averages of the number and the sum of an entry's
        latents, whose ratio is the entry (appendix A.1 there). None to train entries by the loss.
    """

    normalize_latents: bool = True
    normalize_codebook: bool = True
    commitment_weight: float = 0.25
    decay: float | None = None

    def setup(self) -> None:
        """Create the codebooks, or the sums and numbers whose ratios they are."""
        check_non_negative(self, commitment_weight=self.commitment_weight)
        check_rates(self, decay=self.decay)
        self._create_codebooks(self.input_dims, trainable=self.decay is None)
        if self.decay is not None:
            shape = (self.num_quantizers, self.num_classes, self.num_groups)
            self._create_float32("counts", shape, WeightInit.Constant(1.0))

    def _entries(self) -> jax.Array:
        if self.decay is not None:
            # The constant keeps an entry without latents finite.
            return self.get_var("entries") / (self.get_var("counts") + 1e-5)[..., None]
        entries: jax.Array = self.theta.entries
        return entries

    def _quantize(self, x: jax.Array, is_token: jax.Array) -> tuple[jax.Array, jax.Array]:
        stop, num_tokens = jax.lax.stop_gradient, jnp.sum(is_token, dtype=jnp.float32)
        inputs, vectors, latents, codes = self._assign(x, is_token)

        def distance(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.sum(jnp.mean(jnp.square(x - y), axis=-1)) / jnp.maximum(num_tokens, 1.0)

        loss = self.commitment_weight * distance(inputs, stop(vectors))
        if self.decay is None:
            loss += distance(stop(inputs), vectors)
        elif self.is_training:
            selected = jax.nn.one_hot(codes, self.num_classes) * is_token[..., None, None, None]
            sums = jnp.einsum("...ngv,...ngd->nvgd", selected, stop(latents))
            counts = jnp.einsum("...ngv->nvg", selected)
            for name, new in {"entries": sums, "counts": counts}.items():
                self.update_var(name, self.decay * self.get_var(name) + (1 - self.decay) * new)
        self.add_aux_loss("quantization", loss, weight=num_tokens)
        return x + stop(jnp.sum(vectors, axis=-2) - x), codes


def codebook_usage(
    codes: jax.Array, num_classes: int, *, is_token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (perplexity, share of the entries that occur) of codes, means over their groups.

    Args:
      codes: int32 `[…, groups]`.
      num_classes: Number of entries.
      is_token: bool `[…]`, False for padding.
    """
    selected = jax.nn.one_hot(codes, num_classes) * is_token[..., None, None]
    counts = jnp.einsum("...gv->gv", selected)
    frequencies = counts / jnp.maximum(jnp.sum(counts, axis=-1, keepdims=True), 1.0)
    entropy = jnp.sum(jax.scipy.special.entr(frequencies), axis=-1)
    return jnp.mean(jnp.exp(entropy)), jnp.mean(counts > 0)


def _normalize(x: jax.Array) -> jax.Array:
    """Return vectors `[…, dims]` of unit length."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)
