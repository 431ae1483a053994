"""OLMo 2 (OLMo team, 2024): norms after each branch, and over all heads of queries and keys."""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    attention_rows,
    feed_forward_rows,
    llama_entries,
    llama_family,
    llama_network,
    outer_rows,
    qk_norm_rows,
)
from layerkit.interop.hugging_face.keys import Key
from layerkit.interop.hugging_face.parts import Activation, head_dim
from layerkit.interop.hugging_face.rotary import Rotary
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import RmsNorm


def _network() -> Config:
    network = llama_network(norm_policy="branch")
    network.stack_tpl.layer_tpl.attention_tpl.set(
        qk_norm_tpl=RmsNorm.HParams.config(), qk_norm_before_rotary=True, qk_norm_over="projection"
    )
    return network


OLMO2 = llama_family(
    "olmo2",
    "Olmo2ForCausalLM",
    network=_network,
    entries=(
        *llama_entries(epsilon=1e-5, more_norms=("layer.attention_tpl.qk_norm_tpl",)),
        head_dim(),
        Rotary(),
        Activation("hidden_act", "silu"),
        Key("attention_bias", "layer.attention_tpl.use_bias", default=False),
    ),
    rows=(
        *outer_rows(),
        *attention_rows(),
        *qk_norm_rows(),
        *feed_forward_rows(),
        Row(
            "model.layers.{layer}.post_attention_layernorm.weight",
            "lm/stack/{layer}/attention_post_norm/scale",
        ),
        Row(
            "model.layers.{layer}.post_feedforward_layernorm.weight",
            "lm/stack/{layer}/feed_forward_post_norm/scale",
        ),
    ),
    token_ids={"eos_token_id": 50279, "pad_token_id": 1},
)
