"""SOAP: Adam in the eigenbasis of Shampoo's statistics (Vyas et al., 2024, arXiv:2409.11321)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import check_sizes
from layerkit_runner.optim.matrix import matrix_rule
from layerkit_runner.optim.matrix.matrix_rule import MatrixState, mix
from layerkit_runner.optim.optimizer_updates import declare_per_layer


@declare_per_layer(lambda **_: False)
def soap(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    precondition_frequency: int = 10,
    max_dimension: int = 10_000,
    one_sided: bool = False,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Return SOAP for the matrices of a model, equal to the authors' PyTorch code.

    The first gradient only gives the first bases, by eigendecomposition; unlike in that code,
    weights decay in this step. A step of power iteration and a QR decomposition renew the bases.
    The factors of a matrix are averages of G Gᵀ and Gᵀ G, then their bases, of 2·(in² + out²)
    entries; a side that is not rotated has scalars.

    Args:
      learning_rate: A number or schedule.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      shampoo_beta: Decay of the averages of G Gᵀ and Gᵀ G; None for `b2`.
      eps: Number added to the root of the second moment.
      precondition_frequency: Number of steps between renewals of the bases.
      max_dimension: Largest size of a side that is rotated.
      one_sided: True to rotate only the smaller side, which takes less memory and time.
      weight_decay: Decoupled weight decay, times the learning rate.
      mask: Weights that decay, as in `optax.adamw`.

    Raises:
      ConfigError: A number is out of range, or a weight is no matrix.
    """
    beta = b2 if shampoo_beta is None else shampoo_beta
    check_sizes("soap", precondition_frequency=precondition_frequency, max_dimension=max_dimension)

    def make(size: int, *, is_smaller: bool) -> jax.Array:
        has_basis = size <= max_dimension and (is_smaller or not one_sided)
        return jnp.zeros((size, size) if has_basis else ())

    def step(matrices: Any, factors: Any) -> tuple[Any, Any]:
        (grad, mu, nu), (ins, outs, *bases) = matrices, factors
        nu = mix(b2, nu, jnp.square(_rotate(grad, *bases)))
        direction = _rotate(mu, *bases) / (jnp.sqrt(nu) + eps)
        ins = mix(beta, ins, grad @ grad.T) if ins.ndim else None
        outs = mix(beta, outs, grad.T @ grad) if outs.ndim else None
        return (_rotate(direction, *(q.T for q in bases)), nu), (ins, outs, None, None)

    def update(grads: Any, state: MatrixState, is_due: jax.Array, run: Any) -> Any:
        count, (mu, nu) = state.count, state.moments
        branch = jnp.where(is_due, jnp.where(count == 1, 1, 2), 0)
        functions = dict.fromkeys((_decompose, _refine), precondition_frequency)
        factors = matrix_rule.compute_factors(branch, functions, run, grads, state.factors)

        def skip_first(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(count > 0, a, b), new, old)

        # The first gradient only gives the first bases, also to weights without one.
        mu = skip_first(mix(b1, mu, grads), mu)
        (directions, new_nu), factors = run(step, (grads, mu, nu), factors)
        nu = skip_first(new_nu, nu)
        steps = jnp.maximum(count, 1).astype(jnp.float32)
        scale = jnp.sqrt(1 - b2**steps) / (1 - b1**steps)
        return jax.tree.map(lambda x: scale * x, directions), (mu, nu), factors

    return matrix_rule.matrix_rule(
        "soap",
        learning_rate,
        update,
        moments=2,
        makers=[
            lambda ins, outs: make(ins, is_smaller=ins <= outs),
            lambda ins, outs: make(outs, is_smaller=outs < ins),
        ]
        * 2,
        interval=lambda _: precondition_frequency,
        first=1,
        rates={"b1": b1, "b2": b2, "shampoo_beta": beta},
        positive={"eps": eps},
        weight_decay=weight_decay,
        mask=mask,
    )


def _rotate(x: jax.Array, in_basis: jax.Array, out_basis: jax.Array) -> jax.Array:
    """Return Q_inᵀ x Q_out; a basis without axes is the identity."""
    x = in_basis.T @ x if in_basis.ndim else x
    return x @ out_basis if out_basis.ndim else x


def _decompose(_: jax.Array, *factors: jax.Array) -> Any:
    vectors = (jnp.linalg.eigh(x)[1] if x.ndim else None for x in factors[:2])
    return None, None, *vectors


def _refine(_: jax.Array, *factors: jax.Array) -> Any:
    """Return the factors after a step of power iteration.

    Columns are orthogonalized by falling eigenvalue and keep their places: so does the second
    moment, which the authors' code sorts.
    """

    def refine(average: jax.Array, basis: jax.Array) -> jax.Array:
        product = average @ basis
        order = jnp.argsort(-jnp.sum(basis * product, axis=0))
        return jnp.linalg.qr(product[:, order])[0][:, jnp.argsort(order)]

    sides = zip(factors[:2], factors[2:], strict=True)
    return None, None, *(refine(x, q) if x.ndim else None for x, q in sides)
