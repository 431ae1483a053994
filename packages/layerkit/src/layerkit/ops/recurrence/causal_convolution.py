"""Depth-wise causal convolution of packed rows, with the inputs that the next tokens read."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.ops.recurrence.linear_attention import document_starts


def causal_convolution(
    x: jax.Array, kernel: jax.Array, *, history: jax.Array, segments: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel with the tokens before it in its document.

    Token t of the output is Σ_j kernel[j] · x[t - (width - 1) + j], as in `torch.nn.Conv1d`.

    Args:
      x: Inputs `[batch, length, …]`.
      kernel: `[width, …]`, with the last entry for the token itself.
      history: Inputs before the first token, `[batch, width - 1, …]`, 0 at the start of a document.
      segments: Number of each token's document, int32 `[batch, length]`; 0 is padding, which is 0
        for later tokens. None for one document without padding.

    Returns:
      (outputs like `x`, history after the last token, without the padding behind it).
    """
    length, missing = x.shape[1], history.shape[1]
    extra = (1,) * (x.ndim - 2)
    last = jnp.full((x.shape[0],), length)
    if segments is not None:
        is_token = segments > 0
        x = jnp.where(is_token.reshape(*is_token.shape, *extra), x, 0)
        documents = jnp.cumsum(document_starts(segments), axis=1, dtype=jnp.int32)
        documents = jnp.pad(documents, ((0, 0), (missing, 0)))
        last = jnp.max(jnp.where(is_token, jnp.arange(1, length + 1), 0), axis=1)
    inputs = jnp.concatenate([history.astype(x.dtype), x], axis=1)
    outputs = jnp.zeros_like(x)
    for tap in range(missing + 1):
        read = inputs[:, tap : tap + length]
        if segments is not None:
            same = documents[:, tap : tap + length] == documents[:, missing:]
            read = jnp.where(same.reshape(*same.shape, *extra), read, 0)
        outputs = outputs + kernel[tap] * read
    if segments is None:
        return outputs, inputs[:, length:]
    index = last[:, None] + jnp.arange(missing)
    kept = jnp.take_along_axis(inputs, index.reshape(*index.shape, *extra), axis=1)
    of_last = jnp.take_along_axis(documents, index, axis=1) == documents[:, -1:]
    return outputs, jnp.where(of_last.reshape(*of_last.shape, *extra), kept, 0)
