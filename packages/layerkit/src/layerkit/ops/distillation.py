"""Losses of a student that imitates a teacher, for each token.

With p the teacher's and q the student's distribution over the next token, both at one temperature:

    β = 0        KL(p‖q), the forward KL: q covers all that p may say
    β = 1        KL(q‖p), the reverse KL: q says nothing that p would not
    0 < β < 1    β·KL(p‖m) + (1 − β)·KL(q‖m) with m = β·p + (1 − β)·q

The last is the generalized Jensen–Shannon divergence of GKD (Agarwal et al., 2024,
arXiv:2306.13649), also of TRL. Losses are in nats, without the factor temperature² of Hinton et al.
(2015, arXiv:1503.02531), as in TRL. The teacher gets no gradients.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# Stands for the logarithm of 0, so that 0·log 0 and its gradient are 0.
_LOG_ZERO = -1e9
# Largest probability of the most likely tokens together, so that the rest has a logarithm.
_LARGEST_SUM = 1.0 - 2.0**-24


def divergence(
    student: jax.Array, teacher: jax.Array, beta: float = 0.0, temperature: float = 1.0
) -> jax.Array:
    """Compute the divergence of each token between two networks, float32 `[...]`.

    Args:
      student: Logits `[..., num_classes]`, converted to float32.
      teacher: Logits `[..., num_classes]`.
      beta: β in [0, 1]; see the module.
      temperature: Divisor of both logits, a positive number.
    """
    log_p, log_q = (_log_probs(logits, temperature) for logits in (teacher, student))
    return _divergence(log_q, jax.lax.stop_gradient(log_p), beta)


def top_divergence(
    student: jax.Array,
    ids: jax.Array,
    log_probs: jax.Array,
    beta: float = 0.0,
    temperature: float = 1.0,
) -> jax.Array:
    """Compute the divergence over k tokens and all others as one outcome, float32 `[...]`.

    It is at most `divergence`, and equal to it if k is the size of the vocabulary.

    Args:
      student: Logits `[..., num_classes]`.
      ids: The teacher's k most likely tokens, integers `[..., k]`.
      log_probs: Results of `top_log_probs` at the same temperature, `[..., k + 1]`.
      beta: As for `divergence`.
      temperature: As for `divergence`.
    """
    log_q = _outcomes(_log_probs(student, temperature), ids)
    # If the k tokens are all there are, nothing is left for the others.
    log_p = log_probs[..., : log_q.shape[-1]].astype(jnp.float32)
    return _divergence(log_q, jax.lax.stop_gradient(log_p), beta)


def top_log_probs(
    logits: jax.Array, k: int, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Return the k most likely tokens and their log-probabilities.

    Args:
      logits: `[..., num_classes]`.
      k: Number of tokens, at most num_classes.
      temperature: Divisor of the logits.

    Returns:
      (ids int32 `[..., k]`, most likely first; log-probabilities float32 `[..., k + 1]`, the last
      of which is that of all other tokens together, or about −1e9 without others).
    """
    every = _log_probs(logits, temperature)
    _, ids = jax.lax.top_k(every, k)
    top = _outcomes(every, ids)
    rest = jnp.full((*top.shape[:-1], k + 1 - top.shape[-1]), _LOG_ZERO)
    return ids.astype(jnp.int32), jnp.concatenate([top, rest], axis=-1)


def feature_distances(student: jax.Array, teacher: jax.Array, *, kind: str) -> jax.Array:
    """Compute the distance of each token's hidden states, float32 `[batch, length]`.

    Args:
      student: Hidden states `[batch, length, dims]`, projected to the width of the teacher.
      teacher: Hidden states `[batch, length, dims]`.
      kind: `mse`, the mean over dims of the squared difference, or `cosine`, 1 − cos.
    """
    student = student.astype(jnp.float32)
    teacher = jax.lax.stop_gradient(teacher.astype(jnp.float32))
    if kind == "mse":
        return jnp.mean(jnp.square(student - teacher), axis=-1)
    products = [jnp.sum(a * b, -1) for a, b in ((student, student), (teacher, teacher))]
    norms = jnp.sqrt(products[0] * products[1] + 1e-12)
    return 1.0 - jnp.sum(student * teacher, axis=-1) / norms


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
    if beta in (0, 1):
        return _kl(log_p, log_q) if beta == 0 else _kl(log_q, log_p)
    log_m = jnp.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1.0 - beta) * _kl(log_q, log_m)


def _kl(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)
