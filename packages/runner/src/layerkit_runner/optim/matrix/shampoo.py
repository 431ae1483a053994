"""Distributed Shampoo with grafting (Anil et al., 2020, arXiv:2002.09018), as Praxis has it."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import check_choice, check_divisible, check_integers, check_sizes
from layerkit_runner.optim.matrix import matrix_rule
from layerkit_runner.optim.matrix.matrix_rule import Maker, MatrixState, mix
from layerkit_runner.optim.optimizer_updates import declare_per_layer

Graft = Literal["adam", "rmsprop"]

_TINY = 1e-25


@declare_per_layer(lambda **_: False)
def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    graft: Graft = "adam",
    block_size: int = 1024,
    root_order: int = 4,
    matrix_epsilon: float = 1e-6,
    statistics_interval: int = 1,
    root_interval: int = 10,
    start_step: int = 10,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformation:
    """Return distributed Shampoo for the matrices of a model.

    The direction of a gradient G is that of L^(-1/p) G R^(-1/p), with averages L of G Gᵀ and R of
    Gᵀ G for each block. Its norm is that of the update of another optimizer, whose learning rate
    serves both. The factors of a matrix are L, R and their roots, `[blocks, size, size]`.

    Args:
      learning_rate: A number or schedule.
      b1: Decay of the momentum.
      b2: Decay of the averages L and R, and of the second moment.
      eps: Number added to the root of the second moment.
      graft: "adam" preconditions the unbiased momentum, as in Meta's Shampoo, and has the norm of
        Adam's update. "rmsprop" preconditions the gradient, has the norm of RMSProp's update, and
        averages the updates, as in Praxis with `moving_average_for_momentum`.
      block_size: Largest size of the blocks that a matrix is divided into.
      root_order: Order p of the roots.
      matrix_epsilon: Number added to L and R, times their largest eigenvalue.
      statistics_interval: Number of steps between updates of L and R.
      root_interval: Number of steps between computations of the roots, a multiple of it.
      start_step: Number of first steps with the update of the other optimizer.
      weight_decay: Decoupled weight decay, times the learning rate.
      mask: Weights that decay, as in `optax.adamw`.

    Raises:
      ConfigError: A number is out of range, or a weight is no matrix.
    """
    owner = "shampoo"
    check_choice(owner, get_args(Graft), graft=graft)
    check_sizes(owner, block_size=block_size, root_order=root_order, root_interval=root_interval)
    check_sizes(owner, statistics_interval=statistics_interval)
    interval = ("statistics_interval", statistics_interval)
    check_divisible(owner, by=interval, root_interval=root_interval)
    check_integers(owner, minimum=0, start_step=start_step)

    def maker(side: int, scale: float) -> Maker:
        def make(*shape: int) -> jax.Array:
            blocks = jax.eval_shape(lambda: _split(jnp.zeros(shape), block_size))
            return scale * jnp.tile(jnp.eye(blocks.shape[1 + side]), (len(blocks), 1, 1))

        return make

    def add_statistics(x: jax.Array, *factors: jax.Array) -> Any:
        x = _split(x, block_size)
        return mix(b2, factors[0], x @ x.mT), mix(b2, factors[1], x.mT @ x), None, None

    def add_roots(x: jax.Array, *factors: jax.Array) -> Any:
        *averages, _, _ = add_statistics(x, *factors)
        return *averages, *(_find_root(x, root_order, matrix_epsilon) for x in averages)

    def direct(matrices: Any, factors: Any) -> tuple[Any, Any]:
        x, grafted = matrices
        x = _merge(factors[2] @ _split(x, block_size) @ factors[3], x.shape)
        norm = jnp.linalg.norm(grafted) / (jnp.linalg.norm(x) + _TINY)
        return (x * norm,), (None,) * 4

    def update(grads: Any, state: MatrixState, is_due: jax.Array, run: Any) -> Any:
        (mu, nu), count = state.moments, state.count
        functions = {add_statistics: statistics_interval, add_roots: root_interval}
        branch = jnp.where(is_due, 2, jnp.where(count % statistics_interval == 0, 1, 0))
        factors = matrix_rule.compute_factors(branch, functions, run, grads, state.factors)
        x, scale, nu = grads, jnp.ones(()), mix(b2, nu, jax.tree.map(jnp.square, grads))
        if graft == "adam":
            mu, scale = mix(b1, mu, grads), jnp.sqrt(1 - b2 ** (count + 1.0))
            x = jax.tree.map(lambda m: m / (1 - b1 ** (count + 1.0)), mu)
        grafted = jax.tree.map(lambda x, v: x / (jnp.sqrt(v) / scale + eps), x, nu)
        (directions,), _ = run(direct, (x, grafted), factors)
        is_started = count >= start_step
        updates = jax.tree.map(lambda a, b: jnp.where(is_started, a, b), directions, grafted)
        if graft == "rmsprop":
            mu = updates = mix(b1, mu, updates)
        return updates, (mu, nu), factors

    return matrix_rule.matrix_rule(
        owner,
        learning_rate,
        update,
        moments=2,
        makers=[maker(side, scale) for scale in (matrix_epsilon, 1.0) for side in (0, 1)],
        interval=lambda _: root_interval,
        rates={"b1": b1, "b2": b2},
        positive={"eps": eps, "matrix_epsilon": matrix_epsilon},
        weight_decay=weight_decay,
        mask=mask,
    )


def _split(x: jax.Array, size: int) -> jax.Array:
    """Return the blocks `[blocks, in, out]` of a matrix, which is padded with zeros."""
    ins, outs = (min(length, size) for length in x.shape)
    x = jnp.pad(x, ((0, -x.shape[0] % ins), (0, -x.shape[1] % outs)))
    return x.reshape(-1, ins, x.shape[1] // outs, outs).swapaxes(1, 2).reshape(-1, ins, outs)


def _merge(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the matrix of the blocks of `_split`."""
    _, ins, outs = blocks.shape
    x = blocks.reshape(-(-shape[0] // ins), -1, ins, outs).swapaxes(1, 2)
    return x.reshape(x.shape[0] * ins, -1)[: shape[0], : shape[1]]


def _find_root(x: jax.Array, order: int, epsilon: float) -> jax.Array:
    """Return (x + ridge)^(-1/order) of positive matrices `[blocks, size, size]`."""
    values, vectors = jnp.linalg.eigh(x)
    ridge = epsilon * jnp.maximum(values[:, -1:], _TINY)
    powers = (jnp.maximum(values, 0) + ridge) ** (-1 / order)
    return vectors * powers[:, None] @ vectors.mT
