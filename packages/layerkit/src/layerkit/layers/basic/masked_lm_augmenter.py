"""Masking of tokens for masked language models.

Source: Devlin et al., 2018 (arXiv:1810.04805). Most of the selected tokens become the mask token,
some become a random token, and some stay unchanged.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config.checks import check_integers, check_non_negative, require
from layerkit.config.nested_map import NestedMap


class MaskedLmAugmenter(BaseLayer):
    """A layer that selects tokens to predict and masks most of them.

    Attributes:
      vocab_size: Number of token ids, from which random tokens are drawn; at least two.
      mask_token_id: Id of the mask token.
      mask_prob: Fraction of the tokens that are selected.
      replace_prob: Fraction of the selected tokens that become the mask token.
      random_prob: Fraction of the selected tokens that become a random token; the others stay
        unchanged.
      evaluation_seed: Random seed of evaluations. Their draws for a row depend on this seed and the
        ids of the row alone, so that results can be compared, whatever the batch size.

    Raises:
      ConfigError: A probability is out of range, or the mask token is not in the vocabulary.
    """

    vocab_size: int = 0
    mask_token_id: int = 0
    mask_prob: float = 0.15
    replace_prob: float = 0.8
    random_prob: float = 0.1
    evaluation_seed: int = 0

    def setup(self) -> None:
        """Check the fields."""
        check_integers(self, minimum=2, vocab_size=self.vocab_size)
        mask_id, size = self.mask_token_id, self.vocab_size
        expected = f"an id in [0, vocab_size={size})"
        require(0 <= mask_id < size, self, "mask_token_id", mask_id, expected)
        is_valid = 0.0 < self.mask_prob <= 1.0
        require(is_valid, self, "mask_prob", self.mask_prob, "a number in (0, 1]")
        check_non_negative(self, replace_prob=self.replace_prob, random_prob=self.random_prob)
        total = self.replace_prob + self.random_prob
        require(total <= 1.0, self, "replace_prob + random_prob", total, "at most 1")

    def fprop(self, ids: jax.Array, *, can_mask: jax.Array) -> NestedMap:
        """Select and mask tokens.

        Args:
          ids: int32 `[batch, length]`.
          can_mask: bool `[batch, length]`, False for padding and special tokens.

        Returns:
          A NestedMap:
            ids: int32 `[batch, length]`, inputs of the model.
            weights: float32 `[batch, length]`, 1 for the selected tokens, which are predicted.
        """
        if self.is_training:
            selection, kind, random_ids = self._draw(self.next_prng_key(), ids)
        else:
            seed = jax.random.key(self.evaluation_seed)
            keys = jax.vmap(partial(jax.random.fold_in, seed))(_row_hashes(ids))
            selection, kind, random_ids = jax.vmap(self._draw)(keys, ids)
        selected = can_mask & (selection < self.mask_prob)
        is_random = kind < self.replace_prob + self.random_prob
        seen = jnp.where(
            kind < self.replace_prob,
            jnp.asarray(self.mask_token_id, ids.dtype),
            jnp.where(is_random, random_ids, ids),
        )
        return NestedMap(ids=jnp.where(selected, seen, ids), weights=selected.astype(jnp.float32))

    def _draw(self, key: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return two uniform numbers float32 and a random id for each of the ids `[...]`."""
        selected_key, kind_key, token_key = jax.random.split(key, 3)
        return (
            jax.random.uniform(selected_key, ids.shape),
            jax.random.uniform(kind_key, ids.shape),
            jax.random.randint(token_key, ids.shape, 0, self.vocab_size, ids.dtype),
        )


def _row_hashes(ids: jax.Array) -> jax.Array:
    """Return a polynomial hash uint32 `[batch]` of the ids `[batch, length]` of each row."""
    powers = jnp.cumprod(jnp.full(ids.shape[-1], 0x01000193, jnp.uint32))  # FNV's prime
    return jnp.sum((ids.astype(jnp.uint32) + 1) * powers, axis=-1, dtype=jnp.uint32)
