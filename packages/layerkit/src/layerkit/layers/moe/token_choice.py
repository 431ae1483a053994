"""Tokens that choose a few of many experts.

Two methods of dispatch share routing, weights and losses:

- *dropless* (the default): every token reaches its experts, in groups of rows of any size;
- *capacity*: each expert has a fixed number of slots. The output of choices without a slot is zero,
  so that only the residual remains. `layerkit.ops.moe.slots` has the slots of both.

A capacity applies in training only, unless `capacity_in_evaluation` is set. Evaluation and decoding
drop no choices: the output of a token must not depend on other tokens, and cached steps must give
the outputs of whole rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import CACHE
from layerkit.base.sharding import model_device
from layerkit.config import Config, sub_config_field
from layerkit.config.checks import check_positive
from layerkit.config.hparams import Conditions
from layerkit.layers.basic.dots import grouped_arrays, grouped_matmul
from layerkit.layers.moe.base_moe import PRODUCTS, WEIGHT_AXES, BaseMoeFeedForward
from layerkit.layers.moe.losses import expert_load, report_load_balance, report_router_z
from layerkit.layers.moe.routing import BaseRouter, Routing, TopKRouter
from layerkit.ops.moe.expert_parallel import Dropless, run_on_mesh
from layerkit.ops.moe.grouped_matmul import RowsProduct, select_grouped_matmul
from layerkit.ops.moe.slots import capacity_of, capacity_slots, from_slots, to_slots, weighted_sum

# Largest number of experts whose loads are all reported. Beyond it, only the extremes are.
_MAX_LOAD_SUMMARIES = 64


class MoeFeedForward(BaseMoeFeedForward):
    """A feed-forward layer of experts, a few of which each token chooses.

    The other fields are those of `BaseMoeFeedForward`.

    Attributes:
      num_experts_per_token: Number of experts that each token uses.
      router_tpl: Router, which chooses experts and their weights.
      dropout_rate: Dropout rate of the hidden activations of experts in training. It requires a
        capacity.
      capacity_factor: None for dropless. Otherwise an expert has int(S·capacity_factor/num_experts)
        slots in training, rounded up to a multiple of 4, for a group of S tokens. Balanced routing
        fills them at a factor of num_experts_per_token.
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
      weigh_inputs: Multiplies the input of an expert by the weight of the choice, instead of its
        output (Llama 4). A capacity then counts choices as tokens.
      load_balance_weight: Weight of the load-balancing loss, see `layerkit.layers.moe.losses`; 0
        for none.
      balance_all_choices: Balances all choices of a token instead of the first choice.
      balance_per_group: In training, computes the load-balancing loss of each of the groups and
        averages it (GShard), instead of once for the batch (Switch). It requires a capacity.
    """

    used_only_if: ClassVar[Conditions] = {
        "capacity_in_evaluation": "capacity_factor",
        "num_groups": "capacity_factor",
        "dropout_rate": "capacity_factor",
        "balance_per_group": "capacity_factor",
        "exchange_buffer_factor": "not capacity_factor",
    }

    num_experts_per_token: int = 2
    router_tpl: Config[BaseRouter] = sub_config_field(TopKRouter.HParams)
    capacity_in_evaluation: bool = False
    grouped_matmul: Literal["auto", "blocks", "ragged_dot", "pallas"] = "auto"
    expert_exchange: Literal["auto", "ragged_all_to_all", "all_gather"] = "auto"
    exchange_buffer_factor: float | None = None
    weigh_inputs: bool = False
    load_balance_weight: float = 0.01
    balance_all_choices: bool = False
    balance_per_group: bool = False

    def setup(self) -> None:
        """Check the fields and create weights and children."""
        check_positive(self, exchange_buffer_factor=self.exchange_buffer_factor)
        super().setup()

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Create no cache: cached steps give the outputs of whole rows."""

    def mix_experts(self, x: jax.Array, is_token: jax.Array | None) -> jax.Array:
        """Compute the weighted sum `[batch, length, input_dims]` of the outputs of experts."""
        routing = self.router(x, is_token=is_token)
        x = self.prepare_inputs(x)
        in_evaluation = self.capacity_in_evaluation and not self.is_mutable_collection(CACHE)
        has_capacity = self.capacity_factor is not None and (in_evaluation or self.is_training)
        num_groups = self._count_groups(x) if has_capacity else 1
        self._report(routing, num_groups=num_groups if self.balance_per_group else 1)
        inputs, of_choices = (x, routing) if not self.weigh_inputs else self._weigh(x, routing)
        if has_capacity:
            outputs = self._run_with_capacity(inputs, of_choices, num_groups=num_groups)
        else:
            outputs = self._run_dropless(inputs, of_choices)
        if self.weigh_inputs:
            outputs = jnp.sum(outputs.reshape(*x.shape[:2], -1, x.shape[2]), axis=2)
        return outputs

    def prepare_inputs(self, x: jax.Array) -> jax.Array:
        """Return the experts' inputs `[batch, length, input_dims]`, by default the router's."""
        return x

    def _weigh(self, x: jax.Array, routing: Routing) -> tuple[jax.Array, Routing]:
        """Return a token `[batch, length·choices, dims]` for each choice, with a single choice."""
        inputs = self.cast(x[..., None, :] * routing.weights[..., None])
        experts = routing.experts.reshape(x.shape[0], -1, 1)
        single = dataclasses.replace(routing, experts=experts, weights=jnp.ones(experts.shape))
        return inputs.reshape(x.shape[0], -1, x.shape[2]), single

    def _router_fields(self) -> dict[str, Any]:
        return {"num_experts_per_token": self.num_experts_per_token}

    def _run_with_capacity(self, x: jax.Array, routing: Routing, *, num_groups: int) -> jax.Array:
        assert self.capacity_factor is not None
        capacity = capacity_of(
            x.shape[0] * x.shape[1] // num_groups,
            num_experts=self.num_experts,
            capacity_factor=self.capacity_factor,
        )

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

    def _run_dropless(self, x: jax.Array, routing: Routing) -> jax.Array:
        sharding = self.inherited("sharding")
        mesh, device = sharding and sharding.mesh, model_device(sharding)
        matmul = select_grouped_matmul(
            self.grouped_matmul,
            platform=device.platform,
            dtype=x.dtype,
            owner=self.path_name,
            compute_capability=getattr(device, "compute_capability", ""),
        )
        activation, variables = self.activation.unbind()

        def apply(rows: jax.Array, grouped: RowsProduct, arrays: dict[str, jax.Array]) -> jax.Array:
            def product(rows: jax.Array, name: str) -> jax.Array:
                start = f"{name}/"
                dot = {n.removeprefix(start): a for n, a in arrays.items() if n.startswith(start)}
                bias = arrays.get(f"{name}_bias")
                return grouped_matmul(self, rows, arrays[name], grouped, dot, name=name, bias=bias)

            return self._expert(rows, product, activation.bind(variables))

        compute = Dropless(apply, self.num_experts, matmul)
        arrays = {name: getattr(self.theta, name) for name in self._weight_names()}
        axes: dict[str, tuple[str | None, ...] | None] = {
            name: WEIGHT_AXES[name] for name in arrays
        }
        for name in PRODUCTS:
            for part, array in grouped_arrays(self, name=name).items() if name in arrays else ():
                arrays[f"{name}/{part}"], axes[f"{name}/{part}"] = array
        if mesh is None or mesh.size == 1:
            return compute(x, routing.experts, routing.weights, arrays)
        buffer_factor = self.exchange_buffer_factor if self.is_training else None
        output, num_dropped = run_on_mesh(
            compute,
            x,
            routing.experts,
            routing.weights,
            arrays,
            weight_axes=axes,
            added_once=("down_bias",),
            sharding=sharding,
            exchange=self.expert_exchange,
            buffer_factor=buffer_factor,
            owner=self.path_name,
        )
        if buffer_factor is not None:
            self._report_dropped(num_dropped, routing)
        return output

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
