"""Qwen 3 MoE (Qwen team, 2025): Qwen 3 with routed experts, in all layers or between dense ones."""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.families.qwen2_moe import (
    EXPERT_ROWS,
    qwen_expert_layers,
    routing_entries,
)
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, get_field, key, set_field

_WINDOW = "layer.attention_tpl.window"


def _read_window(file: ConfigFile, network: Config) -> None:
    window = file.get("sliding_window", 4096)
    is_on = file.get("use_sliding_window", default=False)
    set_field(network, _WINDOW, window if is_on else None)


def _write_window(network: Config) -> dict[str, Any]:
    window = get_field(network, _WINDOW)
    return {"use_sliding_window": window is not None, "sliding_window": window}


QWEN3_MOE = llama_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    network=lambda: mixture_network(qk_norm=True),
    entries=(
        *llama_entries(kv_heads=4, qk_norm=True, attention_bias=False),
        fixed("use_qk_norm", value=True),
        Entry(_read_window, _write_window),
        qwen_expert_layers(
            (
                key("moe_intermediate_size", "hidden_dims", 768),
                *routing_entries(experts=128, choices=8, balance=0.001),
            ),
            experts=128,
        ),
    ),
    rows=EXPERT_ROWS,
    # Transformers gives all layers the window, whatever `max_window_layers` is.
    neutral=frozenset({"max_window_layers"}),
)
