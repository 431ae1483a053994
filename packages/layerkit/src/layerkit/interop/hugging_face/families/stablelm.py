"""StableLM and StableLM 2 (Bellagente et al., 2024): Llama with LayerNorm and partial rotary.

Queries and keys of the 12B model have norms with weights for each head.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import (
    BASIC_ENTRIES,
    llama_family,
    llama_network,
    llama_rows,
)
from layerkit.interop.hugging_face.keys import (
    NORM_EPSILONS,
    ConfigFile,
    Entry,
    fixed,
    get_field,
    key,
    set_field,
)
from layerkit.interop.hugging_face.parts import activation, qk_norms, tied_embedding
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.interop.hugging_face.tensors import EXPERT
from layerkit.layers.basic.normalizations import LayerNorm


def _read_bias(file: ConfigFile, network: Config) -> None:
    use_bias = file.get("use_qkv_bias", default=False)
    set_field(network, "layer.attention_tpl.use_bias", use_bias)
    set_field(network, "layer.attention_tpl.use_output_bias", False if use_bias else None)


def _write_bias(network: Config) -> dict[str, Any]:
    return {"use_qkv_bias": get_field(network, "layer.attention_tpl.use_bias")}


# Each head has a tensor of its own; the placeholder stands for any leading axis of a weight.
_HEAD_NORMS = {
    f"attention/{name}_norm": f"self_attn.{name[0]}_layernorm.norms.{EXPERT}"
    for name in ("query", "key")
}

STABLELM = llama_family(
    "stablelm",
    "StableLmForCausalLM",
    network=lambda: llama_network(norm_class=LayerNorm),
    entries=(
        tied_embedding(default=False),
        *BASIC_ENTRIES,
        key("num_key_value_heads", "num_kv_heads", 32, fallback=lambda lm: lm.num_heads),
        key("layer_norm_eps", NORM_EPSILONS, 1e-5),
        # One norm precedes parallel branches.
        key(
            "use_parallel_residual",
            ("layer.parallel", "layer.parallel_shares_norm"),
            default=False,
        ),
        Entry(_read_bias, _write_bias),
        qk_norms("qk_layernorm", per_head=True),
        # Dropout of the output of the feed-forward only.
        fixed("hidden_dropout", value=0.0),
        rotary(default_fraction=0.25),
        activation("hidden_act", "silu"),
    ),
    rows=llama_rows(_HEAD_NORMS),
)
