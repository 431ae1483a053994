"""Gemma 3 text (Gemma team, 2025): five layers with a window for each layer of full attention.

Both kinds have separate rotary positions. Unlike in Gemma 2, queries and keys have norms instead of
a logit cap.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.gemma2 import (
    GEMMA_NEUTRAL,
    gemma_entries,
    gemma_network,
)
from layerkit.interop.hugging_face.families.llama import llama_family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, set_field
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, layer_types
from layerkit.interop.hugging_face.rotary import read_scaling, rotary_config, rotary_keys

_FAR_THETA, _NEAR_THETA = 1_000_000.0, 10_000.0


def _one_of_six(file: ConfigFile, layer: int) -> str:
    period = file.get("sliding_window_pattern", 6)
    return NEAR if (layer + 1) % period else FAR


def _far_rotary(file: ConfigFile, network: Config) -> None:
    theta = file.get("rope_theta", _FAR_THETA)
    rotary = rotary_config(file, {"rope_theta": theta, **read_scaling(file, FAR)})
    set_field(network, "layer.attention_tpl.rotary_tpl", rotary)


def _near_rotary(file: ConfigFile, template: Config) -> None:
    theta = file.get("rope_local_base_freq", _NEAR_THETA)
    parameters = {"rope_theta": theta, **read_scaling(file, NEAR)}
    template.attention_tpl.rotary_tpl = rotary_config(file, parameters)


def _thetas(near: Config | None, far: Config | None) -> dict[str, Any]:
    content = {"rope_theta": _FAR_THETA, "rope_local_base_freq": _NEAR_THETA}
    if far is not None:
        content |= rotary_keys(far.attention_tpl.rotary_tpl)
    if near is not None:
        content["rope_local_base_freq"] = near.attention_tpl.rotary_tpl.max_timescale
    return content


GEMMA3 = llama_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    network=lambda: gemma_network(qk_norm=True),
    entries=(
        *gemma_entries(
            attention_cap=None,
            final_cap=None,
            qk_norm=True,
            positions=Entry(_far_rotary, lambda network: {}),  # `_thetas` writes it.
        ),
        layer_types(_one_of_six, default_window=4096, make_near=_near_rotary, write_more=_thetas),
    ),
    neutral=GEMMA_NEUTRAL | {"rope_local_base_freq"},
)
