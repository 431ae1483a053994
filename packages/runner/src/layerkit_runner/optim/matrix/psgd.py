"""PSGD with whitening preconditioners of both sides of a matrix (Li, 2024, arXiv:2402.11858)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import check_sizes
from layerkit_runner.optim.matrix import matrix_rule
from layerkit_runner.optim.matrix.matrix_rule import MatrixState, mix
from layerkit_runner.optim.optimizer_updates import declare_per_layer

_MAX_RMS = 1.1
_CURVATURE_DECAY = 0.9
# Standard deviation of the noise that damps the fit, as in Li's code.
_DAMPING = 1e-9


def annealed_probability(count: jax.Array) -> jax.Array:
    """Return 1 for 500 steps, then a probability that falls to 0.03 by step 4000."""
    return jnp.clip(jnp.exp(-0.001 * (count - 500.0)), 0.03, 1.0)


@declare_per_layer(lambda **_: False)
def psgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    update_probability: optax.ScalarOrSchedule = annealed_probability,
    precond_lr: float = 0.1,
    max_dimension: int = 8192,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Return PSGD Kron for the matrices of a model: the momentum M becomes Q_in² M Q_out².

    The roots Q are fitted so that the result is white, by the quadratic form of Li's PyTorch code,
    which consists of products. Momentum, schedule and the limit of updates, a root mean square of
    1.1, are those of kron_torch. Where Li adds noise to gradients, this adds its expected effect.
    The factors of a matrix are curvatures, and Q_in and Q_out, `[size, size]` or a diagonal.

    Args:
      learning_rate: A number or schedule.
      b1: Decay of the momentum.
      update_probability: Share p of the steps that fit the roots, or a schedule of it. They are
        fitted in a step if the last fit was at least 1/p steps before.
      precond_lr: Learning rate of the roots.
      max_dimension: Largest size of a side whose root is a matrix; that of others is a diagonal.
      weight_decay: Decoupled weight decay, times the learning rate.
      mask: Weights that decay, as in `optax.adamw`.

    Raises:
      ConfigError: A number is out of range, or a weight is no matrix.
    """
    check_sizes("psgd", max_dimension=max_dimension)

    def make(size: int) -> jax.Array:
        return jnp.eye(size) if size <= max_dimension else jnp.ones(size)

    def interval(count: jax.Array) -> Any:
        share = update_probability
        return 1 / (share(count) if callable(share) else share)

    def fit(x: jax.Array, *factors: jax.Array) -> Any:
        return _fit(x, *factors, rate=precond_lr)

    def direct(matrices: Any, factors: Any) -> tuple[Any, Any]:
        x = _whiten(*matrices, *factors[2:])
        rms = jnp.sqrt(jnp.mean(jnp.square(x)))
        return (x * jnp.minimum(1.0, _MAX_RMS / (rms + 1e-12)),), (None,) * 4

    def update(grads: Any, state: MatrixState, is_due: jax.Array, run: Any) -> Any:
        mu = mix(b1, state.moments[0], grads)
        unbiased = jax.tree.map(lambda m: m / (1 - b1 ** (state.count + 1.0)), mu)
        branch = is_due.astype(jnp.int32)
        factors = matrix_rule.compute_factors(branch, {fit: 1}, run, unbiased, state.factors)
        return run(direct, (unbiased,), factors)[0][0], (mu,), factors

    scalar = [lambda *_: jnp.zeros(())] * 2
    return matrix_rule.matrix_rule(
        "psgd",
        learning_rate,
        update,
        moments=1,
        makers=[*scalar, lambda ins, _: make(ins), lambda _, outs: make(outs)],
        interval=interval,
        rates={"b1": b1},
        positive={"update_probability": update_probability, "precond_lr": precond_lr},
        weight_decay=weight_decay,
        mask=mask,
    )


def _whiten(x: jax.Array, in_root: jax.Array, out_root: jax.Array) -> jax.Array:
    for _ in range(2):
        x = in_root @ x if in_root.ndim > 1 else in_root[:, None] * x
        x = x @ out_root if out_root.ndim > 1 else x * out_root
    return x


def _fit(x: jax.Array, *factors: jax.Array, rate: float) -> tuple[jax.Array, ...]:
    """Return the factors after a step of fitting them to a matrix `[in, out]`."""
    sizes = [jnp.max(jnp.abs(q)) for q in factors[2:]]
    mean = jnp.sqrt(sizes[0] * sizes[1])
    roots = [q * (mean / size) for q, size in zip(factors[2:], sizes, strict=True)]
    times = [jnp.matmul if q.ndim > 1 else jnp.multiply for q in roots]
    squares = [multiply(q, q) for multiply, q in zip(times, roots, strict=True)]
    noise = _DAMPING + jnp.finfo(jnp.float32).eps * jnp.sqrt(jnp.mean(jnp.square(x)))
    white = _whiten(x, *roots)
    fitted, curvatures = [], []
    for side, (q, multiply) in enumerate(zip(roots, times, strict=True)):
        y, is_matrix = white.T if side else white, q.ndim > 1
        covariance = y @ y.T if is_matrix else jnp.sum(y * y, axis=1)
        scale = jnp.square(noise) * jnp.sum(jnp.square(squares[1 - side]))
        covariance += scale * multiply(squares[side], squares[side])
        target = y.shape[1]
        bound = (_norm_bound if is_matrix else jnp.max)(covariance) + target
        curvature = jnp.maximum(mix(_CURVATURE_DECAY, factors[side], bound), bound)
        half = rate / 2 / curvature
        q = q - half * (multiply(covariance, q) - target * q)
        q = q - half * (multiply(q, covariance) - target * q)
        fitted.append((q + q.T) / 2)
        curvatures.append(curvature)
    return *curvatures, *fitted


def _norm_bound(x: jax.Array) -> jax.Array:
    """Return a close lower bound of the norm ‖x‖₂ of a positive matrix, by power iteration."""
    tiny = jnp.finfo(jnp.float32).tiny
    scale = jnp.max(jnp.diagonal(x)) + tiny
    x = x / scale
    v = x[jnp.argmax(jnp.sum(jnp.square(x), axis=1))]
    for _ in range(2):
        v = v @ x
        v = v / (jnp.linalg.norm(v) + tiny) @ x
    return scale * jnp.linalg.norm(v)
