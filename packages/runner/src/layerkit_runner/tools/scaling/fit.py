"""Fits of loss against size: L(N, D) = E + A/N^α + B/D^β, or L(C) = E + K/C^c on a single ray.

The fit minimizes the Huber loss of the logarithms (Hoffmann et al., 2022, arXiv:2203.15556,
approach 3), summed over runs as in Besiroglu et al. (2024, arXiv:2404.10102). Intervals are those
of a parametric bootstrap: losses are drawn around the fit and fitted again. The scale of the noise
is drawn as well, because a few residuals do not determine it; the tails are Student's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares, nnls

LEVEL = 0.95
"""Probability of all intervals."""

_QUANTILES = (0.5 - LEVEL / 2, 0.5 + LEVEL / 2)
_HUBER_DELTA = 1e-3
_EXPONENTS, _MAX_EXPONENT = np.geomspace(0.05, 1.6, 12), 3.0
_LOG_RANGE = 20.0  # A term that is smaller by e^-20 has no effect on the losses.


class Law(NamedTuple):
    """A fitted law L = E + Σᵢ Kᵢ·xᵢ^-pᵢ of the sizes xᵢ.

    Attributes:
      names: Names of the sizes, such as N and D.
      centers: Mean logarithm of each size over the runs, float64 `[sizes]`.
      best: log E, then log Kᵢ·exp(-pᵢ·centerᵢ), then pᵢ, float64 `[1 + 2·sizes]`; -inf without E.
      draws: The same of each draw of the bootstrap, float64 `[draws, 1 + 2·sizes]`.
      noises: An error of the logarithm of a measured loss for each draw, float64 `[draws]`.
    """

    names: tuple[str, ...]
    centers: np.ndarray
    best: np.ndarray
    draws: np.ndarray
    noises: np.ndarray

    def predict(self, sizes: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the loss of another run, and the interval of its measured loss."""
        logs = np.log([[sizes[name]] for name in self.names]) - self.centers[:, None]
        best = _log_loss(self.best, logs)[0]
        errors = np.array([_log_loss(draw, logs)[0] for draw in self.draws]) - best
        ends = np.quantile(best - errors + self.noises, _QUANTILES)
        return float(np.exp(best)), float(np.exp(ends[0])), float(np.exp(ends[1]))

    def parameters(self) -> dict[str, list[float] | None]:
        """Return E and the exponents with their intervals; None for one that is not identified."""
        num = len(self.names)
        rows = np.stack(
            [self.best, *np.quantile(self.draws, _QUANTILES, axis=0, method="inverted_cdf")], axis=1
        )
        known = dict(
            zip((f"exponent of {name}" for name in self.names), rows[1 + num :], strict=True)
        )
        values = {n: r.tolist() if r[1] > 0.001 and r[2] < 2.9 else None for n, r in known.items()}
        if np.isfinite(self.best[0]):
            smallest = _log_loss(self.best, np.zeros((num, 1)))[0] + np.log(0.01)
            values["E"] = np.exp(rows[0]).tolist() if rows[0, 1] > smallest else None
        return values

    def text(self) -> str:
        """Return the formula with its numbers."""
        scales, powers = np.split(self.best[1:], 2)
        parts = zip(np.exp(scales + powers * self.centers), self.names, powers, strict=True)
        terms = [f"{factor:.5g}/{name}^{power:.4g}" for factor, name, power in parts]
        floor = [f"{np.exp(self.best[0]):.5g}"] if np.isfinite(self.best[0]) else []
        return f"L({', '.join(self.names)}) = {' + '.join([*floor, *terms])}"


def fit_law(
    sizes: Mapping[str, np.ndarray],
    losses: np.ndarray,
    *,
    has_floor: bool = True,
    noise: float = 0.0,
    num_draws: int = 400,
    seed: int = 0,
) -> Law:
    """Fit the losses `[runs]` of runs with sizes `[runs]`; `has_floor` for a law with E.

    There must be more runs than parameters, since the residuals give the scale of their noise. If
    losses are means of runs, `noise` is the standard deviation of the logarithm of one of them.
    """
    logs = np.log(np.stack([*sizes.values()]))
    centers = logs.mean(axis=1)
    logs -= centers[:, None]
    targets, grid = np.log(losses), []
    for powers in itertools.product(_EXPONENTS, repeat=len(logs)):  # The law is linear in the rest.
        floor = np.full((1, len(losses)), float(has_floor))
        columns = np.concatenate([floor, np.exp(-np.array(powers)[:, None] * logs)]) / losses
        factors, residual = nnls(columns.T, np.ones(len(losses)))
        scales = np.log(np.maximum(factors, 1e-3 * losses.min()))
        grid.append((residual, scales[0] if has_floor else -np.inf, *scales[1:], *powers))
    starts = (_solve(np.array(start), logs, targets) for _, *start in sorted(grid)[:3])
    best = min(starts, key=lambda solved: solved[0])[1]
    fitted, random = _log_loss(best, logs), np.random.default_rng(seed)
    degrees = len(losses) - np.isfinite(best).sum()
    scales = np.sqrt(np.square(targets - fitted).sum() / random.chisquare(degrees, num_draws))
    noises = random.standard_normal((num_draws, len(losses) + 1))
    targets = [fitted + scale * row[1:] for scale, row in zip(scales, noises, strict=True)]
    draws = np.stack([_solve(best, logs, target)[1] for target in targets])
    return Law(tuple(sizes), centers, best, draws, np.hypot(scales, noise) * noises[:, 0])


def _log_terms(parameters: np.ndarray, logs: np.ndarray) -> np.ndarray:
    """Return the logarithm of each term of the law, `[1 + sizes, runs]`."""
    scales, powers = np.split(parameters[1:, None], 2)
    return np.concatenate([np.full((1, logs.shape[1]), parameters[0]), scales - powers * logs])


def _log_loss(parameters: np.ndarray, logs: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(_log_terms(parameters, logs))


def _solve(start: np.ndarray, logs: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the least Huber loss near a start and its parameters; log E = -inf stays."""
    num, first = len(logs), int(not np.isfinite(start[0]))
    low, high = targets.min() - _LOG_RANGE, targets.max() + _LOG_RANGE
    bounds = np.array([(low, targets.min())] + [(low, high)] * num + [(0, _MAX_EXPONENT)] * num).T

    def whole(free: np.ndarray) -> np.ndarray:
        return np.concatenate([start[:first], free])

    def gradient(free: np.ndarray) -> np.ndarray:
        terms = _log_terms(whole(free), logs)
        shares = np.exp(terms - np.logaddexp.reduce(terms))
        return np.concatenate([shares[first:], -shares[1:] * logs]).T

    result: Any = least_squares(
        lambda free: _log_loss(whole(free), logs) - targets,
        np.clip(start, bounds[0] + 1e-9, bounds[1] - 1e-9)[first:],
        gradient,
        bounds=bounds[:, first:],
        loss="huber",
        f_scale=_HUBER_DELTA,
        x_scale="jac",
    )
    return result.cost, whole(result.x)
