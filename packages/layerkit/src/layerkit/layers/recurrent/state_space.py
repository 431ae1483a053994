"""S4D and S5: state-space layers with a fixed diagonal transition, as in Praxis.

    s_t = exp(Δa) s_{t-1} + (exp(Δa) - 1)/a · B x_t        y_t = Re(C s_t) + D x_t

The poles a and the step Δ are not trained. The poles are -1/2 + iω with evenly spaced ω, or those
of the HiPPO matrices LegS and LagT (Gu et al., 2022, arXiv:2206.11893). A row that is split over
devices is scanned by all of them together.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config.checks import check_last_axis, check_positive, check_sizes
from layerkit.layers.attention.cache import Axes
from layerkit.layers.recurrent.token_mixer import State, TokenMixer
from layerkit.ops.recurrence.diagonal_states import diagonal_states


class StateSpace(TokenMixer):
    """Base class of state-space layers with fixed poles.

    Attributes:
      num_states: Number of states, of each channel (S4D) or of all channels together (S5).
      step_size: Step Δ of the discretization.
      poles: `linear` (`ss4d-1d` in Praxis), `legs` or `lagt`.
    """

    num_states: int = 0
    step_size: float = 0.01
    poles: Literal["linear", "legs", "lagt"] = "linear"

    def _check_sizes(self) -> None:
        check_sizes(self, input_dims=self.input_dims, num_states=self.num_states)
        check_positive(self, step_size=self.step_size)

    def _create_complex(
        self, name: str, shape: tuple[int, int], axes: Axes, deviation: float
    ) -> None:
        for part in ("re", "im"):
            weight = WeightHParams(shape, axes, init=WeightInit.Gaussian(deviation))
            self.create_variable(f"{name}_{part}", weight)

    def _complex(self, name: str) -> jax.Array:
        parts = (getattr(self.theta, f"{name}_{part}") for part in ("re", "im"))
        return jax.lax.complex(*(part.astype(jnp.float32) for part in parts))

    def _create_skip(self) -> None:
        ones = WeightInit.Constant(1.0)
        self.create_variable("skip", WeightHParams((self.input_dims,), ("norm",), init=ones))

    def _discretize(self) -> tuple[jax.Array, jax.Array]:
        """Return the transition exp(Δa) and the factor (exp(Δa) - 1)/a, complex64 `[states]`."""
        poles = poles_of(self.poles, self.num_states)
        transition = np.exp(self.step_size * poles)
        factor = (transition - 1) / poles
        return jnp.asarray(transition, jnp.complex64), jnp.asarray(factor, jnp.complex64)


class S4D(StateSpace):
    """S4D: separate diagonal states for each channel (Gu et al., 2022, arXiv:2206.11893).

    B is 1. The fields are those of `StateSpace`.
    """

    state_axes: ClassVar[dict[str, Axes]] = {"state": ("batch", None, "act_mlp")}

    def setup(self) -> None:
        """Create C `[num_states, input_dims]` and D."""
        self._check_sizes()
        self._create_complex("c", (self.num_states, self.input_dims), (None, "mlp"), 0.5**0.5)
        self._create_skip()

    def initial_state(self, batch_size: int) -> State:
        """Return zeros, complex64 `[batch, num_states, input_dims]`."""
        shape = (batch_size, self.num_states, self.input_dims)
        return {"state": jnp.zeros(shape, jnp.complex64)}

    def mix(
        self, x: jax.Array, state: State, *, segments: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """Continue rows `[batch, t, input_dims]`; see `TokenMixer.mix`."""
        check_last_axis(self, x, input_dims=self.input_dims)
        wide = x.astype(jnp.float32)
        transition, factor = (array[:, None] for array in self._discretize())
        states, last = diagonal_states(
            factor * wide[:, :, None], transition, state=state["state"], segments=segments
        )
        read = jnp.sum(self._complex("c") * states, axis=2).real
        return self.cast(read + self.theta.skip * wide), {"state": last}


class S5(StateSpace):
    """S5: one set of diagonal states for all channels (Smith et al., 2023, arXiv:2208.04933).

    The fields are those of `StateSpace`.
    """

    state_axes: ClassVar[dict[str, Axes]] = {"state": ("batch", None)}

    def setup(self) -> None:
        """Create B `[num_states, input_dims]`, C `[input_dims, num_states]` and D."""
        self._check_sizes()
        states, dims = self.num_states, self.input_dims
        self._create_complex("b", (states, dims), (None, "embed"), dims**-0.5)
        self._create_complex("c", (dims, states), ("embed", None), states**-0.5)
        self._create_skip()

    def initial_state(self, batch_size: int) -> State:
        """Return zeros, complex64 `[batch, num_states]`."""
        return {"state": jnp.zeros((batch_size, self.num_states), jnp.complex64)}

    def mix(
        self, x: jax.Array, state: State, *, segments: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """Continue rows `[batch, t, input_dims]`; see `TokenMixer.mix`."""
        check_last_axis(self, x, input_dims=self.input_dims)
        wide = x.astype(jnp.float32)
        transition, factor = self._discretize()
        inputs = wide @ (factor[:, None] * self._complex("b")).T
        states, last = diagonal_states(inputs, transition, state=state["state"], segments=segments)
        read = (states @ self._complex("c").T).real
        return self.cast(read + self.theta.skip * wide), {"state": last}


def poles_of(kind: str, num_states: int) -> np.ndarray:
    """Return the poles of a state-space layer, complex128 `[num_states]`; see `StateSpace.poles`.

    Those of `legs` and `lagt` are the eigenvalues of the normal part of the HiPPO matrix.
    """
    index = np.arange(num_states)
    if kind == "linear":
        return -0.5 + 1j * np.pi * (num_states - 1) * (index / num_states - 0.5)
    if kind == "legs":
        root = np.sqrt(1 + 2 * index)
        matrix = np.diag(index) - np.tril(np.outer(root, root))
        normal = matrix + np.outer(root, root) / 2
        return np.diagonal(normal).mean() + 1j * np.linalg.eigvalsh(-1j * normal)
    normal = 0.5 - np.tril(np.ones((num_states, num_states)))
    return np.diagonal(normal).mean() + 1j * num_states * np.linalg.eigvalsh(-1j * normal)
