"""A feed-forward layer of many experts, of which each token uses a few.

Two methods of dispatch share routing, weights and losses:

- *dropless* (the default): every token reaches its experts, in groups of rows of any size
  (`layerkit.ops.moe.dropless`);
- *capacity*: each expert has a fixed number of slots. The output of choices without a slot is zero,
  so that only the residual remains (`layerkit.ops.moe.capacity`).

A capacity applies in training only, unless `capacity_in_evaluation` is set. Evaluation and decoding
drop no choices: the output of a token must not depend on other tokens, and cached steps must give
the outputs of whole rows.

With `ExpertChoiceRouter` experts choose tokens, in evaluation as in training, and no model with
such a layer decodes with a cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import CACHE, BaseLayer
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field, target_of
from layerkit.config.checks import (
    check_choice,
    check_divisible,
    check_integers,
    check_last_axis,
    check_positive,
    check_sizes,
    require,
)
from layerkit.config.field_checks import Conditions
from layerkit.errors import ConfigError
from layerkit.layers.basic.activations import BaseActivation, SiLU
from layerkit.layers.basic.dots import (
    Dot,
    add_bias,
    batched_matmul,
    create_dot,
    grouped_arrays,
    grouped_matmul,
)
from layerkit.layers.basic.dropout import Dropout
from layerkit.layers.basic.linears import Linear
from layerkit.layers.moe.experts import (
    OUTPUT_BIAS,
    PRODUCTS,
    WEIGHT_AXES,
    ExpertFunction,
    weight_names,
)
from layerkit.layers.moe.losses import expert_load, report_load_balance, report_router_z
from layerkit.layers.moe.routing import ExpertChoiceRouter, Routing, TopKRouter
from layerkit.layers.transformer.feed_forward import TransformerFeedForward
from layerkit.ops.moe.capacity import capacity_of, capacity_slots
from layerkit.ops.moe.exchange import EXCHANGES
from layerkit.ops.moe.expert_parallel import Dropless, run_on_mesh
from layerkit.ops.moe.grouped_matmul import IMPLEMENTATIONS, RowsProduct, select_grouped_matmul
from layerkit.ops.moe.slots import from_slots, to_slots, weighted, weighted_sum
from layerkit.ops.remat import save_inputs

_LOG = logging.getLogger(__name__)

# Largest number of experts whose loads are all reported. Beyond it, only the extremes are.
_MAX_LOAD_SUMMARIES = 64
# Fields without an effect if experts choose tokens, which balances their load.
_FIELDS_OF_TOKEN_CHOICE = (
    "num_experts_per_token",
    "grouped_matmul",
    "expert_exchange",
    "capacity_in_evaluation",
    "load_balance_weight",
    "balance_all_choices",
    "balance_per_group",
)


class MoeFeedForward(BaseLayer):
    """A feed-forward layer with the output Σ weight · expert(x) over the experts of each token.

    Each expert computes what a `TransformerFeedForward` does, which this layer can replace. Inputs
    and outputs are `[batch, length, input_dims]`.

    Attributes:
      input_dims: Size of the model dimension.
      hidden_dims: Size of the wide dimension of one expert.
      num_experts: Number of experts.
      num_experts_per_token: Number of experts that each token uses.
      use_gate: Multiplies the wide activation by a second projection (SwiGLU with SiLU).
      gate_limit: Bound of both projections before the activation: from above of the one that is
        activated, on both sides of the other (gpt-oss: 7.0); None for no bound. It requires
        `use_gate`.
      up_offset: Number that is added to the projection that is not activated (gpt-oss: 1.0). It
        requires `use_gate`.
      use_bias: Adds biases `up_bias`, `gate_bias` and `down_bias`, `[num_experts, …]`.
      activation_tpl: Activation function.
      router_tpl: Router, which chooses experts and their weights; child `router`. A
        `TopKRouter`, or an `ExpertChoiceRouter`, which requires a capacity.
      dropout_rate: Dropout rate of the hidden activations of experts in training. It requires a
        capacity.
      capacity_factor: None for dropless. Otherwise an expert has int(S·capacity_factor/num_experts)
        slots in training, rounded up to a multiple of 4, for a group of S tokens. Balanced routing
        fills them at a factor of num_experts_per_token. An expert that chooses tokens has as many
        slots in evaluation.
      capacity_in_evaluation: True to apply the capacity in evaluation too, as Pax does, so that
        results depend on the other tokens of a group. Decoding with a cache has no capacity.
      num_groups: Number of groups of a batch with a capacity, each with separate slots; None for
        one per row.
      grouped_matmul: Implementation of the products without a capacity, and of evaluation with a
        capacity; see `layerkit.ops.moe.grouped_matmul`.
      expert_exchange: Exchange of tokens without a capacity, and in evaluation with a capacity,
        where a mesh splits the experts: `ragged_all_to_all`, `all_gather` or `auto`; see
        `layerkit.ops.moe.expert_parallel`. `auto` selects the one that moves fewer rows.
      exchange_buffer_factor: None for buffers that hold all rows that a device can receive by
        `ragged_all_to_all`: devices · tokens · min(num_experts_per_token, experts per device), of
        which balanced routing fills a small part. A number bounds them, in training, by
        exchange_buffer_factor · tokens · num_experts_per_token rows; tokens are those of a device.
        Choices beyond the bound add nothing and count in the summary `fraction_dropped`.
      num_shared_experts: Number of experts that all tokens use. They are one child `shared` with
        num_shared_experts · hidden_dims (DeepSeekMoE; Dai et al., 2024, arXiv:2401.06066).
      use_shared_gate: Multiplies the shared experts by sigmoid(x·w), w in the child `shared_gate`
        (Qwen 2 MoE).
      shared_tpl: The shared experts, with the activation and gate of the other experts; they have
        no limit, offset or bias.
      load_balance_weight: Weight of the load-balancing loss, see `layerkit.layers.moe.losses`; 0
        for none.
      balance_all_choices: Balances all choices of a token instead of the first choice.
      balance_per_group: In training, computes the load-balancing loss of each of the groups and
        averages it (GShard), instead of once for the batch (Switch). It requires a capacity.
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
        "capacity_in_evaluation": "capacity_factor",
        "num_groups": "capacity_factor",
        "dropout_rate": "capacity_factor",
        "balance_per_group": "capacity_factor",
        "exchange_buffer_factor": "not capacity_factor",
        "shared_tpl": "num_shared_experts",
        "use_shared_gate": "num_shared_experts",
    }

    input_dims: int = 0
    hidden_dims: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 2
    use_gate: bool = True
    gate_limit: float | None = None
    up_offset: float = 0.0
    use_bias: bool = False
    activation_tpl: Config[BaseActivation] = sub_config_field(SiLU.HParams)
    router_tpl: Config[BaseLayer] = sub_config_field(TopKRouter.HParams)
    dropout_rate: float = 0.0
    capacity_factor: float | None = None
    capacity_in_evaluation: bool = False
    num_groups: int | None = None
    grouped_matmul: str = "auto"
    expert_exchange: str = "auto"
    exchange_buffer_factor: float | None = None
    num_shared_experts: int = 0
    use_shared_gate: bool = False
    shared_tpl: Config[BaseLayer] = sub_config_field(TransformerFeedForward.HParams)
    load_balance_weight: float = 0.01
    balance_all_choices: bool = False
    balance_per_group: bool = False
    router_z_weight: float = 0.001
    weight_init: WeightInit | None = None
    down_init: WeightInit | None = None
    dot_tpl: Config[Dot] | None = sub_config_field(None)

    def setup(self) -> None:
        """Check the fields and create weights and children."""
        check_sizes(
            self,
            input_dims=self.input_dims,
            hidden_dims=self.hidden_dims,
            num_experts=self.num_experts,
        )
        self._check_fields()
        sizes = {"input_dims": self.input_dims, "num_experts": self.num_experts}
        if not self._experts_choose:
            sizes["num_experts_per_token"] = self.num_experts_per_token
        self.create_child("router", self.router_tpl, **sizes)
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
        if self._experts_choose:
            output = self._run_expert_choice(x, is_token)
        else:
            output = self._run_token_choice(x, is_token)
        if self.num_shared_experts:
            output = output + self._shared_output(x)
        return self.constrain(output, "batch", "residual_length", "act_embed")

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Check that cached steps give the outputs of whole rows; there is no cache to create.

        Raises:
          ConfigError: Experts choose tokens, which depends on later tokens.
        """
        del batch_size, max_length
        if self._experts_choose:
            raise ConfigError(
                "cannot decode with a cache",
                owner=self.path_name,
                field="router_tpl",
                value=ExpertChoiceRouter.__name__,
                expected="a router whose choices do not depend on later tokens",
            )

    @property
    def _experts_choose(self) -> bool:
        router: Any = target_of(self.router_tpl)
        return isinstance(router, type) and issubclass(router, ExpertChoiceRouter)

    def _run_expert_choice(self, x: jax.Array, is_token: jax.Array | None) -> jax.Array:
        num_groups = self._num_groups(x)
        capacity = self._capacity(x, num_groups)
        tokens = x.reshape(num_groups, -1, self.input_dims)
        if is_token is not None:
            is_token = is_token.reshape(num_groups, -1)
        routing = self.router(tokens, capacity=capacity, is_token=is_token)
        report_router_z(self, routing, weight=self.router_z_weight)

        def take(tokens: jax.Array, index: jax.Array) -> jax.Array:
            return tokens.at[index].get(mode="fill", fill_value=0)

        def add(rows: jax.Array, index: jax.Array) -> jax.Array:
            zeros = jnp.zeros(tokens.shape[1:], jnp.float32)
            return zeros.at[index].add(rows, mode="drop")

        rows = jax.vmap(take)(tokens, routing.tokens)
        outputs = self._run_on_expert_devices(rows, self._run_experts)
        # Otherwise the backward pass would keep a float32 copy of the outputs.
        added = save_inputs(weighted)(outputs, routing.weights)
        return self.cast(jax.vmap(add)(added, routing.tokens)).reshape(x.shape)

    def _run_token_choice(self, x: jax.Array, is_token: jax.Array | None) -> jax.Array:
        routing = self.router(x, is_token=is_token)
        in_evaluation = self.capacity_in_evaluation and not self.is_mutable_collection(CACHE)
        has_capacity = self.capacity_factor is not None and (in_evaluation or self.is_training)
        num_groups = self._num_groups(x) if has_capacity else 1
        self._report(routing, num_groups=num_groups if self.balance_per_group else 1)
        if has_capacity:
            capacity = self._capacity(x, num_groups)
            return self._run_with_capacity(x, routing, num_groups=num_groups, capacity=capacity)
        return self._run_dropless(x, routing)

    def _num_groups(self, x: jax.Array) -> int:
        num_groups = x.shape[0] if self.num_groups is None else self.num_groups
        num_tokens = x.shape[0] * x.shape[1]
        check_divisible(self, by=("num_groups", num_groups), tokens_per_batch=num_tokens)
        return num_groups

    def _capacity(self, x: jax.Array, num_groups: int) -> int:
        """Return the number of slots of an expert for one of the groups of `x`."""
        assert self.capacity_factor is not None
        group_size = x.shape[0] * x.shape[1] // num_groups
        capacity = capacity_of(
            group_size, num_experts=self.num_experts, capacity_factor=self.capacity_factor
        )
        return min(capacity, group_size) if self._experts_choose else capacity

    def _run_with_capacity(
        self, x: jax.Array, routing: Routing, *, num_groups: int, capacity: int
    ) -> jax.Array:
        def grouped(tokens: jax.Array) -> jax.Array:
            return tokens.reshape(num_groups, -1, tokens.shape[-1])

        assign_slots = jax.vmap(
            lambda experts: capacity_slots(experts, num_experts=self.num_experts, capacity=capacity)
        )
        slots = assign_slots(grouped(routing.experts))
        has_no_slot = slots.slot_of_choice == self.num_experts * capacity
        is_choice = grouped(routing.experts) < self.num_experts
        self._report_dropped(jnp.sum(has_no_slot & is_choice), routing)
        rows = jax.vmap(to_slots)(grouped(x), slots)
        rows = rows.reshape(num_groups, self.num_experts, capacity, self.input_dims)
        outputs = self._run_on_expert_devices(rows, self._run_experts)
        outputs = outputs.reshape(num_groups, self.num_experts * capacity, self.input_dims)
        of_choices = jax.vmap(from_slots)(outputs, slots)
        return weighted_sum(of_choices, grouped(routing.weights)).reshape(x.shape)

    def _run_on_expert_devices(
        self, rows: jax.Array, compute: Callable[..., jax.Array]
    ) -> jax.Array:
        """Run `compute` on rows `[groups, experts, capacity, dims]`, sharded by experts.

        The partitioner implements the two changes of sharding by all-to-all.
        """
        groups, experts, capacity, dims = rows.shape
        at_tokens = ("batch", None, None, "act_embed")
        at_experts = ("expert", "expert_batch", None, "act_embed")
        self._check_layout(rows, at_tokens)
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

        return self._expert_function(self.activation, self.dropout)(rows, product)

    def _run_dropless(self, x: jax.Array, routing: Routing) -> jax.Array:
        sharding = self.inherited("sharding")
        mesh = None if sharding is None else sharding.mesh
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        matmul = select_grouped_matmul(
            self.grouped_matmul, platform=platform, dtype=x.dtype, owner=self.path_name
        )
        _LOG.info(matmul.describe())
        activation, variables = self.activation.unbind()

        def apply(rows: jax.Array, grouped: RowsProduct, own: dict[str, jax.Array]) -> jax.Array:
            def product(rows: jax.Array, name: str) -> jax.Array:
                start = f"{name}/"
                dot = {n.removeprefix(start): a for n, a in own.items() if n.startswith(start)}
                bias = own.get(f"{name}_bias")
                return grouped_matmul(self, rows, own[name], grouped, dot, name=name, bias=bias)

            return self._expert_function(activation.bind(variables))(rows, product)

        compute = Dropless(apply, self.num_experts, matmul)
        own = {name: getattr(self.theta, name) for name in self._weight_names()}
        axes: dict[str, tuple[str | None, ...] | None] = {name: WEIGHT_AXES[name] for name in own}
        for name in PRODUCTS:
            for part, array in grouped_arrays(self, name=name).items() if name in own else ():
                own[f"{name}/{part}"], axes[f"{name}/{part}"] = array
        if mesh is None or mesh.size == 1:
            return compute(x, routing.experts, routing.weights, own)
        buffer_factor = self.exchange_buffer_factor if self.is_training else None
        output, num_dropped = run_on_mesh(
            compute,
            x,
            routing.experts,
            routing.weights,
            own,
            weight_axes=axes,
            added_once=(OUTPUT_BIAS,),
            sharding=sharding,
            exchange=self.expert_exchange,
            buffer_factor=buffer_factor,
            owner=self.path_name,
        )
        if buffer_factor is not None:
            self._report_dropped(num_dropped, routing)
        return output

    def _expert_function(
        self,
        activation: BaseActivation,
        dropout: Callable[[jax.Array], jax.Array] = lambda hidden: hidden,
    ) -> ExpertFunction:
        return ExpertFunction(activation, self.use_gate, self.gate_limit, self.up_offset, dropout)

    def _shared_output(self, x: jax.Array) -> jax.Array:
        output = self.shared(x)
        return jax.nn.sigmoid(self.shared_gate(x)) * output if self.use_shared_gate else output

    def _report(self, routing: Routing, *, num_groups: int) -> None:
        """Add the losses with a weight, and report the losses and the load of the experts."""
        report_load_balance(
            self,
            routing,
            weight=self.load_balance_weight,
            over_all_choices=self.balance_all_choices,
            num_groups=num_groups,
        )
        report_router_z(self, routing, weight=self.router_z_weight)
        load = expert_load(routing)
        if self.num_experts <= _MAX_LOAD_SUMMARIES:
            for expert in range(self.num_experts):
                self.add_summary(f"expert_load/{expert}", load[expert])
        self.add_summary("max_expert_load", jnp.max(load))
        self.add_summary("min_expert_load", jnp.min(load))

    def _report_dropped(self, num_dropped: jax.Array, routing: Routing) -> None:
        num_choices = jnp.maximum(jnp.sum(routing.experts < self.num_experts), 1)
        self.add_summary("fraction_dropped", num_dropped / num_choices)

    def _weight_names(self) -> tuple[str, ...]:
        return weight_names(use_gate=self.use_gate, use_bias=self.use_bias)

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
        self.create_child(
            "shared",
            self.shared_tpl,
            input_dims=self.input_dims,
            hidden_dims=self.num_shared_experts * self.hidden_dims,
            use_gate=self.use_gate,
            activation_tpl=self.activation_tpl,
        )
        if self.use_shared_gate:
            gate: Config = Linear.HParams.config(
                input_dims=self.input_dims, output_dims=1, weight_axes=("embed", None)
            )
            self.create_child("shared_gate", gate)

    def _check_fields(self) -> None:
        check_choice(self, IMPLEMENTATIONS, grouped_matmul=self.grouped_matmul)
        check_choice(self, EXCHANGES, expert_exchange=self.expert_exchange)
        check_positive(self, capacity_factor=self.capacity_factor)
        check_positive(self, exchange_buffer_factor=self.exchange_buffer_factor)
        check_positive(self, gate_limit=self.gate_limit)
        check_sizes(self, num_groups=self.num_groups)
        check_integers(self, minimum=0, num_shared_experts=self.num_shared_experts)
        if not self._experts_choose:
            return
        expected = "a number, since router_tpl is an ExpertChoiceRouter"
        require(
            self.capacity_factor is not None,
            self,
            "capacity_factor",
            self.capacity_factor,
            expected,
        )
        for name in _FIELDS_OF_TOKEN_CHOICE:
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            expected = f"{default!r}, its default, since router_tpl is an ExpertChoiceRouter"
            require(value == default, self, name, value, expected)

    def _check_layout(self, rows: jax.Array, axes: tuple[str | None, ...]) -> None:
        sharding = self.inherited("sharding")
        if sharding is not None:
            sharding.spec(axes, shape=rows.shape, owner=f"{self.path_name}: groups of tokens")
