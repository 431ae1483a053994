"""Hiding tokens for a model to find: the noise that a masked language model is trained on.

Source: Devlin et al., 2018 (arXiv:1810.04805): of the tokens chosen, most become a mask token, some
a random one, and some stay as they are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_sizes
from layerkit.nested_map import NestedMap


class MaskedLmAugmenter(BaseLayer):
    """Chooses tokens to predict and hides most of them.

    Attributes:
      vocab_size: Number of token ids, from which random ones are drawn.
      mask_token_id: Takes the place of a hidden token.
      mask_prob: Part of the tokens that is chosen.
      replace_prob: Part of the chosen that becomes the mask token.
      random_prob: Part of the chosen that becomes a random token; the rest stays as it is.
      evaluation_seed: Outside training the same positions are chosen in every batch, by this seed,
        so that evaluations can be compared.

    Raises:
      ValueError: probabilities out of range, or a mask token that is not in the vocabulary.
    """

    vocab_size: int = 0
    mask_token_id: int = 0
    mask_prob: float = 0.15
    replace_prob: float = 0.8
    random_prob: float = 0.1
    evaluation_seed: int = 0

    def setup(self) -> None:
        check_sizes(self, vocab_size=self.vocab_size)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"{self.path_name}: mask_token_id={self.mask_token_id}, expected an id below"
                f" vocab_size={self.vocab_size}"
            )
        if not 0.0 < self.mask_prob <= 1.0:
            raise ValueError(f"{self.path_name}: mask_prob={self.mask_prob}, expected 0 < p <= 1")
        parts = (self.replace_prob, self.random_prob)
        if min(parts) < 0.0 or sum(parts) > 1.0:
            raise ValueError(
                f"{self.path_name}: replace_prob={self.replace_prob} and"
                f" random_prob={self.random_prob} must be at least 0 and together at most 1"
            )

    def fprop(self, ids: jax.Array, *, can_mask: jax.Array) -> NestedMap:
        """Hides tokens.

        Args:
          ids: int32 `[batch, length]`.
          can_mask: bool `[batch, length]`, False for padding and special tokens.

        Returns:
          A NestedMap:
            ids: int32 `[batch, length]`, what the model sees.
            weights: float32 `[batch, length]`, 1 where the token was chosen, to be predicted.
        """
        if self.is_training:
            key = self.next_prng_key()
        else:
            key = jax.random.key(self.evaluation_seed)
        chosen_key, kind_key, token_key = jax.random.split(key, 3)
        chosen = can_mask & (jax.random.uniform(chosen_key, ids.shape) < self.mask_prob)
        kind = jax.random.uniform(kind_key, ids.shape)
        random_ids = jax.random.randint(token_key, ids.shape, 0, self.vocab_size, ids.dtype)
        is_random = kind < self.replace_prob + self.random_prob
        seen = jnp.where(
            kind < self.replace_prob,
            jnp.asarray(self.mask_token_id, ids.dtype),
            jnp.where(is_random, random_ids, ids),
        )
        return NestedMap(ids=jnp.where(chosen, seen, ids), weights=chosen.astype(jnp.float32))
