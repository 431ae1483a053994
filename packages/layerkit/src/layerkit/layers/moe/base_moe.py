"""What layers of experts share: their weights, their products and the experts of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from layerkit.base.base_layer import BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import (
    check_divisible,
    check_integers,
    check_last_axis,
    check_positive,
    check_sizes,
)
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.dots import Dot, add_bias, batched_matmul, create_dot
from layerkit.layers.basic.elementwise import BaseActivation, Dropout, SiLU
from layerkit.layers.basic.linears import Linear
from layerkit.layers.moe.routing import BaseRouter
from layerkit.layers.transformer.transformer import TransformerFeedForward

_WIDEN, _NARROW = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
WEIGHT_AXES = {
    "up": _WIDEN,
    "gate": _WIDEN,
    "down": _NARROW,
    "up_bias": ("expert", "mlp"),
    "gate_bias": ("expert", "mlp"),
    "down_bias": ("expert", "embed"),
}
"""Logical axes of the weights of experts by name."""

PRODUCTS = ("up", "gate", "down")
"""Names of the weights that rows are multiplied by."""

# (rows of each expert, name of a weight) → product, with the bias of that name
Product = Callable[[jax.Array, str], jax.Array]


class BaseMoeFeedForward(BaseLayer):
    """A feed-forward layer with the output Σ weight · expert(x) over some experts of each token.

    Each expert computes what a `TransformerFeedForward` does, which this layer can replace. Inputs
    and outputs are `[batch, length, input_dims]`. A subclass says in `mix_experts` which experts a
    token reaches.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the wide dimension of one expert.
      num_experts: Number of experts.
      use_gate: Multiplies the wide activation by a second projection (SwiGLU with SiLU).
      gate_limit: Bound of both projections before the activation: from above of the one that is
        activated, on both sides of the other (gpt-oss: 7.0); None for no bound. It requires
        `use_gate`.
      up_offset: Number that is added to the projection that is not activated (gpt-oss: 1.0). It
        requires `use_gate`.
      use_bias: Adds biases `up_bias`, `gate_bias` and `down_bias`, `[num_experts, …]`.
      activation_tpl: Activation function.
      router_tpl: Router, which chooses experts or tokens, and their weights; child `router`.
      dropout_rate: Dropout rate of the hidden activations of experts in training.
      capacity_factor: An expert has int(S·capacity_factor/num_experts) slots for a group of S
        tokens, rounded up to a multiple of 4; None for no limit.
      num_groups: Number of groups of a batch, each with separate slots at every expert; None for
        one per row.
      num_shared_experts: Number of experts that all tokens use. They are one child `shared` with
        num_shared_experts · hidden_dims (DeepSeekMoE; Dai et al., 2024, arXiv:2401.06066), or with
        the `hidden_dims` of `shared_tpl`.
      use_shared_gate: Multiplies the shared experts by sigmoid(x·w), w in the child `shared_gate`
        (Qwen 2 MoE).
      shared_tpl: The shared experts, with the activation and gate of the other experts; they have
        no limit, offset or bias.
      router_z_weight: Weight of the router's z-loss; 0 for none.
      weight_init: Initializer of `up` and `gate`, with the fans of one expert; None inherits
        `params_init`.
      down_init: Initializer of `down`; None for `weight_init`.
      dot_tpl: Implementation of the products with the weights of the experts; None for the plain
        product.
    """

    used_only_if: ClassVar[Conditions] = {
        "gate_limit": "use_gate",
        "up_offset": "use_gate",
        "shared_tpl": "num_shared_experts",
        "use_shared_gate": "num_shared_experts",
    }

    input_dims: int = 0
    hidden_dims: int = 0
    num_experts: int = 0
    use_gate: bool = True
    gate_limit: float | None = None
    up_offset: float = 0.0
    use_bias: bool = False
    activation_tpl: Config[BaseActivation] = sub_config_field(SiLU.HParams)
    router_tpl: Config[BaseRouter] = sub_config_field(BaseRouter.HParams)
    dropout_rate: float = 0.0
    capacity_factor: float | None = None
    num_groups: int | None = None
    num_shared_experts: int = 0
    use_shared_gate: bool = False
    shared_tpl: Config[BaseLayer] = sub_config_field(TransformerFeedForward.HParams)
    router_z_weight: float = 0.001
    weight_init: WeightInit | None = None
    down_init: WeightInit | None = None
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Check the fields and create weights and children."""
        sizes = {"input_dims": self.input_dims, "num_experts": self.num_experts}
        check_sizes(self, **sizes, hidden_dims=self.hidden_dims, num_groups=self.num_groups)
        check_positive(self, gate_limit=self.gate_limit, capacity_factor=self.capacity_factor)
        check_integers(self, minimum=0, num_shared_experts=self.num_shared_experts)
        self.create_child("router", self.router_tpl, **sizes, **self._router_fields())
        self.create_child("activation", self.activation_tpl)
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        for name in self._weight_names():
            weight = self._weight(name)
            is_factor = not name.endswith("_bias")
            self.create_variable(name, weight, is_factor=is_factor)
            if is_factor:
                create_dot(self, weight, name=name)
        if self.num_shared_experts:
            self._create_shared_experts()

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Compute the outputs `[batch, length, input_dims]` of the experts.

        Args:
          x: Activations `[batch, length, input_dims]`.
          is_token: bool `[batch, length]`, False for padding, which reaches the shared experts
            only, has no slot, and counts in no loss.

        Raises:
          ConfigError: The size of the last axis of the inputs is not `input_dims`, or the inputs
            cannot be split into groups.
        """
        check_last_axis(self, x, input_dims=self.input_dims)
        x = self.cast(x)
        output = self.mix_experts(x, is_token)
        if self.num_shared_experts:
            output = output + self._shared_output(x)
        return self.constrain(output, "batch", "residual_length", "act_embed")

    def mix_experts(self, x: jax.Array, is_token: jax.Array | None) -> jax.Array:
        """Compute the weighted sum `[batch, length, input_dims]` of the outputs of experts."""
        raise NotImplementedError(f"{type(self).__qualname__} does not define mix_experts")

    def _router_fields(self) -> dict[str, Any]:
        """Return the fields of the router besides its sizes."""
        return {}

    def _count_groups(self, x: jax.Array) -> int:
        num_groups = x.shape[0] if self.num_groups is None else self.num_groups
        num_tokens = x.shape[0] * x.shape[1]
        check_divisible(self, by=("num_groups", num_groups), tokens_per_batch=num_tokens)
        return num_groups

    def _run_on_expert_devices(
        self, rows: jax.Array, compute: Callable[..., jax.Array]
    ) -> jax.Array:
        """Run `compute` on rows `[groups, experts, capacity, dims]`, sharded by experts.

        The partitioner implements the two changes of sharding by all-to-all.
        """
        groups, experts, capacity, dims = rows.shape
        at_tokens = ("batch", None, None, "act_embed")
        at_experts = ("expert", "expert_batch", None, "act_embed")
        sharding = self.inherited("sharding")
        if sharding is not None:
            sharding.spec(at_tokens, shape=rows.shape, owner=f"{self.path_name}: groups of tokens")
        rows = self.constrain(rows, *at_tokens)
        rows = self.constrain(rows.swapaxes(0, 1), *at_experts)
        outputs = compute(rows.reshape(experts, groups * capacity, dims))
        outputs = self.constrain(outputs.reshape(experts, groups, capacity, dims), *at_experts)
        return self.constrain(outputs.swapaxes(0, 1), *at_tokens)

    def _run_experts(self, rows: jax.Array) -> jax.Array:
        """Apply each expert to its rows of `[experts, rows, dims]`."""
        hidden_axes = ("expert", "expert_batch", "act_mlp")

        def product(rows: jax.Array, name: str) -> jax.Array:
            output = batched_matmul(self, rows, getattr(self.theta, name), name=name)
            if self.use_bias:
                output = add_bias(output, getattr(self.theta, f"{name}_bias")[:, None])
            return output if name == "down" else self.constrain(output, *hidden_axes)

        return self._expert(rows, product, self.activation, self.dropout)

    def _expert(
        self,
        rows: jax.Array,
        product: Product,
        activation: BaseActivation,
        dropout: Callable[[jax.Array], jax.Array] = lambda hidden: hidden,
    ) -> jax.Array:
        """Compute down(h) `[..., rows, dims]` of rows `[..., rows, dims]`.

        h = activation(up(x)), or h = activation(gate(x)) · (up(x) + up_offset) with a gate.
        """
        hidden = product(rows, "up")
        if self.use_gate:
            gate, limit = product(rows, "gate"), self.gate_limit
            hidden = activation.gate(gate, hidden, limit=limit, offset=self.up_offset)
        else:
            hidden = activation(hidden)
        return product(dropout(hidden), "down")

    def _shared_output(self, x: jax.Array) -> jax.Array:
        output = self.shared(x)
        return jax.nn.sigmoid(self.shared_gate(x)) * output if self.use_shared_gate else output

    def _weight_names(self) -> tuple[str, ...]:
        """Return the names of the weights of an expert, biases last."""
        names = PRODUCTS if self.use_gate else ("up", "down")
        return (*names, *(f"{name}_bias" for name in names)) if self.use_bias else names

    def _weight(self, name: str) -> WeightHParams:
        sizes = {"expert": self.num_experts, "embed": self.input_dims, "mlp": self.hidden_dims}
        axes = WEIGHT_AXES[name]
        shape = tuple(sizes[axis] for axis in axes)
        if name.endswith("_bias"):
            return WeightHParams(shape, axes, init=WeightInit.Constant(0.0))
        init = self.weight_init
        if name == "down" and self.down_init is not None:
            init = self.down_init
        return WeightHParams(shape, axes, init=init, fan_in_dims=(1,), fan_out_dims=(2,))

    def _create_shared_experts(self) -> None:
        size = self.shared_tpl.hidden_dims or self.num_shared_experts * self.hidden_dims
        self.create_child(
            "shared",
            self.shared_tpl,
            input_dims=self.input_dims,
            hidden_dims=size,
            use_gate=self.use_gate,
            activation_tpl=self.activation_tpl,
        )
        if self.use_shared_gate:
            gate: Config = Linear.HParams.config(
                input_dims=self.input_dims, output_dims=1, weight_axes=("embed", None)
            )
            self.create_child("shared_gate", gate)
