"""Residual adapters: fine-tuning by small bottleneck layers after attention and feed-forward.

An adapter (Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", 2019) computes

    x + up(activation(down(x)))

where `down` projects to a few dimensions and `up` starts at 0, so the outputs of the model do not
change at first. It follows the last projection of a branch of a Transformer, before the residual is
added. The weights of the model keep their paths: `feed_forward/up/w` stays and
`feed_forward/adapter/down/w` is new.

    config = with_residual_adapters(config, bottleneck_dims=64)

Give the learner the pattern `RESIDUAL_ADAPTER_WEIGHTS` to train the adapters alone. For low-rank
adapters of the weights see `layerkit.layers.adapters`.
"""

from __future__ import annotations

from typing import Any

import jax

from layerkit.base_layer import BaseLayer
from layerkit.checks import check_last_axis, check_sizes
from layerkit.config import (
    Config,
    assigned_fields,
    is_config,
    sub_config_field,
    target_of,
    walk_configs,
)
from layerkit.errors import ConfigError
from layerkit.layers.activations import GELU, BaseActivation, Identity
from layerkit.layers.attention.projections import OutputProjection
from layerkit.layers.feed_forward import TransformerFeedForward
from layerkit.layers.linears import FeedForward
from layerkit.layers.products import unused_templates
from layerkit.weights import WeightInit

RESIDUAL_ADAPTER_WEIGHTS = ".*/adapter/(down|up)/.*"
"""Regular expression that matches the paths of residual adapters' weights and no others."""


class ResidualAdapter(BaseLayer):
    """A bottleneck x + up(activation(down(x))) of `[..., input_dims]`, at first the identity.

    Attributes:
      input_dims: Size of the last axis.
      bottleneck_dims: Size between the two projections.
      activation_tpl: Activation between the two projections.
    """

    input_dims: int = 0
    bottleneck_dims: int = 64
    activation_tpl: Config[BaseActivation] = sub_config_field(GELU.HParams)

    def setup(self) -> None:
        """Create the two projections."""
        check_sizes(self, input_dims=self.input_dims, bottleneck_dims=self.bottleneck_dims)
        down = FeedForward.HParams.config(
            input_dims=self.input_dims,
            output_dims=self.bottleneck_dims,
            activation_tpl=self.activation_tpl.clone(),
        )
        down.linear_tpl.weight_axes = ("embed", None)
        self.create_child("down", down)
        up = FeedForward.HParams.config(
            input_dims=self.bottleneck_dims, output_dims=self.input_dims
        )
        up.linear_tpl.set(weight_axes=(None, "embed"), weight_init=WeightInit.Constant(0.0))
        up.activation_tpl = Identity.HParams.config()
        self.create_child("up", up)

    def fprop(self, x: jax.Array) -> jax.Array:
        """Map `[..., input_dims]` to the same shape in the compute dtype."""
        check_last_axis(self, x, input_dims=self.input_dims)
        return self.cast(x) + self.up(self.down(x))


class AdaptedFeedForward(TransformerFeedForward):
    """A feed-forward block that is followed by an adapter.

    Attributes:
      adapter_tpl: Adapter.
    """

    adapter_tpl: Config[BaseLayer] = sub_config_field(ResidualAdapter.HParams)

    def setup(self) -> None:
        """Create the layer and its adapter."""
        super().setup()
        self.create_child("adapter", self.adapter_tpl, input_dims=self.input_dims)

    def fprop(self, x: jax.Array, *, is_token: jax.Array | None = None) -> jax.Array:
        """Map `[batch, length, input_dims]` to the same; `is_token` is bool `[batch, length]`."""
        return self.adapter(super().fprop(x, is_token=is_token))


class AdaptedOutputProjection(OutputProjection):
    """An output projection of attention that is followed by an adapter.

    Attributes:
      adapter_tpl: Adapter.
    """

    adapter_tpl: Config[BaseLayer] = sub_config_field(ResidualAdapter.HParams)

    def setup(self) -> None:
        """Create the layer and its adapter."""
        super().setup()
        self.create_child("adapter", self.adapter_tpl, input_dims=self.output_dims)

    def fprop(self, heads: jax.Array) -> jax.Array:
        """Map `[batch, length, num_heads, head_dim]` to `[batch, length, output_dims]`."""
        return self.adapter(super().fprop(heads))


_ADAPTED: dict[Any, Any] = {
    TransformerFeedForward: AdaptedFeedForward,
    OutputProjection: AdaptedOutputProjection,
}


def with_residual_adapters(config: Config, *, bottleneck_dims: int) -> Config:
    """Return a copy of a model's config with an adapter after every attention and feed-forward.

    Args:
      config: Config that contains Transformers, such as that of a stack or a model.
      bottleneck_dims: Bottleneck size of the adapters.

    Raises:
      ConfigError: The config has no `TransformerFeedForward` and no `OutputProjection`. Subclasses
        of these are not adapted, since they may compute something else.
    """
    adapter = ResidualAdapter.HParams.config(bottleneck_dims=bottleneck_dims)
    config, num_adapted = config.clone(), 0
    unused = unused_templates(config)
    for owner in walk_configs(config):
        if id(owner) in unused:
            continue
        for name, held in assigned_fields(owner).items():
            adapted = _ADAPTED.get(target_of(held)) if is_config(held) else None
            if adapted is not None:
                fields = {**assigned_fields(held), "adapter_tpl": adapter.clone()}
                setattr(owner, name, Config(adapted, **fields))
                num_adapted += 1
    if not num_adapted:
        raise ConfigError(
            owner="with_residual_adapters",
            field="config",
            value=config,
            expected="a config that contains TransformerFeedForward or OutputProjection",
        )
    return config
