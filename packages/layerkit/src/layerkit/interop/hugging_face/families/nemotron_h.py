"""Nemotron-H and Nemotron 3 Nano (NVIDIA, 2025): layers of one branch, mixer or feed-forward alone.

A layer is a Mamba-2 mixer, attention without positions, an ungated feed-forward, or experts of
DeepSeek V3 without gates beside a shared one (arXiv:2504.03624). The smallest time step is
`time_step_min`, as in Transformers, which does not read `time_step_limit`.
"""

from __future__ import annotations

import math
from typing import Any

from layerkit.config import Config, target_of
from layerkit.interop.hugging_face.expert_layers import EXPERTS
from layerkit.interop.hugging_face.families.llama import LAYER, RECURRENT_WEIGHT, llama_network
from layerkit.interop.hugging_face.families.mamba2 import (
    BACKBONE,
    MIXER,
    MIXER_NEUTRAL,
    mixer_keys,
    mixer_rows,
)
from layerkit.interop.hugging_face.families.mixtral import mixture_network
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import (
    NORM_EPSILONS,
    ConfigFile,
    Entry,
    fixed,
    get_field,
    key,
    set_field,
)
from layerkit.interop.hugging_face.layer_types import FAR
from layerkit.interop.hugging_face.mixed_layers import (
    ATTENDING,
    RECURRENT,
    Kind,
    has_mixer,
    mixed_layers,
)
from layerkit.interop.hugging_face.parts import (
    activation,
    embedding_rows,
    layer_rows,
    put_embedding,
)
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.recurrent.linear_attention import Mamba2
from layerkit.layers.transformer.transformer import TransformerFeedForward

_LETTERS = {RECURRENT: "M", FAR: "*", "mlp": "-", "moe": "E"}
_ROUTER = EXPERTS + "router_tpl."
_LIMITS = MIXER + "time_step_tpl.limits"
_ACTIVATION = activation("mlp_hidden_act", "relu2")


def _network() -> Config:
    network = llama_network(is_gated=False)
    set_field(network, "layer.attention_tpl.rotary_tpl", None)
    return network


def _experts() -> Config:
    experts: Config = get_field(mixture_network(), "layer.feed_forward_tpl")
    # The bias of the choice balances the experts.
    experts.set(use_gate=False, num_shared_experts=1, load_balance_weight=0.0)
    experts.router_tpl.set(score="sigmoid", use_score_bias=True)
    return experts


def _is_feed_forward(block: Any, layer: Config) -> bool:
    return layer.feed_forward_tpl is not None and target_of(layer.feed_forward_tpl) is block


def _read_types(file: ConfigFile, network: Config) -> list[str]:
    pattern = file.get("hybrid_override_pattern", None)
    types: list[str] | None = None
    if pattern is not None:
        types = [{letter: kind for kind, letter in _LETTERS.items()}[one] for one in pattern]
    listed = file.get("layers_block_type", None)
    types = listed or types or [RECURRENT, "moe", FAR, "mlp"]
    network.num_layers = len(types)
    return types


def _write_types(types: list[str]) -> dict[str, Any]:
    # All versions of Transformers read the pattern.
    pattern = "".join(_LETTERS[kind] for kind in types)
    return {"hybrid_override_pattern": pattern, "num_hidden_layers": len(types)}


def _read_head_size(file: ConfigFile, network: Config) -> None:
    # The files of Nemotron-H 8B to 56B have the second key.
    network.dim_per_head = file.get("head_dim", file.get("attention_head_dim", 128))


def _read_limits(file: ConfigFile, network: Config) -> None:
    smallest = file.get("time_step_min", 0.001)
    set_field(network, _LIMITS, (smallest, math.inf) if smallest else None)


def _write_limits(network: Config) -> dict[str, Any]:
    return {"time_step_min": (get_field(network, _LIMITS) or (0.0,))[0]}


