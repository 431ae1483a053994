"""State and steps that SOAP, Shampoo and PSGD share.

Moments are stored in the layout of their weight, and factors of matrices by matrix. Partitioners
divide both over the mesh axes of the weight, and `map_matrices` makes one matrix at a time whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import check_non_negative, check_positive, check_rates
from layerkit_runner.optim.matrix.matrices import as_matrices, require_matrices
from layerkit_runner.optim.matrix.spread_matrices import map_matrices
from layerkit_runner.optim.schedules import concrete_numbers

Maker = Callable[[int, int], jax.Array]
"""Function of the sizes (in, out) of a matrix that returns the first value of a factor."""


class MatrixState(NamedTuple):
    """The state of an optimizer that preconditions matrices.

    Attributes:
      count: Number of updates, int32 scalar.
      last: `count` at the last computation of the factors, int32 scalar.
      moments: Trees of float32 arrays shaped like the weights.
      factors: Trees with the paths of the weights. A leaf is a list of float32 arrays
        `[*batch, ...]`, one for each matrix of a weight; see `as_matrices`. `bfloat16_state` keeps
        the first two trees in float32: rounding the averages of G Gᵀ and Gᵀ G would hide their
        small eigenvalues.
    """

    count: jax.Array  # type: ignore[assignment]  # the name in Optax, and a method of tuples
    last: jax.Array
    moments: tuple[Any, ...]
    factors: tuple[Any, ...]


def matrix_rule(
    owner: str,
    learning_rate: optax.ScalarOrSchedule,
    update: Callable[..., Any],
    *,
    moments: int,
    makers: Sequence[Maker],
    interval: Callable[[jax.Array], Any],
    first: int = 0,
    rates: Mapping[str, float],
    positive: Mapping[str, Any],
    weight_decay: float,
    mask: Any,
) -> optax.GradientTransformation:
    """Return an optimizer of matrices with decoupled weight decay.

    Args:
      owner: Name of the optimizer, for errors.
      learning_rate: A number or schedule.
      update: Function `(gradients, state, is_due, run) -> (updates, moments, factors)`. `is_due`
        is a bool scalar, whether to compute the factors. `run` is `map_matrices`.
      moments: Number of trees of moments.
      makers: Makers of the factors.
      interval: Function of `count` that returns the number of steps between computations.
      first: Step of the first computation.
      rates: Arguments that have to be in [0, 1).
      positive: Arguments that have to be above 0.
      weight_decay: Decoupled weight decay, times the learning rate.
      mask: Weights that decay, as in `optax.adamw`.
    """
    check_rates(owner, **concrete_numbers(**rates))
    check_positive(owner, **concrete_numbers(**positive))
    check_non_negative(owner, **concrete_numbers(weight_decay=weight_decay))

    def init(params: Any) -> MatrixState:
        dims = require_matrices(params, owner=owner)

        def make_all(make: Maker, param: Any, dim: Any) -> list[jax.Array]:
            shapes = [x.shape for x in jax.eval_shape(lambda x: as_matrices(x, dim), param)]
            return [jnp.broadcast_to(x := make(*s[-2:]), (*s[:-2], *x.shape)) for s in shapes]

        zeros = (jax.tree.map(lambda x: jnp.zeros(x.shape), params) for _ in range(moments))
        factors = (jax.tree.map(partial(make_all, make), params, dims) for make in makers)
        last = jnp.int32(first - jnp.ceil(interval(jnp.int32(first))))
        return MatrixState(jnp.int32(0), last, tuple(zeros), tuple(factors))

    def update_all(grads: Any, state: MatrixState, params: Any = None) -> tuple[Any, MatrixState]:
        del params
        run = partial(map_matrices, dims=require_matrices(grads, owner=owner))
        is_due = state.count - state.last >= interval(state.count)
        last = jnp.where(is_due, state.count, state.last)
        with jax.default_matmul_precision("highest"):
            updates, *new = update(jax.tree.map(jnp.float32, grads), state, is_due, run)
        return updates, MatrixState(state.count + 1, last, *map(tuple, new))

    return optax.chain(
        optax.GradientTransformation(init, update_all),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def compute_factors(
    branch: jax.Array, functions: Mapping[Any, int], run: Any, tree: Any, factors: Any
) -> Any:
    """Return new factors of one of the functions `(matrix, *factors) -> factors`.

    The others are not computed. Branch 0 keeps the factors, and 1 is the first function. The values
    of `functions` are the numbers of steps between calls, for counts of FLOPs.
    """

    def compute(function: Any, interval: int, tree: Any, factors: Any) -> Any:
        # `step_cost` counts this share of the products in each step.
        with jax.named_scope(f"share(rows_1_of_{interval})"):
            return tuple(run(lambda xs, old: ((), function(*xs, *old)), (tree,), factors)[1])

    branches: list[Any] = [
        lambda _, old: old,
        *(partial(compute, function, interval) for function, interval in functions.items()),
    ]
    return jax.lax.switch(branch, branches, tree, factors)


def mix(decay: float | jax.Array, old: Any, new: Any) -> Any:
    """Return decay·old + (1 - decay)·new of trees of arrays."""
    return jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, old, new)
