"""Gemma 3 with images (Gemma team, 2025): five layers with a window to each of full attention.

Both kinds have separate rotary positions. Unlike in Gemma 2, queries and keys have norms instead of
a logit cap. `gemma3` adds the tower of SigLIP, whose patches are averaged. The tokens of an image
attend to one another.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.clip import (
    DROPOUT,
    LAYER,
    PATCHES,
    TABLE,
    image_entries,
    tower,
    tower_entries,
    tower_rows,
)
from layerkit.interop.hugging_face.families.gemma2 import (
    GEMMA_NEUTRAL,
    gemma_entries,
    gemma_network,
)
from layerkit.interop.hugging_face.families.llama import llama_family
from layerkit.interop.hugging_face.family import text_part
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, all_layers, fixed, key
from layerkit.interop.hugging_face.layer_types import FAR, NEAR, alternate, layer_types
from layerkit.interop.hugging_face.parts import layer_rows, nested
from layerkit.interop.hugging_face.rotary import rotary_keys, rotary_of_kinds
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.normalizations import RmsNorm
from layerkit.layers.vision.image_embedding import ImageEmbedding
from layerkit.layers.vision.vision_transformer import VisionTransformer

_THETAS = {FAR: ("rope_theta", 1_000_000.0), NEAR: ("rope_local_base_freq", 10_000.0)}
_FAR_ROTARY, _make_near = rotary_of_kinds(_THETAS)


def _thetas(near: Config | None, far: Config | None) -> dict[str, Any]:
    content: dict[str, Any] = dict(_THETAS.values())
    if far is not None:
        content |= rotary_keys(far.attention_tpl.rotary_tpl)
    if near is not None:
        content["rope_local_base_freq"] = near.attention_tpl.rotary_tpl.max_timescale
    return content


GEMMA3_TEXT = llama_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    network=lambda: gemma_network(qk_norm=True),
    entries=(
        *gemma_entries(
            attention_cap=None,
            final_cap=None,
            qk_norm=True,
            positions=_FAR_ROTARY,
        ),
        layer_types(
            alternate(6, key="sliding_window_pattern"),
            default_window=4096,
            make_near=_make_near,
            write_more=_thetas,
        ),
    ),
    neutral=GEMMA_NEUTRAL | {"rope_local_base_freq"},
)

_TOWER, _PROJECTOR = "lm_tpl.images_tpl.tower_tpl", "lm_tpl.images_tpl.projector_tpl."
# Those of `Gemma3TextConfig`, which the files of published models leave out.
_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


def _network() -> Config:
    network: Any = gemma_network(qk_norm=True)
    images: Any = ImageEmbedding.HParams.config(sees_whole_image=True)
    images.tower_tpl = tower(VisionTransformer)
    norm = RmsNorm.HParams.config(scale_offset=1.0)
    images.projector_tpl.set(norm_tpl=norm, hidden_dims=())
    images.projector_tpl.mlp_tpl.has_bias = False
    network.images_tpl = images
    return network


def _read_tokens(file: ConfigFile, model: Config) -> None:
    images = model.lm_tpl.images_tpl
    tokens, side = file.get("mm_tokens_per_image", 256), images.tower_tpl.position_grid[0]
    columns = math.isqrt(tokens)
    if not tokens or columns**2 != tokens or side % columns:
        raise file.invalid("mm_tokens_per_image", f"the square of a divisor of {side}")
    windows = [layer.attention_tpl.window for layer in all_layers(model.lm_tpl)]
    smallest = min((window for window in windows if window is not None), default=tokens)
    if smallest < tokens:
        expected = f"at most {smallest}, the window, beyond which ours hides tokens of an image"
        raise file.invalid("mm_tokens_per_image", expected)
    images.projector_tpl.merged = side // columns


def _write_tokens(model: Config) -> dict[str, Any]:
    images = model.lm_tpl.images_tpl
    columns = images.tower_tpl.position_grid[0] // images.projector_tpl.merged
    return {"mm_tokens_per_image": columns**2}


def _read_epsilon(file: ConfigFile, model: Config) -> None:
    epsilon = file.get("layer_norm_eps", 1e-6)
    model.lm_tpl.images_tpl.projector_tpl.norm_tpl.epsilon = epsilon


_IMAGES, _TENSORS = "lm/images/tower", "vision_tower.vision_model."
_EMBEDDINGS = _TENSORS + "embeddings."
_TEXT = text_part(
    GEMMA3_TEXT,
    "gemma3",
    prefix="",
    renamed=("", "language_model."),
    others="(?!)",
    neutral=frozenset(),
)
GEMMA3 = dataclasses.replace(
    _TEXT,
    neutral=frozenset({"boi_token_index", "eoi_token_index"}),
    architecture="Gemma3ForConditionalGeneration",
    text_of=None,
    network=_network,
    entries=(),
    model_entries=(
        nested(
            "text_config",
            "lm_tpl",
            *GEMMA3_TEXT.entries,
            defaults=_TEXT_DEFAULTS,
            shared=("tie_word_embeddings",),
            neutral=GEMMA3_TEXT.neutral,
        ),
        nested(
            "vision_config",
            _TOWER,
            *tower_entries(768, 3072, 12, 12, epsilon=1e-6, act="gelu_pytorch_tanh"),
            *image_entries(16),
            DROPOUT,
            fixed("vision_use_head", value=False),
            model_entries=(Entry(_read_epsilon),),
        ),
        Entry(_read_tokens, _write_tokens),
        key("image_token_index", "lm_tpl.images_tpl.token_id", 262_144),
    ),
    rows=(
        *_TEXT.rows,
        Row(_EMBEDDINGS + "patch_embedding.weight", _IMAGES + "/patches/w", PATCHES),
        Row(_EMBEDDINGS + "patch_embedding.bias", _IMAGES + "/patches/b"),
        Row(_EMBEDDINGS + "position_embedding.weight", _IMAGES + "/position/w", TABLE),
        *tower_rows(_IMAGES, _TENSORS + "encoder.layers.", LAYER),
        *layer_rows({_IMAGES + "/final_norm": _TENSORS + "post_layernorm"}),
        Row(
            "multi_modal_projector.mm_input_projection_weight",
            "lm/images/projector/mlp/layers_0/linear/w",
            "in out -> in out",
        ),
        Row("multi_modal_projector.mm_soft_emb_norm.weight", "lm/images/projector/norm/scale"),
    ),
    # Transformers 5 leaves out a part of the names.
    other_names={r"^vision_tower\.vision_model\.": "vision_tower."},
    counts=("text_config.num_hidden_layers", "vision_config.num_hidden_layers"),
)
