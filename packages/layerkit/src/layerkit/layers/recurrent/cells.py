"""Recurrent cells: the weights and one step of an LSTM or a GRU.

A cell multiplies the inputs of all steps by `w` at once (`project_inputs`); a step then has one
product, of the previous output and `recurrent`. Both hold all gates on an axis of their own, so
that a mesh splits the units of every gate alike.

`layerkit.layers.recurrent.frnn` runs a cell over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_last_axis, check_positive, check_rates, check_sizes
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.dots import Dot, create_dot, matmul, merge_tokens
from layerkit.layers.recurrent.token_mixer import State

Step = Callable[[State, jax.Array, jax.Array | None], State]
"""A function of a state, projected inputs `[batch, gates, units]` and a random key."""

_OUTPUT = {"output": ("batch", "act_embed")}
_GATES = ("embed", None, "mlp")


class BaseRnnCell(BaseLayer):
    """The base class of cells. A subclass defines `make_step` and calls `_create_gates` in `setup`.

    Attributes:
      input_dims: Size of the inputs.
      output_dims: Size of the outputs.
      zoneout_rate: Probability that training keeps a unit of the state as it was; evaluation
        weights the old and the new value by it (Krueger et al., 2017, arXiv:1606.01305).
      bias_init: Initializer of the biases.
      dot_tpl: `Dot` that multiplies inputs by `w`; None for the plain product.
    """

    state_axes: ClassVar[dict[str, tuple[str, str]]] = _OUTPUT
    """Logical axes of each array of the state; `output` is the output of the last step."""

    input_dims: int = 0
    output_dims: int = 0
    zoneout_rate: float = 0.0
    bias_init: WeightInit = WeightInit.Constant(0.0)
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def _create_gates(self, num_gates: int, units: int) -> None:
        """Check the fields and create `w`, `recurrent` `[in, gates, units]` and their bias."""
        check_sizes(self, input_dims=self.input_dims, output_dims=self.output_dims)
        check_rates(self, zoneout_rate=self.zoneout_rate)
        for name, dims in {"w": self.input_dims, "recurrent": self.output_dims}.items():
            weight = WeightHParams(
                (dims, num_gates, units),
                _GATES,
                fan_in_dims=(0,),
                fan_out_dims=(1, 2),
                parts=(-2, (1,) * num_gates),
            )
            self.create_variable(name, weight, is_factor=True)
            if name == "w":
                create_dot(self, weight)
        self._create_of_units("b", (num_gates, units), init=self.bias_init)

    def _create_of_units(self, name: str, shape: tuple[int, int], *, init: WeightInit) -> None:
        """Create a weight `[gates, units]` that weight decay spares."""
        weight = WeightHParams(shape, (None, "mlp"), init=init, decays=False)
        self.create_variable(name, weight)

    def make_step(self) -> Step:
        """Return the step as a function of arrays, which a scan may call."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define make_step")

    def initial_state(self, batch_size: int) -> State:
        """Return the state of `batch_size` rows before their first step, zeros."""
        zeros = {"output": jnp.zeros((batch_size, self.output_dims), self.compute_dtype)}
        return self.constrain_state(zeros)

    def constrain_state(self, state: State) -> State:
        """Return a state `[batch, units]` in the layout of the states."""
        return {name: self.constrain(x, *self.state_axes[name]) for name, x in state.items()}

    def project_inputs(self, x: jax.Array) -> jax.Array:
        """Multiply `[…, input_dims]` by the weights of all gates: `[…, gates, units]`."""
        check_last_axis(self, x, input_dims=self.input_dims)
        x, w = self.cast(x), self.theta.w
        if self.dot_tpl is None:
            # Without merging gates and units, of which a mesh splits the latter.
            projected = jnp.einsum("...i,igu->...gu", merge_tokens(self, x), w)
        else:
            projected = matmul(self, x, w.reshape(self.input_dims, -1))
        return projected.reshape(*x.shape[:-1], *w.shape[1:])

    def fprop(self, x: jax.Array, state: State) -> tuple[jax.Array, State]:
        """Run one step.

        Args:
          x: Inputs `[batch, input_dims]`.
          state: State before the step, from `initial_state` or another step.

        Returns:
          (outputs `[batch, output_dims]`, state after the step).
        """
        key = self.next_prng_key() if self.draws else None
        state = self.make_step()(state, self.project_inputs(x), key)
        return state["output"], state

    @property
    def draws(self) -> bool:
        """True if a step needs a random key, for zoneout in training."""
        return self.zoneout_rate > 0 and self.is_training

    def _recurrent(self) -> Callable[[jax.Array], jax.Array]:
        """Return the product of `[batch, output_dims]` and `recurrent`: `[batch, gates, units]`."""
        # Gathered over fsdp once, before the steps.
        w = self.constrain(self.theta.recurrent, None, None, "act_mlp", gradient_axes=_GATES)
        return lambda output: jnp.einsum("bo,ogu->bgu", output, w)

    def _zoneout(self, before: State, after: State, key: jax.Array | None) -> State:
        """Return the state after a step, of which some units stay as they were."""
        rate, mixed = self.zoneout_rate, {}
        if not rate:
            return after
        for index, (name, x) in enumerate(after.items()):
            kept: Any = rate
            if key is not None:
                kept = jax.random.bernoulli(jax.random.fold_in(key, index), rate, x.shape)
            mixed[name] = (kept * before[name] + (1 - kept) * x).astype(x.dtype)
        return mixed


