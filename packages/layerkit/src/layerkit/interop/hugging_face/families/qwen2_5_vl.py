"""Qwen2.5-VL (Qwen team, 2025): Qwen 2.5 and a tower with windows for images.

Most layers of the tower attend within windows of patches. Folders have the keys of the text beside
the others, as published, or in `text_config`. Source: Bai et al., 2025 (arXiv:2502.13923).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.llama import EQUAL_HEADS, llama_entries
from layerkit.interop.hugging_face.families.qwen2 import QWEN2, qwen_layers
from layerkit.interop.hugging_face.families.qwen_images import (
    TOKENS,
    add_images,
    image_entries,
    image_rows,
)
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, all_layers, set_field
from layerkit.interop.hugging_face.layer_types import stack_layers
from layerkit.interop.hugging_face.parts import gated_names, nested
from layerkit.interop.hugging_face.rotary import rotary
from layerkit.layers.basic.normalizations import RmsNorm


def _network() -> Config:
    network = add_images(QWEN2.network(), RmsNorm.HParams.config(scale_offset=0.0))
    tower: Any = network.images_tpl.tower_tpl
    tower.set(position_tpl=None)
    tower.patch_tpl.use_bias = False
    set_field(tower, "layer.feed_forward_tpl.use_gate", value=True)
    return network


def _read_windows(file: ConfigFile, model: Config) -> None:
    images = model.lm_tpl.images_tpl
    tower, merged = images.tower_tpl, images.projector_tpl.merged
    size = file.get("window_size", 112) // merged // tower.patch_tpl.patch_size * merged
    full = file.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not size:
        raise file.invalid("window_size", "at least the pixels of a token")
    layers = [tower.stack_tpl.layer_tpl.clone() for _ in range(tower.num_layers)]
    for number, layer in enumerate(layers):
        layer.attention_tpl.chunk = None if number in full else size**2
    tower.set(window_size=size, stack_tpl=stack_layers(layers))


def _write_windows(model: Config) -> dict[str, Any]:
    tower = model.lm_tpl.images_tpl.tower_tpl
    layers = enumerate(all_layers(tower))
    return {
        "window_size": tower.window_size * tower.patch_tpl.patch_size,
        "fullatt_block_indexes": [n for n, layer in layers if layer.attention_tpl.chunk is None],
    }


_ENTRIES = (
    *llama_entries(kv_heads=8, epsilon=1e-5, positions=rotary(1_000_000.0, sections=(16, 24, 24))),
    EQUAL_HEADS,
    qwen_layers(first_near=80),
)
_TEXT = nested(
    "text_config", "lm_tpl", *_ENTRIES, shared=("tie_word_embeddings",), neutral=QWEN2.neutral
)


def _read_text(file: ConfigFile, model: Config) -> None:
    if file.get("text_config", None) is not None:
        _TEXT.read(file, model)
    else:
        for entry in _ENTRIES:
            entry.read(file, model.lm_tpl)


QWEN2_5_VL = dataclasses.replace(
    QWEN2,
    model_type="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    network=_network,
    entries=(),
    model_entries=(
        Entry(_read_text, _TEXT.write),
        *image_entries(
            *(3584, 3420, 32, 16),
            act="silu",
            patch_size=14,
            image_token=151_655,
            model_entries=(Entry(_read_windows, _write_windows),),
            # Transformers reads none of the last two.
            neutral=frozenset({"tokens_per_second", "in_chans", "spatial_patch_size"}),
        ),
    ),
    neutral=QWEN2.neutral | TOKENS,
    rows=(
        *QWEN2.rows,
        *image_rows("visual.", gated_names("", ""), norm="ln_q", maps=("mlp.0", "mlp.2")),
    ),
    other_names={r"^model\.": "model.language_model.", r"^visual\.": "model.visual."},
    counts=(*QWEN2.counts, "text_config.num_hidden_layers", "vision_config.depth"),
)
