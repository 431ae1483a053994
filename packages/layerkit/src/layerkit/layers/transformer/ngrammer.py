"""NGrammer: embeddings of tokens augmented by those of pairs of adjacent tokens.

Source: Roy et al., 2022 (arXiv:2207.06366). A head has codes of the tokens, which are the nearest
clusters of its part of the embeddings, or the token ids themselves. The code of a token and that of
the token before it are one bigram, whose number is hashed into a table of vectors.
"""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, check_sizes, require
from layerkit.config.hparams import Conditions
from layerkit.layers.attention.cache import write_cache
from layerkit.layers.attention.cached_states import extend_last, init_num_prompt
from layerkit.layers.basic.embeddings import Embedding
from layerkit.layers.basic.normalizations import BaseNormalization, LayerNormPerHead
from layerkit.layers.basic.vector_quantizers import BaseVectorQuantizer, VectorQuantizer

_CODE_AXES = ("batch", None, None)


class NGrammer(BaseLayer):
    """A map from ids and embeddings `[batch, length, input_dims]` to embeddings of that shape.

    Each head normalizes its part of the embedding and the vector of its bigram, and adds them, or
    puts the vector in the place of the last entries of its part. Padding becomes 0.

    Attributes:
      input_dims: Size of an embedding, which the heads split.
      num_heads: Number of heads.
      vocab_size: Number of token ids.
      num_buckets: Number of vectors of a head.
      bigram_dims: Size of such a vector; None to add a vector to the whole part of a head.
      quantizer_tpl: Quantizer that assigns the codes, with a group for each head, such as
        `VectorQuantizer`; None to take the token ids as the codes of all heads.
      embedding_tpl: Table of the vectors of all heads.
      norm_tpl: Norms of the parts and of the vectors of heads.

    Raises:
      ConfigError: A size is not divisible, or a vector is larger than the part of a head.
    """

    used_only_if: ClassVar[Conditions] = {"vocab_size": "not quantizer_tpl"}

    input_dims: int = 0
    num_heads: int = 0
    vocab_size: int = 0
    num_buckets: int = 768 * 256
    bigram_dims: int | None = None
    quantizer_tpl: Config[BaseVectorQuantizer] | None = sub_config_field(
        VectorQuantizer.HParams,
        normalize_latents=False,
        normalize_codebook=False,
        commitment_weight=0.0,
        decay=0.999,
    )
    embedding_tpl: Config[Embedding] = sub_config_field(
        Embedding.HParams, activation_axes=("batch", "length", None, None)
    )
    norm_tpl: Config[BaseNormalization] = sub_config_field(LayerNormPerHead.HParams)

    def setup(self) -> None:
        """Create the quantizer, the table and the norms."""
        sizes = {"num_heads": self.num_heads, "num_buckets": self.num_buckets}
        check_sizes(self, input_dims=self.input_dims, bigram_dims=self.bigram_dims, **sizes)
        check_divisible(self, by=("num_heads", self.num_heads), input_dims=self.input_dims)
        head_dim = self.input_dims // self.num_heads
        dims = head_dim if self.bigram_dims is None else self.bigram_dims
        expected = f"at most {head_dim}, the size of a head"
        require(dims <= head_dim, self, "bigram_dims", dims, expected)
        if self.quantizer_tpl is None:
            check_sizes(self, vocab_size=self.vocab_size)
        else:
            groups = {"input_dims": self.input_dims, "num_groups": self.num_heads}
            self.create_child("quantizer", self.quantizer_tpl, **groups)
        num_vectors = self.num_heads * self.num_buckets
        self.create_child("embedding", self.embedding_tpl, num_classes=num_vectors, input_dims=dims)
        for name, size in (("norm", head_dim), ("bigram_norm", dims)):
            self.create_child(name, self.norm_tpl, num_heads=self.num_heads, dims=size)

    def fprop(
        self, ids: jax.Array, x: jax.Array, *, segments: jax.Array | None = None
    ) -> jax.Array:
        """Augment the embeddings of whole rows.

        Args:
          ids: Token ids int32 `[batch, length]`.
          x: Their embeddings `[batch, length, input_dims]`.
          segments: Number of each token's document, int32 `[batch, length]`; 0 is padding, which
            moves no cluster and becomes 0. None for one document without padding.

        Returns:
          `[batch, length, input_dims]` in the compute dtype.
        """
        is_token = None if segments is None else segments != 0
        codes = self._encode(ids, x, is_token)
        before = jnp.pad(codes[:, :-1], ((0, 0), (1, 0), (0, 0)))
        if segments is None or is_token is None:
            return self._augment(x, codes, before)
        same = segments == jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
        augmented = self._augment(x, codes, jnp.where(same[..., None], before, 0))
        return jnp.where(is_token[..., None], augmented, 0)

    def init_cache(self, batch_size: int) -> None:
        """Create the cache of the codes of the token before a step, `[batch, 1, num_heads]`."""
        init_num_prompt(self)
        codes = jnp.zeros((batch_size, 1, self.num_heads), jnp.int32)
        write_cache(self, "codes", codes, _CODE_AXES)

    def extend_step(self, ids: jax.Array, x: jax.Array, *, time_step: jax.Array) -> jax.Array:
        """Augment the embeddings of the next tokens of cached rows.

        Args:
          ids: Token ids int32 `[batch, t]`.
          x: Their embeddings `[batch, t, input_dims]`.
          time_step: int32 scalar, number of tokens before these.

        Returns:
          `[batch, t, input_dims]` in the compute dtype.
        """
        codes = self._encode(ids, x, None)
        tokens = extend_last(self, "codes", codes, _CODE_AXES, time_step=time_step, axis=1)
        return self._augment(x, codes, tokens[:, :-1])

    def _encode(self, ids: jax.Array, x: jax.Array, is_token: jax.Array | None) -> jax.Array:
        """Return the codes of tokens, int32 `[batch, length, num_heads]`."""
        if self.quantizer_tpl is None:
            return jnp.broadcast_to(ids[..., None], (*ids.shape, self.num_heads))
        codes: jax.Array = self.quantizer(x, is_token=is_token)[1]
        return codes

    def _augment(self, x: jax.Array, codes: jax.Array, before: jax.Array) -> jax.Array:
        vectors = self.bigram_norm(self.embedding(self._hash(codes, before)))
        parts: jax.Array = self.norm(self.cast(x).reshape(*x.shape[:-1], self.num_heads, -1))
        if self.bigram_dims is None:
            parts = parts + vectors
        else:
            parts = jnp.concatenate([parts[..., : -self.bigram_dims], vectors], axis=-1)
        return parts.reshape(x.shape)

    def _hash(self, codes: jax.Array, before: jax.Array) -> jax.Array:
        """Return the rows of bigrams in the table; as in Praxis, products wrap in 32 bits."""
        num_codes = self.vocab_size if self.quantizer_tpl is None else self.quantizer.num_classes
        numbers = codes + before * num_codes
        head = jnp.arange(self.num_heads, dtype=jnp.int32)
        primes = jnp.asarray(_primes_above(self.num_buckets, self.num_heads), jnp.int32)
        buckets = (numbers * (head + 1) + head + 1) % primes % self.num_buckets
        return buckets + head * self.num_buckets


def _primes_above(number: int, count: int) -> np.ndarray:
    """Return the first primes above a number, `[count]`."""
    # There are more than `count` primes from n to 2n + 20·count, by the prime number theorem.
    limit = 2 * number + 20 * count + 100
    is_prime = np.ones(limit, bool)
    is_prime[: number + 1] = False
    for factor in range(2, math.isqrt(limit) + 1):
        is_prime[factor * factor :: factor] = False
    return np.flatnonzero(is_prime)[:count]
