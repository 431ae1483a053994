"""Losses on pairs of answers, one of them preferred, and on single judgements.

All arrays are float32 `[batch]`, as are the results, one loss for each pair or judgement. The log
ratio r of an answer is log p(answer | policy) − log p(answer | reference) in nats, where a fixed
model is the reference. `margin` is h = r(chosen) − r(rejected), and `beta` is β, the strength of
the penalty on deviations from the reference. IPO, SimPO and ORPO read means over the tokens of an
answer; SimPO and ORPO have no reference, so r is a log-probability.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from layerkit.ops.losses.softmax import weighted_mean


def dpo_loss(margin: jax.Array, *, beta: float, label_smoothing: float = 0.0) -> jax.Array:
    """Compute −(1 − ε)·log σ(β·h) − ε·log σ(−β·h) `[batch]`: DPO, conservative DPO if ε > 0.

    ε is `label_smoothing`, the assumed share of pairs whose preference is wrong. Source: Rafailov
    et al., 2023, arXiv:2305.18290.
    """
    preferred, other = jax.nn.log_sigmoid(beta * margin), jax.nn.log_sigmoid(-beta * margin)
    return -(1.0 - label_smoothing) * preferred - label_smoothing * other


def hinge_loss(margin: jax.Array, *, beta: float) -> jax.Array:
    """Compute max(0, 1 − β·h) `[batch]`: SLiC (Zhao et al., 2023, arXiv:2305.10425)."""
    return jax.nn.relu(1.0 - beta * margin)


def ipo_loss(margin: jax.Array, *, beta: float) -> jax.Array:
    """Compute (h − 1/(2β))² `[batch]`: IPO (Azar et al., 2023, arXiv:2310.12036), whose τ is β."""
    return jnp.square(margin - 1.0 / (2.0 * beta))


def simpo_loss(margin: jax.Array, *, beta: float, gamma: float) -> jax.Array:
    """Compute −log σ(β·h − gamma) `[batch]`: SimPO (Meng et al., 2024, arXiv:2405.14734)."""
    return -jax.nn.log_sigmoid(beta * margin - gamma)


def odds_ratio_loss(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> jax.Array:
    """Compute −β·log σ(log odds(chosen) − log odds(rejected)) `[batch]`, where odds(p) = p/(1 − p).

    `chosen` and `rejected` are mean log-probabilities of tokens. ORPO adds the cross-entropy of the
    chosen answers (Hong et al., 2024, arXiv:2403.07691, whose λ is β).
    """
    # The largest one keeps the odds of a probability of 1 finite.
    p, q = (jnp.minimum(x, -jnp.finfo(jnp.float32).eps) for x in (chosen, rejected))
    log_ratio = p - q - jnp.log(jnp.expm1(p) / jnp.expm1(q))
    return -beta * jax.nn.log_sigmoid(log_ratio)


def kto_divergence(log_ratios: jax.Array, weights: jax.Array) -> jax.Array:
    """Estimate KL(policy ‖ reference) as the mean r, at least 0; a scalar without gradient.

    `log_ratios` are r of prompts with the answers to other prompts, with `weights`.
    """
    return jax.lax.stop_gradient(jax.nn.relu(weighted_mean(log_ratios, weights)))


def kto_loss(
    log_ratios: jax.Array, is_desirable: jax.Array, divergence: jax.Array, *, beta: float
) -> jax.Array:
    """Compute 1 − σ(±β·(r − KL)) `[batch]`: KTO, with − for undesirable answers.

    KL is the scalar of `kto_divergence`. KTO multiplies the losses by weights of desirable and of
    other answers. Source: Ethayarajh et al., 2024, arXiv:2402.01306, Eq. 7.
    """
    signs = jnp.where(is_desirable.astype(bool), beta, -beta)
    return 1.0 - jax.nn.sigmoid(signs * (log_ratios - divergence))


def bradley_terry_loss(
    chosen: jax.Array, rejected: jax.Array, *, centering: float = 0.0
) -> jax.Array:
    """Compute −log σ(chosen − rejected) + centering·(chosen + rejected)² `[batch]` of rewards.

    Sources: Bradley and Terry, 1952, as in InstructGPT (Ouyang et al., 2022, arXiv:2203.02155); the
    centering, such as 0.01, which keeps rewards near 0: Eisenstein et al., 2023, arXiv:2312.09244.
    """
    return -jax.nn.log_sigmoid(chosen - rejected) + centering * jnp.square(chosen + rejected)
