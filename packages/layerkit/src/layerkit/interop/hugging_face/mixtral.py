"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts for a feed-forward."""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Key
from layerkit.interop.hugging_face.llama import (
    LLAMA_BUFFERS,
    LLAMA_COPIES,
    LLAMA_NEUTRAL,
    attention_rows,
    llama_entries,
    llama_network,
    outer_rows,
    pre_norm_rows,
)
from layerkit.interop.hugging_face.parts import Activation, HeadDim
from layerkit.interop.hugging_face.rotary import Rotary
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.moe.feed_forward import MoeFeedForward


def _skeleton(file: ConfigFile) -> Config:
    del file
    # Trained with a loss that balances all choices of a token, and without a z-loss.
    experts: Config = MoeFeedForward.HParams.config(balance_all_choices=True, router_z_weight=0.0)
    return llama_network(feed_forward_tpl=experts)


_MOE = "model.layers.{layer}.block_sparse_moe."
_OURS = "lm/stack/{layer}/feed_forward/"
_LINEAR = "out in -> in out"

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    skeleton=_skeleton,
    entries=(
        *llama_entries(kv_heads=8, epsilon=1e-5),
        HeadDim(),
        Rotary(default_theta=1_000_000.0),
        Activation("hidden_act", "silu"),
        Key("sliding_window", "layer.attention_tpl.window", None),
        Key("num_local_experts", "layer.feed_forward_tpl.num_experts", 8),
        Key("num_experts_per_tok", "layer.feed_forward_tpl.num_experts_per_token", 2),
        Key("router_aux_loss_coef", "layer.feed_forward_tpl.load_balance_weight", 0.001),
        Key("router_jitter_noise", "layer.feed_forward_tpl.router_tpl.jitter", 0.0),
    ),
    rows=(
        *outer_rows(),
        *pre_norm_rows(),
        *attention_rows(),
        Row(_MOE + "gate.weight", _OURS + "router/w", "experts embed -> embed experts"),
        Row(_MOE + "experts.{expert}.w1.weight", _OURS + "gate", _LINEAR),
        Row(_MOE + "experts.{expert}.w2.weight", _OURS + "down", _LINEAR),
        Row(_MOE + "experts.{expert}.w3.weight", _OURS + "up", _LINEAR),
    ),
    neutral=LLAMA_NEUTRAL | {"output_router_logits"},
    prefix="model.",
    copies=LLAMA_COPIES,
    buffers=LLAMA_BUFFERS,
)
