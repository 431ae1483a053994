"""Multi-head latent attention, which has a compressed cache (DeepSeek-V2; arXiv:2405.04434)."""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.errors import ConfigError
from layerkit.layers import MultiHeadLatentAttention

# What latent attention does not have: it rotates positions, and sets sizes of heads, itself.
_PLAIN_FIELDS = {
    "DIMS_PER_HEAD": None,
    "NUM_KV_HEADS": None,
    "POSITIONS": "none",
    "PER_DIM_SCALE": False,
    "QK_NORM": False,
    "WINDOW": None,
    "COMBINE_QKV": False,
}


def use_latent_attention(fields: Any, model: Config) -> Config:
    """Return the config of a LanguageModel with latent attention.

    Args:
      fields: Experiment with LATENT_DIMS, QUERY_LATENT_DIMS, PLAIN_DIMS_PER_HEAD and
        ROTARY_DIMS_PER_HEAD, and with the values of `POSITIONS = "none"`.
      model: Config of a `decoder`, which is changed.

    Raises:
      ConfigError: A field is set that applies only to plain attention.
    """
    for name, expected in _PLAIN_FIELDS.items():
        if (value := getattr(fields, name)) != expected:
            expected = f"{expected!r} with latent attention"
            raise ConfigError(field=name, value=value, expected=expected)
    layer = model.lm_tpl.stack_tpl.layer_tpl
    plain = layer.attention_tpl
    layer.attention_tpl = MultiHeadLatentAttention.HParams.config(
        latent_dims=fields.LATENT_DIMS,
        query_latent_dims=fields.QUERY_LATENT_DIMS,
        plain_dim_per_head=fields.PLAIN_DIMS_PER_HEAD,
        rotary_dim_per_head=fields.ROTARY_DIMS_PER_HEAD,
        value_dim_per_head=fields.PLAIN_DIMS_PER_HEAD,
        use_bias=plain.use_bias,
        logit_cap=plain.logit_cap,
        qk_clip=plain.qk_clip,
        backend=plain.backend,
        output_tpl=plain.output_tpl.clone(),
    )
    return model
