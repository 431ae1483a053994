"""Linear attention with decay and the delta rule, token by token or in chunks.

A state S `[key_dims, value_dims]` per head is updated and read at every token:

    S_t = exp(g_t) S_{t-1} + k_t u_tᵀ        o_t = S_tᵀ q_t

| layer | decay g | u |
|---|---|---|
| Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060) | a number per head | v_t |
| gated delta net (Yang et al., 2024, arXiv:2412.06464) | a number per head | delta rule |
| Kimi delta attention (2025, arXiv:2510.26692) | a number per channel of the key | delta rule |

The delta rule is u_t = β_t (v_t - (exp(g_t) S_{t-1})ᵀ k_t). Within a chunk all u solve a triangular
system, so that the chunk reads and writes the state by products of matrices (the WY form). The
chunks of a row run one after another. Everything is computed in float32.

A row that is split over devices has a part on each. All parts first compute, at the same time, how
they change a state that enters them. The states that enter follow from these, and all parts run
once more. Only states move between devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Largest number of tokens for which the decays of all pairs and channels are kept at once.
_MOST_PAIRED = 16


class _Chunk(NamedTuple):
    """Factors of the chunks, `[…, heads, tokens, ·]`, which do not depend on the state.

    Attributes:
      query: Queries, with the decay since the start of the chunk.
      reads: Weight of the value of each token in the output of each token.
      key: Keys, with the decay until the end of the chunk.
      value: Updates u of an empty state.
      change: What the delta rule subtracts from the updates is change · S; None without it.
      through: Decay of the state over the chunk, `[…, heads, key_dims or 1, 1]`.
    """

    query: jax.Array
    reads: jax.Array
    key: jax.Array
    value: jax.Array
    change: jax.Array | None
    through: jax.Array


def document_starts(segments: jax.Array) -> jax.Array:
    """Return where documents start: bool `[batch, length]`, False for first tokens of rows.

    Args:
      segments: Number of each token's document, int32 `[batch, length]`; 0 is padding. A start is a
        token of another document than the last token before it.
    """
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(segments > 0, index, -1), axis=1)
    last = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    before = jnp.take_along_axis(segments, jnp.maximum(last, 0), axis=1)
    return (segments > 0) & (last >= 0) & (segments != before)


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    *,
    state: jax.Array,
    beta: jax.Array | None = None,
    segments: jax.Array | None = None,
    chunk_size: int = 64,
    parts: int = 1,
    constrain: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, jax.Array]:
    """Read and update the state of each head at every token.

    Args:
      query: `[batch, length, groups, key_dims]`, scaled.
      key: `[batch, length, groups, key_dims]`; a group serves heads / groups consecutive heads.
      value: `[batch, length, heads, value_dims]`.
      log_decay: Decay g of the state, at most 0, `[batch, length, heads, 1 or key_dims]`.
      state: State before the first token, float32 `[batch, heads, key_dims, value_dims]`.
      beta: Weights of updates by the delta rule, `[batch, length, heads]`; None without the rule.
      segments: Documents of packed rows, int32 `[batch, length]`; 0 is padding, which leaves the
        state as it is. Documents after the first start with an empty state. None for one document.
      chunk_size: Largest number of tokens of a chunk, a power of two. It affects speed alone.
      parts: Number of devices over which a row is split; a divisor of the length.
      constrain: Function that lays out arrays `[chunks, parts, batch, heads, …]` on the devices.

    Returns:
      (outputs float32 `[batch, length, heads, value_dims]`, state after the last token).
    """
    starts = None
    if segments is not None:
        is_token, starts = (segments > 0)[..., None, None], document_starts(segments)
        log_decay, value = (jnp.where(is_token, x, 0) for x in (log_decay, value))
        key = jnp.where(is_token, key, 0)
    batch, length, heads, value_dims = value.shape
    part = length // parts
    # `_invert_unit_lower` halves chunks.
    size = min(chunk_size, 1 << (part - 1).bit_length())

    def split(x: jax.Array) -> jax.Array:
        """Return `[chunks, parts, batch, heads, tokens, ·]` of `[batch, length, heads, ·]`."""
        x = x.astype(jnp.float32).reshape(batch, parts, part, *x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -part % size), (0, 0), (0, 0)))
        x = x.reshape(batch, parts, -1, size, *x.shape[3:])
        return constrain(x.transpose(2, 1, 0, 4, 3, 5))

    arrays = {"query": query, "key": key, "value": value, "log_decay": log_decay}
    if beta is not None:
        arrays["beta"] = beta[..., None]
    if starts is not None:
        arrays["starts"] = starts[..., None, None]
    arrays = {name: split(x) for name, x in arrays.items()}
    chunks: Any = arrays
    # The decays of the channels of all chunks at once would take too much memory.
    prepare: Callable[[Any], _Chunk] = jax.checkpoint(lambda chunk: _prepare(**chunk))
    if log_decay.shape[-1] == 1:
        chunks, prepare = _prepare(**arrays), lambda chunk: chunk
    entering = state[None]
    if parts > 1:
        entering = _entering_states(chunks, prepare, state, parts)

    def run(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        chunk = prepare(chunk)
        updates = _updates(chunk, state)
        outputs = chunk.query @ state + chunk.reads @ updates
        return _advance(chunk, state, updates), outputs

    last, outputs = jax.lax.scan(run, entering, chunks)
    outputs = outputs.transpose(2, 1, 0, 4, 3, 5).reshape(batch, parts, -1, heads, value_dims)
    return outputs[:, :, :part].reshape(value.shape), last[-1]


def _prepare(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None = None,
    starts: jax.Array | None = None,
) -> _Chunk:
    """Return the factors of chunks of arrays `[…, heads, tokens, ·]`."""
    heads, size = value.shape[-3:-1]
    total = jnp.cumsum(log_decay, axis=-2)
    lower = jnp.tril(jnp.ones((size, size), bool))
    allowed, pairs = lower, None
    leaves = total[..., -1:, :] - total
    if total.shape[-1] == 1:
        # A difference of long sums has lost the digits of short ones.
        steps = jnp.where(jnp.tril(lower, -1), log_decay, 0)
        pairs = jnp.cumsum(steps, axis=-2)
        leaves = jnp.swapaxes(pairs[..., -1:, :], -1, -2)
    enters, leaves = jnp.exp(total), jnp.exp(leaves)
    if starts is not None:
        document = jnp.cumsum(starts, axis=-2)
        allowed = allowed & (document == jnp.swapaxes(document, -1, -2))
        enters = jnp.where(document == 0, enters, 0)
        leaves = jnp.where(document == document[..., -1:, :], leaves, 0)

    def products(query: jax.Array, key: jax.Array) -> jax.Array:
        """Return Σ_d q_ld k_sd exp(total_ld - total_sd) of allowed pairs, `[…, heads, l, s]`."""
        if pairs is None:
            query, key = _of_heads(query, heads), _of_heads(key, heads)
            return jnp.where(allowed, _channel_products(query, key, total), 0)
        plain = _of_heads(query @ jnp.swapaxes(key, -1, -2), heads)
        return plain * jnp.exp(jnp.where(allowed, pairs, -jnp.inf))

    reads = products(query, key)
    query, key_of_heads = _of_heads(query, heads), _of_heads(key, heads)
    change = None
    if beta is not None:
        inverse = _invert_unit_lower(beta * products(key, key))
        sides = jnp.concatenate([beta * value, beta * enters * key_of_heads], axis=-1)
        solved = jnp.matmul(inverse, sides, precision="highest")
        value, change = jnp.split(solved, [value.shape[-1]], axis=-1)
    through = jnp.swapaxes(enters[..., -1:, :], -1, -2)
    return _Chunk(query * enters, reads, key_of_heads * leaves, value, change, through)


def _channel_products(query: jax.Array, key: jax.Array, total: jax.Array) -> jax.Array:
    """Return the decayed products of tokens l ≥ s; of others, any finite numbers.

    No factor exceeds 1: the decay from s to l is that from s to the middle, times that from there.
    """
    size = query.shape[-2]
    if size <= _MOST_PAIRED:
        decay = total[..., :, None, :] - total[..., None, :, :]
        return jnp.einsum("...ld,...sd,...lsd->...ls", query, key, jnp.exp(jnp.minimum(decay, 0)))
    q, k, t = (jnp.stack(jnp.split(x, 2, axis=-2)) for x in (query, key, total))
    middle = t[0][..., -1:, :]
    low = (q[1] * jnp.exp(t[1] - middle)) @ jnp.swapaxes(k[0] * jnp.exp(middle - t[0]), -1, -2)
    first, second = _channel_products(q, k, t)
    return _lower_blocks(first, low, second)


def _invert_unit_lower(x: jax.Array) -> jax.Array:
    """Return the inverse of unit lower triangular matrices `[…, size, size]`, a power of two.

    It has products of matrices alone, which every device computes fast and every mesh splits.
    """
    half = x.shape[-1] // 2
    if half == 0:
        return jnp.ones_like(x)
    halves = jnp.stack([x[..., :half, :half], x[..., half:, half:]])
    first, second = _invert_unit_lower(halves)
    multiply = functools.partial(jnp.matmul, precision="highest")
    return _lower_blocks(first, -multiply(second, multiply(x[..., half:, :half], first)), second)


def _lower_blocks(first: jax.Array, low: jax.Array, second: jax.Array) -> jax.Array:
    """Return matrices with the blocks first and second on the diagonal, and low below it."""
    top = jnp.concatenate([first, jnp.zeros_like(low)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([low, second], axis=-1)], axis=-2)


def _of_heads(x: jax.Array, heads: int) -> jax.Array:
    """Repeat the groups of `[…, groups, tokens, ·]` for their heads."""
    groups = x.shape[-3]
    return x if groups == heads else jnp.repeat(x, heads // groups, axis=-3)


def _updates(chunk: _Chunk, state: jax.Array) -> jax.Array:
    return chunk.value if chunk.change is None else chunk.value - chunk.change @ state


def _advance(chunk: _Chunk, state: jax.Array, updates: jax.Array) -> jax.Array:
    """Return the state `[…, heads, key_dims, value_dims]` after a chunk."""
    return chunk.through * state + jnp.swapaxes(chunk.key, -1, -2) @ updates


def _entering_states(
    chunks: Any, prepare: Callable[[Any], _Chunk], state: jax.Array, parts: int
) -> jax.Array:
    """Return the state `[parts, batch, heads, key_dims, value_dims]` that enters each part.

    A part is a linear map of the state that enters it, S → transfer · S + added.
    """
    key_dims = state.shape[-2]
    identity = jnp.broadcast_to(jnp.eye(key_dims), (parts, *state.shape[:-1], key_dims))

    def run(carry: Any, chunk: Any) -> tuple[Any, None]:
        added, transfer = carry
        chunk = prepare(chunk)
        added = _advance(chunk, added, _updates(chunk, added))
        if chunk.change is None:
            return (added, chunk.through * transfer), None
        return (added, _advance(chunk, transfer, -chunk.change @ transfer)), None

    empty = jnp.zeros((parts, *state.shape), jnp.float32)
    (added, transfer), _ = jax.lax.scan(run, (empty, identity), chunks)

    def enter(state: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
        added, transfer = part
        return transfer @ state + added, state

    return jax.lax.scan(enter, state, (added, transfer))[1]
