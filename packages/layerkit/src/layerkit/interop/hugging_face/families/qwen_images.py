"""Images of Qwen-VL: a tower with rotary positions of rows and columns, and a merger of patches.

Text has positions of time, row and column. A patch is embedded as that of a video of two equal
frames; videos are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.clip import TABLE, tower
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, get_field, key, set_field
from layerkit.interop.hugging_face.layouts import LINEAR
from layerkit.interop.hugging_face.parts import activation, layer_rows, nested
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import BaseNormalization
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.vision.image_embedding import ImageEmbedding
from layerkit.layers.vision.vision_transformer import VisionTransformer

_IMAGES = "lm_tpl.images_tpl."
_ROTARY = "layer.attention_tpl.rotary_tpl"
TOKENS = frozenset(
    {f"{name}_token_id" for name in ("video", "vision", "vision_start", "vision_end")}
)
"""Keys of tokens of which the model needs none: those of videos and around images."""


def add_images(network: Config, norm: Config[BaseNormalization], **fields: Any) -> Config:
    """Return a network of texts with the images of Qwen-VL.

    Args:
      network: Config of the network, which is changed.
      norm: Norm of the tower.
      **fields: Fields of the tower.
    """
    images: Any = ImageEmbedding.HParams.config(has_grid_positions=True)
    images.tower_tpl = tower(VisionTransformer, has_grid_positions=True, **fields)
    images.tower_tpl.final_norm_tpl = norm.clone()
    set_field(images.tower_tpl, "layer.norm_tpl", norm.clone())
    images.projector_tpl.merge = "concatenate"
    network.images_tpl = images
    return network


def _read_rotary(file: ConfigFile, network: Config) -> None:
    parameters = file.get("rope_parameters", None) or {}
    theta = parameters.get("rope_theta", 10_000.0)
    if parameters not in ({}, {"rope_theta": theta, "rope_type": "axial"}):
        raise file.invalid("rope_parameters", "rope_theta and the rope_type 'axial'")
    pairs = network.model_dims // network.num_heads // 4
    if pairs * network.num_heads * 4 != network.model_dims:
        raise file.invalid("num_heads", "a size of heads, hidden_size / num_heads, of 4 · n")
    rotary = RotaryPositionalEmbedding.HParams.config(max_timescale=float(theta))
    rotary.set(sections=(0, pairs, pairs), section_order="axial")
    set_field(network, _ROTARY, rotary)


def _write_rotary(network: Config) -> dict[str, Any]:
    theta = get_field(network, _ROTARY).max_timescale
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "axial"}}


def _read_outputs(file: ConfigFile, model: Config) -> None:
    if file.get("out_hidden_size", 3584) != model.lm_tpl.model_dims:
        raise file.invalid("out_hidden_size", f"{model.lm_tpl.model_dims}, the hidden_size of text")


def image_entries(
    *sizes: int,
    act: str,
    patch_size: int,
    image_token: int,
    entries: tuple[Entry, ...] = (),
    model_entries: tuple[Entry, ...] = (),
    neutral: frozenset[str] = frozenset(),
) -> tuple[Entry, ...]:
    """Return the entries of `vision_config` and of the placeholder, to be read after those of text.

    Args:
      *sizes: Defaults of the model dimension, the hidden dimension, the layers and the heads.
      act: Default of the activation.
      patch_size: Default of the size of a patch.
      image_token: Default of the id of a placeholder.
      entries: Further entries of the tower.
      model_entries: Further entries of the model.
      neutral: Keys of `vision_config` that do not change the computation.
    """
    dims, hidden_dims, num_layers, num_heads = sizes
    vision = nested(
        "vision_config",
        _IMAGES + "tower_tpl",
        key("hidden_size", "model_dims", dims),
        key("intermediate_size", "hidden_dims", hidden_dims),
        key("depth", "num_layers", num_layers),
        key("num_heads", "num_heads", num_heads),
        activation("hidden_act", act),
        key("in_channels", "patch_tpl.channels", 3),
        key("patch_size", "patch_tpl.patch_size", patch_size),
        key("temporal_patch_size", "patch_tpl.num_frames", 2),
        Entry(_read_rotary, _write_rotary),
        *entries,
        model_entries=(
            key("spatial_merge_size", _IMAGES + "projector_tpl.merged", 2),
            Entry(_read_outputs, lambda model: {"out_hidden_size": model.lm_tpl.model_dims}),
            *model_entries,
        ),
        neutral=neutral,
    )
    return vision, key("image_token_id", _IMAGES + "token_id", image_token)


def image_rows(
    prefix: str, feed_forward: Mapping[str, str], *, norm: str, maps: tuple[str, str]
) -> tuple[Row, ...]:
    """Return the rows of the tower and the merger.

    Args:
      prefix: Start of the names of tensors.
      feed_forward: Names of the linear maps of a feed-forward by ours.
      norm: Name of the norm of the merger, which is the last one of our tower.
      maps: Names of the linear maps of the merger.
    """
    ours, projector = "lm/images/tower/", "lm/images/projector/mlp/layers_"
    merger, linears = prefix + "merger.", [*enumerate(maps)]
    layer, theirs = ours + "stack/{layer}/", prefix + "blocks.{layer}."
    patches = "out channel frame row column -> frame row column channel out"
    joined = ("query", "key", "value")
    names = {f"{layer}feed_forward/{a}": f"{theirs}mlp.{b}" for a, b in feed_forward.items()}
    return (
        Row(prefix + "patch_embed.proj.weight", ours + "patches/w", patches),
        Row(prefix + "patch_embed.proj.bias", ours + "patches/b"),
        Row(prefix + "pos_embed.weight", ours + "position/w", TABLE),
        *layer_rows(
            {f"{layer}attention/{name}": theirs + "attn.qkv" for name in joined}, joined_axis=0
        ),
        *layer_rows(
            {
                layer + "attention/output": theirs + "attn.proj",
                layer + "attention_norm": theirs + "norm1",
                layer + "feed_forward_norm": theirs + "norm2",
                ours + "final_norm": merger + norm,
                **names,
            }
        ),
        *(Row(f"{merger}{b}.weight", f"{projector}{a}/linear/w", LINEAR) for a, b in linears),
        *(Row(f"{merger}{b}.bias", f"{projector}{a}/bias/b") for a, b in linears),
    )
