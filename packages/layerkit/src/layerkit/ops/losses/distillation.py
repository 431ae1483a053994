"""Losses of a student that imitates a teacher, of each token.

With p the teacher's and q the student's distribution over the next token, both at one temperature:

    β = 0        KL(p‖q), the forward KL: q covers all that p may say
    β = 1        KL(q‖p), the reverse KL: q says nothing that p would not
    0 < β < 1    β·KL(p‖m) + (1 − β)·KL(q‖m) with m = β·p + (1 − β)·q, as in GKD (Agarwal et
                 al., 2024, arXiv:2306.13649)

As in TRL, losses lack the factor temperature² of Hinton et al. (2015, arXiv:1503.02531). They are
in nats and float32. The teacher gets no gradients.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# Stands for the logarithm of 0, so that 0·log 0 and its gradient are 0.
_LOG_ZERO = -1e9
# Largest sum of the probabilities of some tokens, so that the rest has a logarithm.
_LARGEST_SUM = 1.0 - 2.0**-24


def divergence(
    student: jax.Array, teacher: jax.Array, beta: float = 0.0, temperature: float = 1.0
) -> jax.Array:
    """Compute the divergence, `[...]`, of logits `[..., num_classes]`; see the module."""
    return _divergence(_log_probs(student, temperature), _log_probs(teacher, temperature), beta)


def top_divergence(
    student: jax.Array, ids: jax.Array, log_probs: jax.Array, beta: float, temperature: float
) -> jax.Array:
    """Compute the divergence, `[...]`, over k tokens and all others as one outcome.

    It is at most `divergence`, and equal to it if k is the number of classes. `ids` and `log_probs`
    are the results of `top_log_probs` at the same temperature.
    """
    log_q = _outcomes(_log_probs(student, temperature), ids)
    # If the k tokens are all there are, nothing is left for the others.
    return _divergence(log_q, log_probs[..., : log_q.shape[-1]], beta)


def top_log_probs(
    logits: jax.Array, k: int, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Return the k most likely tokens of logits `[..., num_classes]`, and their log-probabilities.

    The first are int32 `[..., k]`. The last of the second, `[..., k + 1]`, is that of all other
    tokens together, −1e9 if there are none.
    """
    every = _log_probs(logits, temperature)
    ids = jax.lax.top_k(every, k)[1].astype(jnp.int32)
    top = _outcomes(every, ids)
    rest = jnp.full((*top.shape[:-1], k + 1 - top.shape[-1]), _LOG_ZERO)
    return ids, jnp.concatenate([top, rest], axis=-1)


def _log_probs(logits: jax.Array, temperature: float) -> jax.Array:
    every = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
    return jnp.maximum(every, _LOG_ZERO)


def _outcomes(log_probs: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the log-probabilities of `ids` `[..., k]` and, if there are others, of the rest."""
    top = jnp.take_along_axis(log_probs, ids, axis=-1)
    if ids.shape[-1] == log_probs.shape[-1]:
        return top
    total = jnp.minimum(jnp.sum(jnp.exp(top), axis=-1, keepdims=True), _LARGEST_SUM)
    return jnp.concatenate([top, jnp.log1p(-total)], axis=-1)


def _divergence(log_q: jax.Array, log_p: jax.Array, beta: float) -> jax.Array:
    log_p = jax.lax.stop_gradient(log_p)
    if beta in (0, 1):
        return _kl(log_p, log_q) if beta == 0 else _kl(log_q, log_p)
    log_m = jnp.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1.0 - beta) * _kl(log_q, log_m)


def _kl(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)
