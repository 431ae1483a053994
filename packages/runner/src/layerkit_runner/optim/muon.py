"""Muon: momentum of which each matrix is orthogonalized (Jordan et al., 2024)."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import jax
import optax
from optax.contrib import scale_by_muon

from layerkit.config.checks import (
    check_choice,
    check_integers,
    check_non_negative,
    check_positive,
    check_rates,
)
from layerkit_runner.optim.matrices import MatrixDims, as_matrices, from_matrices, require_matrices
from layerkit_runner.optim.optimizer_updates import declare_per_layer
from layerkit_runner.optim.schedules import concrete_numbers

MuonScale = Literal["rms", "shape", "spectral"]
"""Factor of the update of a matrix `[in, out]`; see `muon`."""

_RMS = 0.2
_SCALES = {
    "rms": lambda num_in, num_out: _RMS * math.sqrt(max(num_in, num_out)),
    "shape": lambda num_in, num_out: math.sqrt(max(1.0, num_out / num_in)),
    "spectral": lambda num_in, num_out: math.sqrt(num_out / num_in),
}


@declare_per_layer(lambda **_: False)
def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    eps: float = 1e-7,
    scale: MuonScale = "rms",
    weight_decay: float = 0.0,
    mask: Any = None,
    mu_dtype: Any = None,
    split_heads: bool = False,
) -> optax.GradientTransformation:
    """Return Muon for the matrices of a model; see `layerkit_runner.optim.matrices`.

    Each update is the momentum with all singular values near 1, times the factor of `scale`. Other
    weights need an `AuxiliaryOptimizer` with `weights=all_but_matrices`.

    Args:
      learning_rate: A number or schedule.
      beta: Decay of the momentum.
      nesterov: True to look ahead by one step of the momentum.
      ns_steps: Number of Newton-Schulz iterations.
      eps: Number added to the Frobenius norm by which a matrix is divided before them.
      scale: "rms" for 0.2·√max(in, out), at which the root mean square of an update is about that
        of AdamW's, so that both have the same learning rate (Liu et al., 2025, arXiv:2502.16982).
        "shape" for √max(1, out/in), as in Jordan's code. "spectral" for √(out/in), at which the
        best rate does not depend on the width (Yang et al., 2023, arXiv:2310.17813).
      weight_decay: Decoupled weight decay, times the learning rate.
      mask: A tree of booleans, or a function from the weights to one such as `decays`, True for
        weights that decay; None for all.
      mu_dtype: Dtype of the momentum; None for that of the weights.
      split_heads: True to orthogonalize the matrix of each attention head; False for one matrix of
        all heads.

    Raises:
      ConfigError: A number is out of range, or a weight is no matrix.
    """
    owner = "muon"
    check_rates(owner, **concrete_numbers(beta=beta))
    check_integers(owner, minimum=1, ns_steps=ns_steps)
    check_positive(owner, **concrete_numbers(eps=eps))
    check_non_negative(owner, **concrete_numbers(weight_decay=weight_decay))
    check_choice(owner, get_args(MuonScale), scale=scale)
    # Without a momentum, this is only the Newton-Schulz iteration.
    newton_schulz = scale_by_muon(ns_steps=ns_steps, beta=0.0, eps=eps, nesterov=False)

    def orthogonalize(matrix: jax.Array) -> jax.Array:
        orthogonal: jax.Array = newton_schulz.update(matrix, newton_schulz.init(matrix))[0]
        return orthogonal

    def direction(x: jax.Array, dims: MatrixDims) -> jax.Array:
        matrices = [
            _SCALES[scale](*part.shape[-2:]) * _map_matrices(orthogonalize, part)
            for part in as_matrices(x, dims)
        ]
        return from_matrices(matrices, dims, like=x)

    def directions(updates: Any, params: Any) -> Any:
        del params
        dims = require_matrices(updates, owner=owner, split_heads=split_heads)
        return jax.tree.map(direction, updates, dims)

    return optax.chain(
        optax.trace(beta, nesterov, accumulator_dtype=mu_dtype),
        optax.stateless(directions),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _map_matrices(function: Any, x: jax.Array) -> jax.Array:
    for _ in x.shape[:-2]:
        function = jax.vmap(function)
    return function(x)
