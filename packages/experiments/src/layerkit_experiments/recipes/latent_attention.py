"""Attention with a compressed cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit.layers import MultiHeadLatentAttention
from layerkit_experiments.recipes.decoder import TransformerLmModel


class LatentAttention(TransformerLmModel):
    """Multi-head latent attention (DeepSeek-V2; arXiv:2405.04434), which rotates its own positions.

    POSITIONS is therefore `none`, and the fields below set the sizes of heads.
    """

    POSITIONS = "none"
    LATENT_DIMS: int = 64
    """Size of the latent of keys and values, which the cache holds."""
    QUERY_LATENT_DIMS: int | None = None
    """Size of the latent of queries; None projects queries from the inputs."""
    PLAIN_DIMS_PER_HEAD: int = 64
    """Coordinates of queries and keys without position, and the size of values."""
    ROTARY_DIMS_PER_HEAD: int = 64
    """Rotated coordinates of queries and keys."""

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "LATENT_DIMS": 16,
        "QUERY_LATENT_DIMS": None,
        "PLAIN_DIMS_PER_HEAD": 8,
        "ROTARY_DIMS_PER_HEAD": 8,
        "DIMS_PER_HEAD": None,
    }

    def model(self) -> Config:
        """Return the config of the LanguageModel.

        Raises:
          ConfigError: A field is invalid, or applies only to plain attention.
        """
        for field, expected in (
            ("DIMS_PER_HEAD", None),
            ("NUM_KV_HEADS", None),
            ("POSITIONS", "none"),
            ("PER_DIM_SCALE", False),
            ("COMBINE_QKV", False),
        ):
            if (value := getattr(self, field)) != expected:
                raise ConfigError(
                    field=field, value=value, expected=f"{expected!r} with latent attention"
                )
        model = super().model()
        layer = model.lm_tpl.stack_tpl.layer_tpl
        plain = layer.attention_tpl
        layer.attention_tpl = MultiHeadLatentAttention.HParams.config(
            latent_dims=self.LATENT_DIMS,
            query_latent_dims=self.QUERY_LATENT_DIMS,
            plain_dim_per_head=self.PLAIN_DIMS_PER_HEAD,
            rotary_dim_per_head=self.ROTARY_DIMS_PER_HEAD,
            value_dim_per_head=self.PLAIN_DIMS_PER_HEAD,
            use_bias=plain.use_bias,
            logit_cap=plain.logit_cap,
            backend=plain.backend,
            output_tpl=plain.output_tpl.clone(),
        )
        return model