class LstmCell(BaseRnnCell):
    """A long short-term memory cell (Hochreiter and Schmidhuber, 1997; Gers et al., 2000).

        candidate, input, forget, output = w·x + recurrent·h + b    gates
        c = σ(forget)·c + σ(input)·tanh(candidate)
        h = σ(output)·tanh(c)

    The state is `output` h `[batch, output_dims]` and `cell` c, float32 `[batch, units]`. The other
    fields are those of `BaseRnnCell`.

    Attributes:
      hidden_dims: Number of units, whose h a weight `projection` maps to `output_dims` (Sak et al.,
        2014, arXiv:1402.1128); None for `output_dims` units without a projection.
      couples_gates: True for 1 - σ(forget) in the place of the input gate, which is then absent
        (CIFG; Greff et al., 2017, arXiv:1503.04069).
      uses_layer_norm: True to normalize each gate over its units before the bias, with a scale
        (Ba et al., 2016, arXiv:1607.06450).
      layer_norm_epsilon: Added to the variance of that norm.
      forget_gate_bias: Added to the forget gate.
      cell_value_cap: Bound of the absolute values of c; None for no bound.
      output_nonlinearity: False for h = σ(output)·c.
    """

    used_only_if: ClassVar[Conditions] = {"layer_norm_epsilon": "uses_layer_norm"}
    state_axes = _OUTPUT | {"cell": ("batch", "act_mlp")}

    hidden_dims: int | None = None
    couples_gates: bool = False
    uses_layer_norm: bool = False
    layer_norm_epsilon: float = 1e-8
    forget_gate_bias: float = 0.0
    cell_value_cap: float | None = 10.0
    output_nonlinearity: bool = True

    def setup(self) -> None:
        """Create the weights of the gates, the scale of their norms and the projection."""
        check_sizes(self, hidden_dims=self.hidden_dims)
        check_positive(self, cell_value_cap=self.cell_value_cap)
        check_positive(self, layer_norm_epsilon=self.layer_norm_epsilon)
        shape = (4 - self.couples_gates, self.hidden_dims or self.output_dims)
        self._create_gates(*shape)
        if self.uses_layer_norm:
            self._create_of_units("scale", shape, init=WeightInit.Constant(1.0))
        if self.hidden_dims is not None:
            weight = WeightHParams((self.hidden_dims, self.output_dims), ("mlp", "embed"))
            self.create_variable("projection", weight, is_factor=True)

    def initial_state(self, batch_size: int) -> State:
        """Return the state of `batch_size` rows before their first step, zeros."""
        # A sum over all steps, which bfloat16 would round.
        cell = jnp.zeros((batch_size, self.hidden_dims or self.output_dims), jnp.float32)
        return super().initial_state(batch_size) | self.constrain_state({"cell": cell})

    def make_step(self) -> Step:
        """Return the step as a function of arrays, which a scan may call."""
        theta, recurrent, cap = self.theta, self._recurrent(), self.cell_value_cap
        bias, scale = theta.b, theta.scale if self.uses_layer_norm else None
        projection = theta.projection if self.hidden_dims is not None else None
        shift = jnp.zeros((4 - self.couples_gates, 1)).at[-2].set(self.forget_gate_bias)

        def step(state: State, projected: jax.Array, key: jax.Array | None) -> State:
            gates = projected.astype(jnp.float32) + recurrent(state["output"])
            if scale is not None:
                centered = gates - jnp.mean(gates, axis=-1, keepdims=True)
                variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
                gates = centered * jax.lax.rsqrt(variance + self.layer_norm_epsilon) * scale
            gates = gates + bias + shift
            squashed = jax.nn.sigmoid(gates[:, 1:])
            forget, output = squashed[:, -2], squashed[:, -1]
            enters = 1.0 - forget if self.couples_gates else squashed[:, 0]
            cell = forget * state["cell"] + enters * jnp.tanh(gates[:, 0])
            if cap is not None:
                cell = jnp.clip(cell, -cap, cap)
            hidden = self.cast(output * (jnp.tanh(cell) if self.output_nonlinearity else cell))
            if projection is not None:
                hidden = hidden @ projection
            return self._zoneout(state, self.constrain_state({"output": hidden, "cell": cell}), key)

        return step


class GruCell(BaseRnnCell):
    """A gated recurrent unit (Cho et al., 2014, arXiv:1406.1078), as cuDNN and PyTorch compute it.

        reset, update = σ(w·x + recurrent·h + b)    gates
        candidate = tanh(w·x + b + reset·(recurrent·h + recurrent_b))
        h = (1 - update)·candidate + update·h

    The state is `output` h `[batch, output_dims]`. The fields are those of `BaseRnnCell`.
    """

    def setup(self) -> None:
        """Create the weights of the gates and the bias of the reset candidate."""
        self._create_gates(3, self.output_dims)
        self._create_of_units("recurrent_b", (1, self.output_dims), init=self.bias_init)

    def make_step(self) -> Step:
        """Return the step as a function of arrays, which a scan may call."""
        recurrent, bias, recurrent_bias = self._recurrent(), self.theta.b, self.theta.recurrent_b

        def step(state: State, projected: jax.Array, key: jax.Array | None) -> State:
            before = state["output"].astype(jnp.float32)
            from_input = projected.astype(jnp.float32) + bias
            from_state = recurrent(state["output"]).astype(jnp.float32)
            reset, update = jax.nn.sigmoid(from_input[:, :2] + from_state[:, :2]).swapaxes(0, 1)
            candidate = jnp.tanh(from_input[:, 2] + reset * (from_state[:, 2] + recurrent_bias[0]))
            output = self.cast((1.0 - update) * candidate + update * before)
            return self._zoneout(state, self.constrain_state({"output": output}), key)

        return step
