"""SmolLM 3 (Hugging Face, 2025): Llama in which every fourth layer has no rotary positions.

Layers may also have a window, in any pattern.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import MLP_BIAS, llama_entries, llama_family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, all_layers
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, layer_types, stack_layers
from layerkit.interop.hugging_face.rotary import rotary, rotary_keys

_ROTARY = rotary(2_000_000.0)


def _has_rotary(file: ConfigFile, layer: int) -> bool:
    interval = file.get("no_rope_layer_interval", 4)
    listed = file.get("no_rope_layers", None)
    if listed is None:
        return bool((layer + 1) % interval)
    if not isinstance(listed, (list, tuple)) or layer >= len(listed):
        raise file.invalid("no_rope_layers", "0 or 1 for each layer")
    return bool(listed[layer])


def _near_without_rotary(file: ConfigFile, layer: int) -> str:
    is_on = file.get("use_sliding_window", default=False)
    has_window = is_on and file.get("sliding_window", None) is not None
    return NEAR if has_window and not _has_rotary(file, layer) else FAR


def _read_near(file: ConfigFile, template: Config) -> None:
    del template
    # The mask of Transformers has the window anyway, and its fused kernels do not.
    if not file.get("use_sliding_window", default=False):
        raise file.invalid("use_sliding_window", f"true, since layer_types has {NEAR!r}")


def _read_rotary(file: ConfigFile, network: Config) -> None:
    templates = [template.clone() for template in all_layers(network)]
    for layer, template in enumerate(templates):
        if not _has_rotary(file, layer):
            template.attention_tpl.rotary_tpl = None
    network.stack_tpl = stack_layers(templates)


def _write_rotary(network: Config) -> dict[str, Any]:
    rotary_tpls = [template.attention_tpl.rotary_tpl for template in all_layers(network)]
    used = [tpl for tpl in rotary_tpls if tpl is not None]
    has_rotary = [int(tpl is not None) for tpl in rotary_tpls]
    return {"no_rope_layers": has_rotary, **(rotary_keys(used[0]) if used else {})}


SMOLLM3 = llama_family(
    "smollm3",
    "SmolLM3ForCausalLM",
    entries=(
        *llama_entries(
            tied=True,
            kv_heads=4,
            attention_bias=False,
            positions=Entry(_ROTARY.read),  # `_write_rotary` writes it.
        ),
        MLP_BIAS,
        layer_types(
            _near_without_rotary,
            default_window=None,
            make_near=_read_near,
            write_more=lambda near, far: {"use_sliding_window": near is not None},
        ),
        Entry(_read_rotary, _write_rotary),
    ),
    # A key of Qwen 2 in the published folder, which SmolLM 3 does not read.
    neutral=frozenset({"max_window_layers"}),
    token_ids={"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
)