_KINDS = {
    FAR: Kind(ATTENDING.matches, lambda layer: layer.set(feed_forward_tpl=None)),
    RECURRENT: Kind(
        has_mixer(Mamba2),
        lambda layer: layer.set(attention_tpl=Mamba2.HParams.config(), feed_forward_tpl=None),
        (
            *mixer_keys(
                num_value_heads=("mamba_num_heads", 128),
                value_dim_per_head=("mamba_head_dim", 64),
                num_key_heads=("n_groups", 8),
                key_dim_per_head=("ssm_state_size", 128),
                conv_width=("conv_kernel", 4),
                use_bias=("use_bias", False),
                use_conv_bias=("use_conv_bias", True),
            ),
            activation("mamba_hidden_act", "silu", MIXER + "activation_tpl"),
            key("layer_norm_epsilon", MIXER + "norm_tpl.epsilon", 1e-5),
            Entry(_read_limits, _write_limits),
        ),
    ),
    "mlp": Kind(
        lambda layer: _is_feed_forward(TransformerFeedForward, layer),
        lambda layer: layer.set(attention_tpl=None),
        (
            key("intermediate_size", "layer.hidden_dims", 21504),
            key("mlp_bias", EXPERTS + "has_bias", default=False),
            _ACTIVATION,
        ),
    ),
    "moe": Kind(
        lambda layer: _is_feed_forward(MoeFeedForward, layer),
        lambda layer: layer.set(attention_tpl=None, feed_forward_tpl=_experts()),
        (
            key("moe_intermediate_size", "layer.hidden_dims", 7688),
            key("moe_shared_expert_intermediate_size", EXPERTS + "shared_tpl.hidden_dims", 7688),
            key("n_routed_experts", EXPERTS + "num_experts", 8),
            key("num_experts_per_tok", EXPERTS + "num_experts_per_token", 2),
            key("routed_scaling_factor", _ROUTER + "weight_scale", 1.0),
            key("norm_topk_prob", _ROUTER + "renormalize", default=True),
            key("n_group", _ROUTER + "num_expert_groups", 1),
            key("topk_group", _ROUTER + "num_chosen_groups", 1),
            key("mlp_bias", EXPERTS + "shared_tpl.has_bias", default=False),
            fixed("n_shared_experts", 1),
            _ACTIVATION,
        ),
    ),
}

_MIXER, _ATTENTION, _FEED_FORWARD = BACKBONE + "mixer.", LAYER + "attention/", "feed_forward/"


def _feed_forward_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    inside = LAYER + _FEED_FORWARD + ours
    return layer_rows({inside + name: f"{_MIXER}{theirs}{name}_proj" for name in ("up", "down")})


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    network=_network,
    entries=(
        fixed("tie_word_embeddings", value=False),
        Entry(lambda file, network: put_embedding(network, tied=False)),
        mixed_layers(
            (
                key("vocab_size", "vocab_size", 131072),
                key("hidden_size", "model_dims", 4096),
                key("num_attention_heads", "num_heads", 32),
                key("num_key_value_heads", "num_kv_heads", 8, fallback=lambda lm: lm.num_heads),
                Entry(_read_head_size, lambda network: {"head_dim": network.dim_per_head}),
                key("layer_norm_epsilon", NORM_EPSILONS, 1e-5),
                key("attention_dropout", "layer.attention_tpl.dropout_rate", 0.0),
            ),
            _KINDS,
            read_types=_read_types,
            write_types=_write_types,
        ),
    ),
    rows=(
        *embedding_rows("backbone.embeddings.weight"),
        *layer_rows({"lm/final_norm": "backbone.norm_f"}),
        # A layer has one of the two.
        *layer_rows({LAYER + "attention_norm": BACKBONE + "norm"}),
        *layer_rows({LAYER + "feed_forward_norm": BACKBONE + "norm"}),
        *layer_rows(
            {
                _ATTENTION + name: f"{_MIXER}{name[0]}_proj"
                for name in ("query", "key", "value", "output")
            },
            instead_of=RECURRENT_WEIGHT,
        ),
        *mixer_rows(_MIXER),
        *_feed_forward_rows("", ""),
        *_feed_forward_rows("", "experts.{expert}."),
        *_feed_forward_rows("shared/", "shared_experts."),
        *layer_rows({LAYER + _FEED_FORWARD + "router": _MIXER + "gate"}),
        Row(_MIXER + "gate.e_score_correction_bias", LAYER + _FEED_FORWARD + "router/score_bias"),
    ),
    # Transformers ignores the number of layers beside the pattern, `n_shared_experts`, and the
    # keys of other norms and of rotary positions.
    neutral=MIXER_NEUTRAL
    | {"chunk_size", "expand", "mamba_ssm_cache_dtype", "max_position_embeddings"}
    | {"moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type"}
    | {"norm_eps", "num_hidden_layers", "num_logits_to_keep", "partial_rotary_factor"}
    | {"rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "rope_theta"}
    | {"time_step_limit", "use_mamba_kernels"},
    prefix="backbone.",
    counts=("hybrid_override_pattern", "layers_block_type"),
)
