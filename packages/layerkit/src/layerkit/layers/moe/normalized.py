"""Experts with norms of their own beside a dense feed-forward, as in Gemma 4 26B-A4B.

The layer reads a residual without a norm: the router, the experts and the shared experts each
normalize it with other scales. In a `Transformer` the norms before and after it are left out:

    layer.set(feed_forward_tpl=NormalizedMoeFeedForward.HParams.config(num_experts=128))
    layer.feed_forward_norm_tpl = IdentityNorm.HParams.config()
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, sub_config_field
from layerkit.layers.basic.normalizations import BaseNormalization, RmsNorm
from layerkit.layers.moe.routing import Routing, TopKRouter
from layerkit.layers.moe.token_choice import MoeFeedForward


class NormalizedRouter(TopKRouter):
    """A router of normalized inputs norm(x)/√input_dims, with a trained factor for each expert.

    The factor `expert_scale` `[num_experts]` multiplies the weights of the expert, after they are
    renormalized (Gemma 4).

    Attributes:
      norm_tpl: Norm of the inputs.
    """

    norm_tpl: Config[BaseNormalization] = sub_config_field(RmsNorm.HParams)

    def setup(self) -> None:
        """Check the fields and create the norm and the weights."""
        super().setup()
        self.create_child("norm", self.norm_tpl, dims=self.input_dims)
        ones = WeightHParams((self.num_experts,), (None,), init=WeightInit.Constant(1.0))
        self.create_variable("expert_scale", ones)

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> Routing:
        """Choose the experts of tokens `[..., input_dims]`, as `TopKRouter.fprop` does."""
        routing = super().fprop(self.norm(x) * self.input_dims**-0.5, is_token=is_token)
        scales = jnp.einsum(
            "...ke,e->...k",
            jax.nn.one_hot(routing.experts, self.num_experts),
            self.theta.expert_scale,
            precision=jax.lax.Precision.HIGHEST,
        )
        return dataclasses.replace(routing, weights=routing.weights * scales)


class NormalizedMoeFeedForward(MoeFeedForward):
    """Experts with norms of their own, for a residual x `[batch, length, input_dims]`.

        post_norm(experts_post_norm(Σ weight · expert(experts_norm(x)))
                  + shared_post_norm(shared(shared_norm(x))))

    The router reads x. Without shared experts, the second term is left out. The other fields are
    those of `MoeFeedForward`.

    Attributes:
      norm_tpl: Template of all these norms.
    """

    norm_tpl: Config[BaseNormalization] = sub_config_field(RmsNorm.HParams)

    def setup(self) -> None:
        """Check the fields and create weights, norms and other children."""
        super().setup()
        shared = ("shared_norm", "shared_post_norm") if self.num_shared_experts else ()
        for name in ("experts_norm", "experts_post_norm", "post_norm", *shared):
            self.create_child(name, self.norm_tpl, dims=self.input_dims)

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Compute the outputs `[batch, length, input_dims]`, as `MoeFeedForward.fprop` does."""
        return self.post_norm(super().fprop(x, is_token=is_token))

    def mix_experts(self, x: jax.Array, is_token: jax.Array | None) -> jax.Array:
        """Compute the normalized sum `[batch, length, input_dims]` of the outputs of experts."""
        return self.experts_post_norm(super().mix_experts(x, is_token))

    def prepare_inputs(self, x: jax.Array) -> jax.Array:
        """Return the normalized inputs `[batch, length, input_dims]` of the experts."""
        return self.experts_norm(x)

    def _shared_output(self, x: jax.Array) -> jax.Array:
        return self.shared_post_norm(super()._shared_output(self.shared_norm(x)))
