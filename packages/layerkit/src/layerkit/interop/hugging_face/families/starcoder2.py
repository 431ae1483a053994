"""StarCoder 2 (Lozhkov et al., 2024): Llama with LayerNorm, biases and an ungated feed-forward."""

from __future__ import annotations

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    BASIC_ENTRIES,
    LAYER,
    LLAMA_ROWS,
    THEIR_LAYER,
    llama_family,
)
from layerkit.interop.hugging_face.families.stablelm import LAYER_NORM_ROWS, layer_norm_network
from layerkit.interop.hugging_face.keys import NORM_EPSILONS, key
from layerkit.interop.hugging_face.parts import activation, linear_rows, tied_embedding
from layerkit.interop.hugging_face.rotary import rotary


def _network() -> Config:
    network = layer_norm_network()
    network.stack_tpl.layer_tpl.feed_forward_tpl.use_gate = False
    return network


# Keys of the published folders that Transformers does not read.
_NOT_READ = frozenset(["activation_function", "layer_norm_epsilon", "mlp_type", "norm_type"])
_NOT_READ |= {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"}

STARCODER2 = llama_family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    network=_network,
    entries=(
        tied_embedding(default=True),
        *BASIC_ENTRIES,
        key("num_key_value_heads", "num_kv_heads", 2, fallback=lambda lm: lm.num_heads),
        key("norm_epsilon", NORM_EPSILONS, 1e-5),
        key(
            "use_bias",
            ("layer.attention_tpl.use_bias", "layer.feed_forward_tpl.has_bias"),
            default=True,
        ),
        key("sliding_window", "layer.attention_tpl.window", None),
        key("embedding_dropout", "dropout_rate", 0.0),
        key("residual_dropout", "layer.dropout_rate", 0.0),
        rotary(),
        activation("hidden_act", "gelu_pytorch_tanh"),
    ),
    rows=(
        *(row for row in LLAMA_ROWS if ".mlp." not in row.name),
        *LAYER_NORM_ROWS,
        *linear_rows({f"{LAYER}feed_forward/up": f"{THEIR_LAYER}mlp.c_fc"}),
        *linear_rows({f"{LAYER}feed_forward/down": f"{THEIR_LAYER}mlp.c_proj"}),
    ),
    neutral=_NOT_READ,
    token_ids={"bos_token_id": 50256, "eos_token_id": 50256},
)
