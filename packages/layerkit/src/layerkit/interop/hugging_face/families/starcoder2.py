"""StarCoder 2 (Lozhkov et al., 2024): Llama with LayerNorm, biases and an ungated feed-forward."""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import (
    BASIC_ENTRIES,
    llama_family,
    llama_network,
    llama_rows,
)
from layerkit.interop.hugging_face.keys import BIASES, NORM_EPSILONS, key
from layerkit.interop.hugging_face.parts import activation, tied_embedding
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.layers.basic.normalizations import LayerNorm

# Keys of the published folders that Transformers does not read.
_NOT_READ = frozenset(["activation_function", "layer_norm_epsilon", "mlp_type", "norm_type"])
_NOT_READ |= {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"}

STARCODER2 = llama_family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    network=lambda: llama_network(norm_class=LayerNorm, is_gated=False),
    entries=(
        tied_embedding(default=True),
        *BASIC_ENTRIES,
        key("num_key_value_heads", "num_kv_heads", 2, fallback=lambda lm: lm.num_heads),
        key("norm_epsilon", NORM_EPSILONS, 1e-5),
        key("use_bias", BIASES, default=True),
        key("sliding_window", "layer.attention_tpl.window", None),
        key("embedding_dropout", "dropout_rate", 0.0),
        key("residual_dropout", "layer.dropout_rate", 0.0),
        rotary(),
        activation("hidden_act", "gelu_pytorch_tanh"),
    ),
    rows=llama_rows({"feed_forward/up": "mlp.c_fc", "feed_forward/down": "mlp.c_proj"}),
    neutral=_NOT_READ,
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
)
