"""Experts that choose tokens, which balances their load without a loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from layerkit.config import Config, sub_config_field, target_of
from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit.layers.moe.base_moe import BaseMoeFeedForward
from layerkit.layers.moe.losses import report_router_z
from layerkit.layers.moe.routing import BaseRouter, ExpertChoiceRouter
from layerkit.ops.moe.slots import capacity_of, weighted
from layerkit.ops.remat import save_inputs


class ExpertChoiceFeedForward(BaseMoeFeedForward):
    """A feed-forward layer of experts, each of which chooses as many tokens as it has slots.

    Experts choose in evaluation as in training, and no model with such a layer decodes with a
    cache, since a choice depends on later tokens (Zhou et al., 2022, arXiv:2202.09368). The other
    fields are those of `BaseMoeFeedForward`.

    Attributes:
      capacity_factor: An expert has int(S·capacity_factor/num_experts) slots for a group of S
        tokens, rounded up to a multiple of 4. A token has capacity_factor experts on average.
      router_tpl: Router, which chooses tokens and their weights.
    """

    capacity_factor: float = 2.0
    router_tpl: Config[BaseRouter] = sub_config_field(ExpertChoiceRouter.HParams)

    def setup(self) -> None:
        """Check the fields and create weights and children."""
        router: Any = target_of(self.router_tpl)
        is_valid = issubclass(router, ExpertChoiceRouter)
        require(is_valid, self, "router_tpl", router.__name__, "an ExpertChoiceRouter")
        super().setup()

    def mix_experts(self, x: jax.Array, is_token: jax.Array | None) -> jax.Array:
        """Compute the weighted sum `[batch, length, input_dims]` of the outputs of experts."""
        num_groups = self._count_groups(x)
        tokens = x.reshape(num_groups, -1, self.input_dims)
        group_size = tokens.shape[1]
        capacity = capacity_of(
            group_size, num_experts=self.num_experts, capacity_factor=self.capacity_factor
        )
        if is_token is not None:
            is_token = is_token.reshape(num_groups, -1)
        routing = self.router(tokens, capacity=min(capacity, group_size), is_token=is_token)
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

    def init_cache(self, batch_size: int, max_length: int) -> None:
        """Raise `ConfigError`, since experts choose by later tokens too.

        Raises:
          ConfigError: Always.
        """
        del batch_size, max_length
        raise ConfigError(
            "cannot decode with a cache",
            owner=self.path_name,
            field="feed_forward_tpl",
            value=type(self).__name__,
            expected="a layer whose outputs do not depend on later tokens, such as MoeFeedForward",
        )
