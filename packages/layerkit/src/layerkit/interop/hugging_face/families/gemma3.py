"""Gemma 3, text (Gemma team, 2025): five layers with a window for each layer of full attention.

Both kinds have separate rotary positions. Unlike in Gemma 2, queries and keys have norms instead of
a logit cap.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.gemma2 import (
    GEMMA_NEUTRAL,
    GEMMA_ROWS,
    gemma_entries,
    gemma_network,
)
from layerkit.interop.hugging_face.families.llama import (
    llama_entries,
    llama_family,
    qk_norm_rows,
)
from layerkit.interop.hugging_face.keys import ConfigFile, set_field
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, LayerTypes
from layerkit.interop.hugging_face.parts import head_dim
from layerkit.interop.hugging_face.rotary import rotary_config, rotary_keys
from layerkit.layers.basic.normalizations import RmsNorm

_FAR_THETA, _NEAR_THETA = 1_000_000.0, 10_000.0


def _network() -> Config:
    network = gemma_network()
    network.stack_tpl.layer_tpl.attention_tpl.set(
        qk_norm_tpl=RmsNorm.HParams.config(scale_offset=1.0), qk_norm_before_rotary=True
    )
    return network


def _one_of_six(file: ConfigFile, layer: int) -> str:
    period = file.get("sliding_window_pattern", 6)
    return NEAR if (layer + 1) % period else FAR


class _FarRotary:
    """Entry of the rotation of full-attention layers; `_thetas` writes it."""

    def read(self, file: ConfigFile, network: Config) -> None:
        """Set fields from the file."""
        newer = (file.get("rope_parameters", None) or {}).get(FAR)
        older = {"rope_theta": file.get("rope_theta", _FAR_THETA)}
        scaling = file.get("rope_scaling", None) or {}
        rotary = rotary_config(file, {**older, **scaling, **(newer or {})})
        set_field(network, "layer.attention_tpl.rotary_tpl", rotary)

    def write(self, network: Config) -> dict[str, Any]:
        """Return keys from fields."""
        del network
        return {}


def _near_rotary(file: ConfigFile, template: Config) -> None:
    newer = (file.get("rope_parameters", None) or {}).get(NEAR)
    older = {"rope_theta": file.get("rope_local_base_freq", _NEAR_THETA)}
    template.attention_tpl.rotary_tpl = rotary_config(file, {**older, **(newer or {})})


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
    network=_network,
    entries=(
        *llama_entries(
            tied=True,
            scale_by_sqrt_dims=True,
            kv_heads=4,
            more_norms=("layer.attention_tpl.qk_norm_tpl",),
        ),
        head_dim(256),
        _FarRotary(),
        *gemma_entries(attention_cap=None, final_cap=None),
        LayerTypes(_one_of_six, default_window=4096, make_near=_near_rotary, write_more=_thetas),
    ),
    rows=(*GEMMA_ROWS, *qk_norm_rows()),
    neutral=GEMMA_NEUTRAL | {"rope_local_base_freq"},
)
