"""Attention itself, as a plain function of queries, keys, values and a mask.

softmax(scale · q·k) · v (Vaswani et al., 2017, arXiv:1706.03762), with grouped queries (Ainslie et
al., 2023, arXiv:2305.13245): query head h reads key head h // group, where group is the number of
query heads to a key head. Keys are not repeated for it: the heads of the queries are seen as two
axes, `[kv_heads, group]`.

Logits and softmax are float32 whatever the inputs are. A masked logit becomes a large finite
negative rather than -inf, so that a row without any key to attend has a softmax and a gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp

from layerkit.layers.attention.backends import AttentionCall, Backend, select_backend
from layerkit.layers.losses import soft_cap
from layerkit.layers.masks import AttentionMask

_LOG = logging.getLogger("layerkit.attention")

# Half of float32's range, so that subtracting the largest logit of a row cannot overflow.
MASKED_LOGIT = -0.5 * float(jnp.finfo(jnp.float32).max)


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask | None = None,
    scale: float,
    logit_cap: float | None = None,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    zero_fully_masked_rows: bool = False,
    backend: str = "auto",
    platform: str | None = None,
) -> jax.Array:
    """What each query reads.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, kv_heads, head_dim]`, where kv_heads divides heads.
      value: Like `key`.
      mask: Which query may attend which key; None for all.
      scale: Multiplies the logits.
      logit_cap: Squeezes the logits into ±logit_cap; None leaves them alone.
      dropout: Applied to the probabilities, in the dtype of `value`.
      zero_fully_masked_rows: A query that may attend no key gives exactly 0; without it, the mean
        of all values.
      backend: `auto`, `xla` or `cudnn`; see `layerkit.layers.attention.backends`.
      platform: Where it will run; None for JAX's default.

    Returns:
      `[batch, queries, heads, head_dim]` in the dtype of `value`.

    Raises:
      ValueError: shapes that do not fit, or an unknown backend.
      BackendRefusal: a backend that cannot do this.
    """
    _check_shapes(query, key, value, mask)
    chosen = choose_backend(
        query,
        key,
        mask=mask,
        logit_cap=logit_cap,
        dropout=dropout,
        backend=backend,
        platform=platform,
    )
    _LOG.info(chosen.describe())
    is_causal = mask is not None and mask.causal
    # The count of model FLOPs takes half of what it finds in the causal scope.
    with jax.named_scope("causal_attention" if is_causal else "attention"):
        if chosen.name == "cudnn":
            return jax.nn.dot_product_attention(
                query, key, value, scale=scale, is_causal=is_causal, implementation="cudnn"
            )
        # Heads come first, so that the products batch over leading axes alone: XLA's CPU backend
        # then holds fewer transposed copies for the backward pass.
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        logits = soft_cap(_scaled_logits(query, key, scale), logit_cap)
        probabilities = _masked_softmax(logits, mask, zero_empty_rows=zero_fully_masked_rows)
        probabilities = probabilities.astype(value.dtype)
        if dropout is not None:
            probabilities = dropout(probabilities)
        read = jnp.einsum("bngqk,bnkd->bngqd", probabilities, value)
        return jnp.swapaxes(read.reshape(query.shape), 1, 2)


def choose_backend(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    *,
    mask: AttentionMask | None,
    logit_cap: float | None,
    dropout: Callable[[jax.Array], jax.Array] | None,
    backend: str,
    platform: str | None,
) -> Backend:
    """The backend that `dot_product_attention` takes for such arguments; raises as it does."""
    call = AttentionCall(
        platform=platform or jax.default_backend(),
        dtype=query.dtype,
        head_dim=query.shape[-1],
        num_queries=query.shape[1],
        num_keys=key.shape[1],
        is_causal=mask is not None and mask.causal,
        has_segments=mask is not None and mask.query_segments is not None,
        has_logit_cap=logit_cap is not None,
        has_dropout=dropout is not None,
    )
    return select_backend(backend, call)


def _scaled_logits(query: jax.Array, key: jax.Array, scale: float) -> jax.Array:
    """scale·q·k as float32 `[batch, kv_heads, group, queries, keys]`."""
    batch, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    # Queries are fewer numbers than logits; in low precision they would be rounded once more.
    scale_queries = query.dtype == jnp.float32
    if scale_queries:
        query = query * scale
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, head_dim)
    logits = jnp.einsum("bngqd,bnkd->bngqk", grouped, key, preferred_element_type=jnp.float32)
    return logits if scale_queries else logits * scale


def _masked_softmax(
    logits: jax.Array, mask: AttentionMask | None, *, zero_empty_rows: bool
) -> jax.Array:
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    allowed = mask.dense()[:, :, None]  # [batch, 1, 1, queries, keys]
    probabilities = jax.nn.softmax(jnp.where(allowed, logits, MASKED_LOGIT), axis=-1)
    if zero_empty_rows:
        probabilities = jnp.where(allowed.any(axis=-1, keepdims=True), probabilities, 0.0)
    return probabilities


def _check_shapes(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask | None
) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == 4 or key.shape != value.shape:
        raise ValueError(
            f"{shapes}: expected query [batch, queries, heads, head_dim], and key and value"
            " [batch, keys, kv_heads, head_dim]"
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"{shapes}: batch and head_dim must be the same in all")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{shapes}: kv_heads={key.shape[2]} must divide heads={query.shape[2]}")
    if mask is None:
        return
    # A mask of another length would be broadcast, or fail inside XLA without a name.
    found = mask.query_positions.shape[-1], mask.key_positions.shape[-1]
    if found != (query.shape[1], key.shape[1]):
        raise ValueError(
            f"{shapes}: the mask is for {found[0]} queries and {found[1]} keys, expected"
            f" {query.shape[1]} and {key.shape[1]}"
        )
