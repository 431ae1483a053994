"""Gemma 4 text (Gemma team, 2026): larger heads in far layers, whose values are their keys.

Values have a norm without weights, and each layer a stored factor of its output. 26B-A4B has also
experts. E2B and E4B embed tokens for each layer, and their last layers read keys and values of
others. The text of `gemma4`, which also reads images, is exported as `gemma4_text`.
"""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.gemma4_experts import MIXTURE, MIXTURE_ROWS
from layerkit.interop.hugging_face.families.gemma4_small import GEMMA4_SMALL, GEMMA4_SMALL_ROWS
from layerkit.interop.hugging_face.families.llama import (
    ATTENTION_BIAS,
    LAYER,
    LLAMA_ROWS,
    THEIR_LAYER,
    llama_entries,
    llama_family,
    llama_network,
)
from layerkit.interop.hugging_face.family import text_part
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, all_layers, key
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, layer_types, stack_layers
from layerkit.interop.hugging_face.parts import activation
from layerkit.interop.hugging_face.rotary import rotary_config, rotary_parameters
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import RmsNormNoScale

_ROTARY: dict[str, dict[str, Any]] = {
    NEAR: {"rope_type": "default", "rope_theta": 10_000.0},
    FAR: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_SIZES = {"head_dim": "dim_per_head", "num_key_value_heads": "num_kv_heads"}


def _network() -> Config:
    return llama_network(
        norm_policy="pre_post",
        qk_norm=True,
        has_output_scale=True,
        attention={"logit_scale": 1.0, "value_norm_tpl": RmsNormNoScale.HParams.config()},
    )


def _one_of_six(file: ConfigFile, layer: int) -> str:
    is_last = layer + 1 == file.get("num_hidden_layers")
    return FAR if is_last or (layer + 1) % 6 == 0 else NEAR


def _set_sizes(file: ConfigFile, network: Config, layers: list[Config]) -> None:
    """Set the sizes of heads of each layer, which Transformers 5 writes in another key."""
    near = {field: getattr(network, field) for field in _SIZES.values()}
    for template in layers:
        attention = template.attention_tpl
        if attention.window is not None:
            template.set(**near)
            attention.values_are_keys = False
        elif template.num_kv_heads is None or not attention.values_are_keys:
            template.num_kv_heads = network.num_kv_heads
    overrides = file.get("per_layer_config", None)
    if overrides is not None:
        sizes = {
            int(layer): {_SIZES[name]: size for name, size in one.items()}
            for layer, one in overrides.items()
        }
        for layer, template in enumerate(layers):
            template.set(**{**near, **sizes.get(layer, {})})


def _read_layers(file: ConfigFile, network: Config) -> None:
    templates = [template.clone() for template in all_layers(network)]
    kinds = [FAR if layer.attention_tpl.window is None else NEAR for layer in templates]
    if kinds[-1] == NEAR:
        raise file.invalid("layer_types", f"{FAR!r} for the last layer, as Transformers requires")
    if file.get("use_bidirectional_attention", None) not in (None, "vision"):
        raise file.invalid("use_bidirectional_attention", "null, or 'vision', which is for images")
    _set_sizes(file, network, templates)
    parameters = file.get("rope_parameters", None) or _ROTARY
    if not set(kinds) <= set(parameters):
        raise file.invalid("rope_parameters", f"keys {NEAR!r} and {FAR!r}")
    for attention, kind in zip((one.attention_tpl for one in templates), kinds, strict=True):
        attention.value_norm_tpl.epsilon = network.final_norm_tpl.epsilon
        attention.rotary_tpl = rotary_config(file, parameters[kind])
    network.set(stack_tpl=stack_layers(templates), dim_per_head=None, num_kv_heads=None)


def _write_layers(network: Config) -> dict[str, Any]:
    layers = {layer.attention_tpl.window is None: layer for layer in reversed(all_layers(network))}
    far, near = layers[True], layers.get(False, layers[True])
    values_are_keys = far.attention_tpl.values_are_keys
    return {
        **{name: getattr(near, field) for name, field in _SIZES.items()},
        "global_head_dim": far.dim_per_head,
        "num_global_key_value_heads": far.num_kv_heads if values_are_keys else None,
        "attention_k_eq_v": values_are_keys,
        "rope_parameters": {
            kind: rotary_parameters(layer.attention_tpl.rotary_tpl)
            for kind, layer in ((NEAR, near), (FAR, far))
        },
    }


GEMMA4_TEXT = llama_family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    network=_network,
    entries=(
        *llama_entries(
            tied=True,
            scale_by_sqrt_dims=True,
            kv_heads=4,
            head_dim=256,
            qk_norm=True,
            positions=Entry(lambda file, network: None),  # in `_read_layers`
            nonlinearity=activation("hidden_activation", "gelu_pytorch_tanh"),
        ),
        key("final_logit_softcapping", "softmax_tpl.logit_soft_cap", None),
        ATTENTION_BIAS,
        MIXTURE,
        # Of far layers; `_read_layers` sets those of the others, and `_write_layers` writes all.
        key("attention_k_eq_v", "layer.attention_tpl.values_are_keys", default=False),
        key("global_head_dim", "layer.dim_per_head", 512),
        key("num_global_key_value_heads", "layer.num_kv_heads", None),
        layer_types(_one_of_six, default_window=512),
        Entry(_read_layers, _write_layers),
        GEMMA4_SMALL,
    ),
    rows=(
        *LLAMA_ROWS,
        *MIXTURE_ROWS,
        *GEMMA4_SMALL_ROWS,
        Row(THEIR_LAYER + "layer_scalar", LAYER + "output_scale"),
    ),
    # Published folders have them in layers that read those of others.
    unread=("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight"),
    token_ids={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
)

_TOKENS = {f"{name}_token_id" for name in ("audio", "boa", "boi", "eoa", "eoi", "image", "video")}

GEMMA4 = text_part(
    GEMMA4_TEXT,
    "gemma4",
    prefix="model.",
    renamed=("model.", "model.language_model."),
    others=r"^model\.((vision|audio)_tower|embed_(vision|audio))\.",
    neutral=frozenset(
        {*_TOKENS, "eoa_token_index", "audio_config", "vision_soft_tokens_per_image"}
    ),
)
