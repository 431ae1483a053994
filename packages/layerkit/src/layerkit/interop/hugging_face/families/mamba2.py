"""Mamba-2 (Dao and Gu, 2024): layers of a recurrent mixer alone, without a feed-forward.

Residuals have the compute dtype; `residual_in_fp32` of Transformers keeps them in float32. The
other families with Mamba-2 layers use the entries and rows of this module.
"""

from __future__ import annotations

import math
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import LAYER, llama_network
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import (
    NORM_EPSILONS,
    ConfigFile,
    Entry,
    get_field,
    key,
    set_field,
)
from layerkit.interop.hugging_face.layouts import INTO_HEADS
from layerkit.interop.hugging_face.parts import (
    activation,
    embedding_rows,
    layer_rows,
    tied_embedding,
)
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.recurrent.linear_attention import Mamba2

MIXER = "layer.attention_tpl."
"""Path of the fields of a mixer."""
MIXER_NEUTRAL = frozenset({"time_step_floor", "time_step_max", "time_step_rank"})
"""Keys of the initial time steps, and of a size that Mamba-2 lacks."""


def mixer_keys(**fields: tuple[str, Any]) -> tuple[Entry, ...]:
    """Return the entries of fields of a mixer, each field = (key, default of Transformers)."""
    return tuple(key(name, MIXER + field, default) for field, (name, default) in fields.items())


BAMBA_KEYS = mixer_keys(
    num_value_heads=("mamba_n_heads", 128),
    num_key_heads=("mamba_n_groups", 1),
    key_dim_per_head=("mamba_d_state", 256),
    conv_width=("mamba_d_conv", 4),
    use_bias=("mamba_proj_bias", False),
    use_conv_bias=("mamba_conv_bias", True),
)
"""Keys of the mixers of Bamba (IBM, 2024), which Granite 4 and Falcon-H1 have."""


def head_size(name: str, default: Any, *, expand: str, total: str | None = None) -> Entry:
    """Return the entry of the size of a mixer's heads, to be read after their number.

    Args:
      name: Key of the size, which may be `auto`.
      default: Value of Transformers if the key is left out.
      expand: Key of the size of all heads together, as a multiple of the model dimension.
      total: Key of the size of all heads together, unless it is null (Falcon-H1).
    """
    count, field = MIXER + "num_value_heads", MIXER + "value_dim_per_head"

    def read(file: ConfigFile, network: Config) -> None:
        heads, dims = get_field(network, count), file.get(expand, 2) * network.model_dims
        total_dims = None if total is None else file.get(total, 1024)
        dims = dims if total_dims is None else total_dims
        size = file.get(name, default)
        size = dims // heads if size == "auto" else size
        if size * heads != dims:
            raise file.invalid(name, f"{total or expand} / heads = {dims} / {heads}")
        set_field(network, field, size)

    def write(network: Config) -> dict[str, Any]:
        size = get_field(network, field)
        dims = size * get_field(network, count)
        return {name: size} | ({total: dims} if total else {expand: dims // network.model_dims})

    return Entry(read, write)


def _read_limits(file: ConfigFile, network: Config) -> None:
    # Transformers 5 writes a number that JSON lacks as {"__float__": "Infinity"}.
    limits = [
        float(one["__float__"]) if isinstance(one, dict) else one
        for one in file.get("time_step_limit", None) or (0.0, math.inf)
    ]
    set_field(network, _LIMITS, None if limits == [0, math.inf] else tuple(limits))


def _write_limits(network: Config) -> dict[str, Any]:
    limits = get_field(network, _LIMITS)
    return {} if limits is None else {"time_step_limit": list(limits)}


_LIMITS = MIXER + "time_step_tpl.limits"
TIME_STEP_LIMIT = Entry(_read_limits, _write_limits)
"""Entry of the limits of time steps, of which (0, infinity) is None here."""


def mixer_rows(theirs: str, ours: str = LAYER + "attention/") -> tuple[Row, ...]:
    """Return the rows of the Mamba-2 mixers of layers.

    Args:
      theirs: Start of the names of their tensors.
      ours: Path of the mixer.
    """
    inputs, recurrent_weight = ("value", "key", "query"), ours + "time_step/bias"
    return (
        *layer_rows(
            {ours + name: theirs + "in_proj" for name in ("gate", *inputs, "step")},
            INTO_HEADS,
            joined_axis=0,
            beside=recurrent_weight,
        ),
        *layer_rows(
            {f"{ours}{name}_conv": theirs + "conv1d" for name in inputs},
            "(heads head_dim) () width -> width heads head_dim",
            joined_axis=0,
        ),
        *layer_rows({ours + "norm": theirs + "norm"}, "(heads dims) -> heads dims"),
        *layer_rows({ours + "output": theirs + "out_proj"}, beside=recurrent_weight),
        Row(theirs + "A_log", ours + "time_step/log_rate"),
        Row(theirs + "dt_bias", recurrent_weight, "(heads channels) -> heads channels"),
        Row(theirs + "D", ours + "skip"),
    )


def _network() -> Config:
    return llama_network(attention_tpl=Mamba2.HParams.config(), feed_forward_tpl=None)


BACKBONE = "backbone.layers.{layer}."
"""Prefix of the tensors of a layer."""

MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    network=_network,
    entries=(
        tied_embedding(default=False),
        key("vocab_size", "vocab_size", 32768),
        key("hidden_size", "model_dims", 4096),
        key("num_hidden_layers", "num_layers", 64),
        key("layer_norm_epsilon", (*NORM_EPSILONS, MIXER + "norm_tpl.epsilon"), 1e-5),
        *mixer_keys(
            num_value_heads=("num_heads", 128),
            num_key_heads=("n_groups", 8),
            key_dim_per_head=("state_size", 128),
            conv_width=("conv_kernel", 4),
            use_bias=("use_bias", False),
            use_conv_bias=("use_conv_bias", True),
        ),
        head_size("head_dim", 64, expand="expand"),
        activation("hidden_act", "silu", MIXER + "activation_tpl"),
        TIME_STEP_LIMIT,
    ),
    rows=(
        *embedding_rows("backbone.embeddings.weight"),
        *layer_rows(
            {
                "lm/final_norm": "backbone.norm_f",
                LAYER + "attention_norm": BACKBONE + "norm",
            }
        ),
        *mixer_rows(BACKBONE + "mixer."),
    ),
    neutral=MIXER_NEUTRAL
    | {"chunk_size", "rescale_prenorm_residual", "residual_in_fp32", "time_step_min"},
    prefix="backbone.",
    copies={"lm_head.weight": "backbone.embeddings.weight"},
)
