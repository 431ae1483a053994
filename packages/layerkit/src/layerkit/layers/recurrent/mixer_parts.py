"""Parts of linear attention layers: short convolution, time steps and gated norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_divisible, check_non_negative, check_sizes, require
from layerkit.layers.basic.elementwise import BaseActivation, SiLU
from layerkit.layers.basic.normalizations import mean_square
from layerkit.ops.recurrence.causal_convolution import causal_convolution


class CausalConvolution(BaseLayer):
    """A depth-wise causal convolution of `[batch, length, num_heads, head_dim]` by documents.

    Attributes:
      num_heads: Number of heads.
      head_dim: Channels of a head.
      width: Number of tokens that a token reads, itself included.
      use_bias: True to add `b` `[num_heads, head_dim]`, which starts at 0.
      weight_axes: Logical axes of `w` `[width, num_heads, head_dim]`.
      weight_init: Initializer of `w`; None to draw uniformly within ±1/√width.
    """

    num_heads: int = 0
    head_dim: int = 0
    width: int = 4
    use_bias: bool = False
    weight_axes: tuple[str | None, ...] = (None, "heads", "head_dim")
    weight_init: WeightInit | None = None

    def setup(self) -> None:
        """Check the fields and create the weights."""
        check_sizes(self, num_heads=self.num_heads, head_dim=self.head_dim, width=self.width)
        shape = (self.width, self.num_heads, self.head_dim)
        init = self.weight_init or WeightInit.Uniform(self.width**-0.5)
        self.create_variable("w", WeightHParams(shape, self.weight_axes, init=init))
        if self.use_bias:
            zeros = WeightInit.Constant(0.0)
            self.create_variable("b", WeightHParams(shape[1:], self.weight_axes[1:], init=zeros))

    def fprop(
        self, x: jax.Array, history: jax.Array, *, segments: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (outputs, history `[batch, width - 1, …]`); see `causal_convolution`."""
        x, w = self.cast(x), self.theta.w
        outputs, history = causal_convolution(x, w, history=history, segments=segments)
        return (outputs + self.theta.b if self.use_bias else outputs), history


class TimeSteps(BaseLayer):
    """Time steps softplus(x + bias) and the log decay -exp(log_rate) · step of a state.

    It computes in float32. The rates of heads start evenly spaced, and the steps of zeros evenly
    spaced on a log scale, in an order that is independent of the rates.

    Attributes:
      fprop_dtype: Dtype of the computation.
      num_heads: Number of heads.
      channels: Number of steps of a head: 1, or that of the key's coordinates.
      limits: Smallest and largest step; None for no limits.
      initial_rates: Range of exp(log_rate) at the start.
      initial_steps: Range of the steps of zeros at the start.
    """

    fprop_dtype: Any = jnp.float32
    num_heads: int = 0
    channels: int = 1
    limits: tuple[float, float] | None = None
    initial_rates: tuple[float, float] = (1.0, 16.0)
    initial_steps: tuple[float, float] = (0.001, 0.1)

    def setup(self) -> None:
        """Create `log_rate` `[num_heads]` and `bias` `[num_heads, channels]`."""
        check_sizes(self, num_heads=self.num_heads, channels=self.channels)
        for name in ("initial_rates", "initial_steps"):
            low, high = getattr(self, name)
            require(0 < low <= high, self, name, (low, high), "two positive numbers in order")
        low, high = self.limits or (0.0, 1.0)
        require(0 <= low < high, self, "limits", self.limits, "two numbers in order, from 0")
        heads = np.arange(self.num_heads)
        rates = np.interp(heads, [0, max(self.num_heads - 1, 1)], self.initial_rates)
        # Multiples of the golden ratio are evenly spread, however many there are.
        steps = np.exp(np.interp(heads * 0.6180339887 % 1, [0, 1], np.log(self.initial_steps)))
        log_rates, biases = np.log(rates), steps + np.log(-np.expm1(-steps))
        log_rate = WeightHParams(
            (self.num_heads,), ("heads",), init=WeightInit.Constant(tuple(log_rates.tolist()))
        )
        self.create_variable("log_rate", log_rate)
        shape, init = (self.num_heads, self.channels), WeightInit.Constant(tuple(biases.tolist()))
        self.create_variable("bias", WeightHParams(shape, ("heads", None), init=init))

    def fprop(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return steps and log decays, float32 `[batch, length, num_heads, channels]` as `x`."""
        steps = jax.nn.softplus(self.cast(x) + self.theta.bias)
        if self.limits is not None:
            steps = jnp.clip(steps, *self.limits)
        return steps, -jnp.exp(self.theta.log_rate)[:, None] * steps


class GatedNorm(BaseLayer):
    """RMS normalization of the outputs of heads `[batch, length, num_heads, dims]`, with a gate.

        norm(x) · activation(gate)     or, with `gate_first`, norm(x · activation(gate))

    Attributes:
      num_heads: Number of heads.
      dims: Size of a head.
      num_groups: Number of groups of heads that are normalized together, with a scale for each
        coordinate; None to normalize each head, with one scale `[dims]` for all heads.
      epsilon: ε, which is added to the mean square.
      gate_first: True to normalize the gated outputs.
      activation_tpl: Activation of the gate.
    """

    num_heads: int = 0
    dims: int = 0
    num_groups: int | None = None
    epsilon: float = 1e-6
    gate_first: bool = False
    activation_tpl: Config[BaseActivation] = sub_config_field(SiLU.HParams)

    def setup(self) -> None:
        """Create the scale."""
        check_sizes(self, num_heads=self.num_heads, dims=self.dims, num_groups=self.num_groups)
        check_non_negative(self, epsilon=self.epsilon)
        shape: tuple[int, ...] = (self.dims,)
        if self.num_groups is not None:
            check_divisible(self, by=("num_groups", self.num_groups), num_heads=self.num_heads)
            shape = (self.num_heads, self.dims)
        axes = ("heads", "norm")[-len(shape) :]
        self.create_variable("scale", WeightHParams(shape, axes, init=WeightInit.Constant(1.0)))
        self.create_child("activation", self.activation_tpl, fprop_dtype=jnp.float32)

    def fprop(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Return `[batch, length, num_heads, dims]` of outputs and gate of that shape."""
        wide = x.astype(jnp.float32)
        if self.gate_first:
            wide = self.activation.gate(gate, wide)
        groups = self.num_groups or self.num_heads
        square = mean_square(wide.reshape(*x.shape[:2], groups, -1))
        square = jnp.repeat(square, self.num_heads // groups, axis=2)
        wide = wide * jax.lax.rsqrt(square + self.epsilon) * self.theta.scale.astype(jnp.float32)
        return self.cast(wide if self.gate_first else self.activation.gate(gate, wide))
