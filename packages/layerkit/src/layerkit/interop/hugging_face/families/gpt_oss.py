"""gpt-oss (OpenAI, 2025): experts with biases, and attention with sinks.

Layers alternate between attention with a window and full attention (arXiv:2508.10925). The
activation is a clamped SwiGLU, (up + 1) · gate · sigmoid(α · gate), with bounds of both factors.
`hidden_act` has no effect in Transformers.
"""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.expert_layers import EXPERTS, balance_loss
from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    LLAMA_ROWS,
    THEIR_LAYER,
    llama_entries,
    llama_family,
)
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.keys import fixed, get_field, key
from layerkit.interop.hugging_face.layer_types import alternate, layer_types
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import Row

_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN |= {"truncate": False, "original_max_position_embeddings": 4096}


def _network() -> Config:
    network = mixture_network(attention={"use_sinks": True})
    experts = get_field(network, "layer.feed_forward_tpl")
    experts.set(use_bias=True, up_offset=1.0)
    experts.router_tpl.use_bias = True
    return network


_MLP, _OURS = THEIR_LAYER + "mlp.", LAYER + "feed_forward/"
_EXPERTS = _MLP + "experts."

GPT_OSS = llama_family(
    "gpt_oss",
    "GptOssForCausalLM",
    network=_network,
    entries=(
        *llama_entries(
            kv_heads=8,
            head_dim=64,
            epsilon=1e-5,
            attention_bias=True,
            positions=rotary(150_000.0, default_scaling=_YARN),
            nonlinearity=fixed("hidden_act", "silu"),
        ),
        layer_types(alternate(2), default_window=128),
        key("swiglu_alpha", EXPERTS + "activation_tpl.beta", 1.702),
        key("swiglu_limit", EXPERTS + "gate_limit", 7.0),
        key("num_local_experts", EXPERTS + "num_experts", 128),
        key("num_experts_per_tok", EXPERTS + "num_experts_per_token", 4),
        balance_loss(0.001),
    ),
    rows=(
        *LLAMA_ROWS,
        Row(THEIR_LAYER + "self_attn.sinks", LAYER + "attention/sinks"),
        Row(_MLP + "router.weight", _OURS + "router/w", "experts embed -> embed experts"),
        Row(_MLP + "router.bias", _OURS + "router/b"),
        # Columns of the two projections alternate.
        *(
            Row(_EXPERTS + theirs, _OURS + name + ours, f"{axes} -> {axes}", last, joined_per="mlp")
            for theirs, ours, axes, last in (
                ("gate_up_proj", "", "experts embed mlp", 2),
                ("gate_up_proj_bias", "_bias", "experts mlp", 1),
            )
            for name in ("gate", "up")
        ),
        Row(_EXPERTS + "down_proj", _OURS + "down", "experts mlp embed -> experts mlp embed"),
        Row(_EXPERTS + "down_proj_bias", _OURS + "down_bias", "experts embed -> experts embed"),
    ),
    # Keys of OpenAI's own code that repeat others.
    neutral=frozenset({"experts_per_token", "initial_context_length"}),
)
