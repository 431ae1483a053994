"""ERNIE 4.5 dense (Baidu ERNIE team, 2025): Llama with interleaved rotary positions."""

from __future__ import annotations

from layerkit.interop.hugging_face.families.llama import llama_entries, llama_family
from layerkit.interop.hugging_face.keys import BIASES, key
from layerkit.interop.hugging_face.rotary import rotary

ERNIE4_5 = llama_family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    entries=(
        *llama_entries(
            tied=True,
            kv_heads=2,
            head_dim=128,
            epsilon=1e-5,
            positions=rotary(500_000.0, pairing="neighbors"),
        ),
        key("use_bias", BIASES, default=False),
    ),
)
