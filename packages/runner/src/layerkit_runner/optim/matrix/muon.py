"""Muon and its kin: the momentum of each matrix, orthogonalized (Jordan et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from layerkit.config.checks import (
    check_choice,
    check_integers,
    check_non_negative,
    check_positive,
    check_rates,
)
from layerkit_runner.optim.matrix.matrices import (
    MatrixDims,
    as_matrices,
    from_matrices,
    require_matrices,
)
from layerkit_runner.optim.matrix.spread_matrices import is_on_cpu, map_matrices
from layerkit_runner.optim.optimizer_updates import declare_per_layer
from layerkit_runner.optim.schedules import concrete_numbers

MuonScale = Literal["rms", "shape", "spectral"]
"""Factor of the update of a matrix `[in, out]`; see `muon`."""
MuonVariant = Literal["muon", "normuon", "adamuon"]
"""Second moment by which an orthogonalized momentum is divided; see `muon`."""

_RMS = 0.2
_APPLIED_AFTER = 3  # Iterations on X·Xᵀ before they are applied to X.
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Coefficients of Jordan's iteration.
_TINY = 1e-10


@declare_per_layer(lambda **_: False)
def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta: float = 0.95,
    nesterov: bool = True,
    variant: MuonVariant = "muon",
    beta2: float = 0.95,
    scale: MuonScale = "rms",
    split_heads: bool = False,
    weight_decay: float = 0.0,
    mask: Any = None,
    ns_steps: int = 5,
    eps: float = 1e-7,
    ns_dtype: Any = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Return Muon for the matrices of a model; see `layerkit_runner.optim.matrix.matrices`.

    An update is the momentum with all singular values near 1, times the factor of `scale`. Other
    weights need an `AuxiliaryOptimizer` with `weights=all_but_matrices`.

    Args:
      learning_rate: A number or schedule.
      beta: Decay of the momentum.
      nesterov: True to look ahead by one step of the momentum.
      variant: "normuon" divides the orthogonalized momentum by the root of a second moment of each
        output (Li et al., 2025, arXiv:2510.05491). "adamuon" takes the sign of the momentum before,
        and a second moment of each entry (Si et al., 2025, arXiv:2507.11005). Both then restore the
        Frobenius norm of an orthogonal matrix. "muon" does neither.
      beta2: Decay of the second moment of a variant.
      scale: "rms" for 0.2·√max(in, out), at which the root mean square of an update is about that
        of AdamW's, so that one learning rate serves both (Liu et al., 2025, arXiv:2502.16982).
        "shape" for √max(1, out/in), as in Jordan's code. "spectral" for √(out/in), at which the
        best rate does not depend on the width (Yang et al., 2023, arXiv:2310.17813).
      split_heads: True to orthogonalize the matrix of each attention head; False for one matrix of
        all heads.
      weight_decay: Decoupled weight decay, times the learning rate.
      mask: A tree of booleans, or a function from the weights to one such as `decays`, True for
        weights that decay; None for all.
      ns_steps: Number of Newton-Schulz iterations.
      eps: Number added to the Frobenius norm by which a matrix is divided before the iterations.
      ns_dtype: Dtype of the iterations. None for bfloat16, as in Jordan's code, but on CPUs, which
        compute faster in it, for that of the gradients.
      mu_dtype: Dtype of the momentum; None for that of the weights.

    Raises:
      ConfigError: A number is out of range, or a weight is no matrix.
    """
    owner = "muon"
    check_rates(owner, **concrete_numbers(beta=beta, beta2=beta2))
    check_integers(owner, minimum=1, ns_steps=ns_steps)
    check_positive(owner, **concrete_numbers(eps=eps))
    check_non_negative(owner, **concrete_numbers(weight_decay=weight_decay))
    check_choice(owner, get_args(MuonScale), scale=scale)
    check_choice(owner, get_args(MuonVariant), variant=variant)

    def dims_of(tree: Any) -> Any:
        return require_matrices(tree, owner=owner, split_heads=split_heads)

    def orthogonalize(matrices: tuple[Any, ...], states: tuple[Any, ...]) -> tuple[Any, Any]:
        matrix = jnp.sign(matrices[0]) if variant == "adamuon" else matrices[0]
        return (_orthogonalize(matrix, ns_steps=ns_steps, eps=eps),), states

    def directions(updates: Any, _: Any) -> Any:
        dtype = ns_dtype or (None if is_on_cpu() else jnp.bfloat16)
        cast = jax.tree.map(lambda x: x.astype(dtype or x.dtype), updates)
        ((made,), _) = map_matrices(orthogonalize, [cast], dims=dims_of(updates))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), made, updates)

    def rescale(x: jax.Array, dims: MatrixDims) -> jax.Array:
        matrices = [
            _factor(scale, *matrix.shape[-2:]) * (matrix if variant == "muon" else _unit(matrix))
            for matrix in as_matrices(x, dims)
        ]
        return from_matrices(matrices, dims, like=x)

    return optax.chain(
        optax.trace(beta, nesterov, accumulator_dtype=mu_dtype),
        optax.stateless(directions),
        *([] if variant == "muon" else [_divide_by_second_moment(variant, beta2, dims_of)]),
        optax.stateless(lambda tree, _: jax.tree.map(rescale, tree, dims_of(tree))),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _divide_by_second_moment(
    variant: MuonVariant, beta2: float, dims_of: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """Return the normalization of a variant; `dims_of` gives the `MatrixDims` of a tree.

    NorMuon's second moments have size 1 in contracted dimensions.
    """

    def square(x: jax.Array, dims: MatrixDims) -> jax.Array:
        return jnp.mean(x**2, dims.ins, keepdims=True) if variant == "normuon" else x**2

    def init(params: Any) -> optax.ScaleByRmsState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByRmsState(jax.tree.map(square, zeros, dims_of(params)))

    def update(updates: Any, state: optax.ScaleByRmsState, params: Any = None) -> Any:
        del params
        new = jax.tree.map(square, updates, dims_of(updates))
        nu = jax.tree.map(lambda v, x: (beta2 * v + (1 - beta2) * x).astype(v.dtype), state.nu, new)
        updates = jax.tree.map(lambda x, v: x / (jnp.sqrt(v) + _TINY), updates, nu)
        return updates, optax.ScaleByRmsState(nu)

    return optax.GradientTransformation(init, update)


def _orthogonalize(matrix: jax.Array, *, ns_steps: int, eps: float) -> jax.Array:
    """Return the result of Newton-Schulz iterations on a matrix `[in, out]`.

    Each iteration multiplies the matrix X from the left by a polynomial of X·Xᵀ. If X is wide, the
    product of three polynomials is computed before it is applied, with 2/3 of the operations for
    out = 4·in. A product of all five would lose the small singular values, whose squares are below
    the precision of X·Xᵀ; narrow dtypes lose them earlier.
    """
    rows, columns = sorted(matrix.shape)
    is_wide = columns >= 2 * rows and matrix.dtype == jnp.float32
    interval = _APPLIED_AFTER if is_wide else 1
    x = matrix if matrix.shape[0] == rows else matrix.T
    for start in range(0, ns_steps, interval):
        gram = x @ x.T
        scale = 1.0 if start else 1 / (jnp.sqrt(jnp.trace(gram)) + eps)
        gram *= scale**2
        product = identity = jnp.eye(rows, dtype=matrix.dtype)
        for step in range(start, min(start + interval, ns_steps)):
            factor = _A * identity + _B * gram + _C * (gram @ gram)
            product = factor @ product if step > start else factor
            gram = factor @ (factor @ gram)
        x = (scale * product) @ x
    return x if matrix.shape[0] == rows else x.T


def _factor(scale: MuonScale, num_in: int, num_out: int) -> float:
    if scale == "rms":
        return _RMS * math.sqrt(max(num_in, num_out))
    ratio = num_out / max(num_in, 1)  # An array without entries has no size.
    return math.sqrt(ratio if scale == "spectral" else max(1.0, ratio))


def _unit(matrices: jax.Array) -> jax.Array:
    """Return matrices `[..., in, out]` with the Frobenius norm of an orthogonal matrix."""
    norms = jnp.linalg.norm(matrices, axis=(-2, -1), keepdims=True)
    return matrices * (math.sqrt(min(matrices.shape[-2:])) / (norms + _TINY))
