"""Falcon-H1 (TII, 2025): layers that add attention and a Mamba-2 mixer, then a feed-forward.

Both mixers read one norm. Factors multiply the embeddings, the inputs and outputs of mixers, keys,
the projections of Mamba-2, the gate and the output of the feed-forward, and the logits.
"""

from __future__ import annotations

import math
from typing import Any

from layerkit.config import Config, target_of
from layerkit.interop.hugging_face.families.llama import (
    LAYER,
    MLP_BIAS,
    THEIR_LAYER,
    llama_entries,
    llama_family,
    llama_rows,
)
from layerkit.interop.hugging_face.families.mamba2 import (
    BAMBA_KEYS,
    MIXER,
    MIXER_NEUTRAL,
    TIME_STEP_LIMIT,
    head_size,
    mixer_rows,
)
from layerkit.interop.hugging_face.keys import (
    ConfigFile,
    Entry,
    UnsupportedModelError,
    fixed,
    get_field,
    key,
    set_field,
)
from layerkit.interop.hugging_face.parts import gated_names, layer_rows
from layerkit.layers.recurrent.linear_attention import Mamba2
from layerkit.layers.recurrent.mixer_parts import GatedNorm
from layerkit.layers.recurrent.parallel_mixers import ParallelMixers

_ATTENTION, _NORM = "layer.attention_tpl", MIXER + "norm_tpl"


def _read_key_multiplier(file: ConfigFile, network: Config) -> None:
    factor = file.get("key_multiplier", 1.0)
    scale = None if factor == 1 else factor / math.sqrt(network.dim_per_head)
    set_field(network, MIXER + "logit_scale", scale)


def _write_key_multiplier(network: Config) -> dict[str, Any]:
    scale, root = get_field(network, MIXER + "logit_scale"), math.sqrt(network.dim_per_head)
    factor = 1.0 if scale is None else scale * root
    # The original number, if it is read back as the same scale.
    rounded = float(f"{factor:.12g}")
    return {"key_multiplier": rounded if rounded / root == scale else factor}


def _read_norm(file: ConfigFile, network: Config) -> None:
    gate_first = not file.get("mamba_norm_before_gate", default=True)
    norm = GatedNorm.HParams.config(epsilon=get_field(network, "layer.norm_tpl.epsilon"))
    has_norm = file.get("mamba_rms_norm", default=False)
    set_field(network, _NORM, norm.set(gate_first=gate_first) if has_norm else None)


def _write_norm(network: Config) -> dict[str, Any]:
    norm = get_field(network, _NORM)
    if norm is None:
        return {"mamba_rms_norm": False}
    return {"mamba_rms_norm": True, "mamba_norm_before_gate": not norm.gate_first}


def _read_output_bias(file: ConfigFile, network: Config) -> None:
    use_bias = get_field(network, MIXER + "use_bias")
    if file.get("projectors_bias", default=False) != use_bias:
        raise file.invalid("projectors_bias", f"mamba_proj_bias={use_bias}")


def _read_feed_forward(file: ConfigFile, network: Config) -> None:
    gate, output = file.get("mlp_multipliers", None) or (1.0, 1.0)
    set_field(network, "layer.feed_forward_tpl.gate_multiplier", gate)
    set_field(network, "layer.feed_forward_residual_weight", output)


def _write_feed_forward(network: Config) -> dict[str, Any]:
    gate = get_field(network, "layer.feed_forward_tpl.gate_multiplier")
    return {"mlp_multipliers": [gate, get_field(network, "layer.feed_forward_residual_weight")]}


_ATTENTION_ENTRIES = (
    *llama_entries(kv_heads=8, epsilon=1e-5, attention_bias=False),
    # Transformers gates Mamba-2 by SiLU, whatever the key is.
    fixed("hidden_act", "silu"),
    Entry(_read_key_multiplier, _write_key_multiplier),
)
_RECURRENT_ENTRIES = (
    *BAMBA_KEYS,
    head_size("mamba_d_head", "auto", expand="mamba_expand", total="mamba_d_ssm"),
    key(
        "ssm_multipliers",
        MIXER + "projection_multipliers",
        None,
        to_ours=lambda factors: tuple(factors) if set(factors or (1,)) != {1} else None,
        to_theirs=lambda factors: None if factors is None else list(factors),
    ),
    TIME_STEP_LIMIT,
    Entry(_read_norm, _write_norm),
    Entry(
        _read_output_bias,
        lambda network: {"projectors_bias": get_field(network, MIXER + "use_bias")},
    ),
)


def _read_mixers(file: ConfigFile, network: Config) -> None:
    """Read attention and Mamba-2, each as the only mixer of a network."""
    for entry in _ATTENTION_ENTRIES:
        entry.read(file, network)
    recurrent = network.clone()
    set_field(recurrent, _ATTENTION, Mamba2.HParams.config())
    for entry in _RECURRENT_ENTRIES:
        entry.read(file, recurrent)
    mixers = ParallelMixers.HParams.config()
    mixers.attention_tpl = get_field(network, _ATTENTION)
    mixers.recurrent_tpl = get_field(recurrent, _ATTENTION)
    set_field(network, _ATTENTION, mixers)


def _write_mixers(network: Config) -> dict[str, Any]:
    mixers = get_field(network, _ATTENTION)
    content: dict[str, Any] = {}
    if target_of(mixers) is not ParallelMixers:
        raise UnsupportedModelError(field="attention_tpl", value=mixers, expected="ParallelMixers")
    for mixer, entries in (
        (mixers.attention_tpl, _ATTENTION_ENTRIES),
        (mixers.recurrent_tpl, _RECURRENT_ENTRIES),
    ):
        part = network.clone()
        set_field(part, _ATTENTION, mixer.clone())
        for entry in entries:
            content |= entry.write(part)
    return content


_OURS = LAYER + "attention/attention/"

FALCON_H1 = llama_family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    entries=(
        Entry(_read_mixers, _write_mixers),
        MLP_BIAS,
        Entry(_read_feed_forward, _write_feed_forward),
        key("embedding_multiplier", "embedding_multiplier", 1.0),
        key(
            "lm_head_multiplier",
            "softmax_tpl.logit_scale",
            1.0,
            to_ours=lambda factor: None if factor == 1 else factor,
            to_theirs=lambda scale: 1.0 if scale is None else scale,
        ),
        key("attention_in_multiplier", MIXER + "attention_input_multiplier", 1.0),
        key("attention_out_multiplier", MIXER + "attention_output_multiplier", 1.0),
        key("ssm_in_multiplier", MIXER + "recurrent_input_multiplier", 1.0),
        key("ssm_out_multiplier", MIXER + "recurrent_output_multiplier", 1.0),
    ),
    rows=llama_rows(
        {
            **{
                f"attention/attention/{name}": f"self_attn.{name[0]}_proj"
                for name in ("query", "key", "value", "output")
            },
            **gated_names("feed_forward/", "feed_forward."),
            "feed_forward_norm": "pre_ff_layernorm",
        },
        *layer_rows({"lm/final_norm": "model.final_layernorm"}),
        *mixer_rows(THEIR_LAYER + "mamba.", LAYER + "attention/recurrent/"),
    ),
    # Transformers ignores the last two.
    neutral=MIXER_NEUTRAL
    | {"mamba_chunk_size", "num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor"},
)
