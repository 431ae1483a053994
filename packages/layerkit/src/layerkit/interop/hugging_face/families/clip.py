"""CLIP and SigLIP (Radford et al., 2021; Zhai et al., 2023): a tower for images, one for texts.

The text of CLIP is causal and read at its first end token. That of SigLIP is bidirectional and
read at its last position, and its images are pooled by attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, key
from layerkit.interop.hugging_face.layouts import BIAS_OF_HEADS, INTO_HEADS, LINEAR
from layerkit.interop.hugging_face.parts import activation, layer_rows, nested
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.basic.elementwise import Identity
from layerkit.layers.basic.linears import FeedForward
from layerkit.layers.basic.normalizations import LayerNorm
from layerkit.layers.basic.positions import TrainablePositionalEmbedding
from layerkit.layers.transformer.stacks import StackedTransformerRepeated
from layerkit.layers.transformer.transformer import Transformer
from layerkit.layers.vision.contrastive import ContrastiveLoss
from layerkit.layers.vision.vision_transformer import AttentionPooling, VisionTransformer
from layerkit.models.contrastive_model import ContrastiveModel
from layerkit.models.transformer_lm import TransformerLm

TABLE = "rows embed -> rows embed"
PATCHES = "out channel row column -> row column channel out"
NORMS = ("final_norm_tpl", "layer.norm_tpl")


def tower(network: Any, **fields: Any) -> Config:
    """Return the config of a network of images or texts, with biases and norms before branches."""
    norm = LayerNorm.HParams.config(scale_offset=0.0)
    layer: Any = Transformer.HParams.config(norm_tpl=norm)
    layer.attention_tpl.use_bias = layer.feed_forward_tpl.has_bias = True
    stack = StackedTransformerRepeated.HParams.config(layer_tpl=layer)
    config: Config = network.HParams.config(stack_tpl=stack, final_norm_tpl=norm.clone(), **fields)
    return config


def tower_entries(
    *sizes: int, epsilon: float, act: str, norms: tuple[str, ...] = NORMS
) -> tuple[Entry, ...]:
    """Return the entries of a tower, with the defaults of its sizes, epsilon and activation."""
    names = {
        "hidden_size": "model_dims",
        "intermediate_size": "hidden_dims",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    }
    return (
        *(key(name, field, size) for (name, field), size in zip(names.items(), sizes, strict=True)),
        key("layer_norm_eps", tuple(f"{norm}.epsilon" for norm in norms), epsilon),
        activation("hidden_act", act),
    )


def image_entries(patch_size: int) -> tuple[Entry, ...]:
    """Return the entries of images and their patches, of a default size."""

    def read(file: ConfigFile, network: Config) -> None:
        image, patch = file.get("image_size", 224), file.get("patch_size", patch_size)
        network.patch_tpl.set(patch_size=patch, remainder=image % patch)
        network.position_grid = (image // patch, image // patch)

    def write(network: Config) -> dict[str, Any]:
        size, rest = network.patch_tpl.patch_size, network.patch_tpl.remainder
        return {"image_size": network.position_grid[0] * size + rest, "patch_size": size}

    return (Entry(read, write), key("num_channels", "patch_tpl.channels", 3))


DROPOUT = key("attention_dropout", "layer.attention_tpl.dropout_rate", 0.0)
_NEUTRAL = frozenset({"projection_dim"})


def _images_of(patch_size: int, norm: str, *entries: Entry, epsilon: float, act: str) -> Entry:
    sizes, norms = (768, 3072, 12, 12), (*NORMS, norm)
    entries_of_tower = tower_entries(*sizes, epsilon=epsilon, act=act, norms=norms)
    rest = (*image_entries(patch_size), DROPOUT, *entries)
    return nested("vision_config", "vision_tpl", *entries_of_tower, *rest, neutral=_NEUTRAL)


def _texts_of(*sizes: int, vocab: int, length: int, last: Entry, **defaults: Any) -> Entry:
    return nested(
        "text_config",
        "text_tpl",
        *tower_entries(*sizes, **defaults),
        key("vocab_size", "vocab_size", vocab),
        key("max_position_embeddings", "position_tpl.max_length", length),
        DROPOUT,
        model_entries=(last,),
        neutral=_NEUTRAL,
    )


def _read_end(file: ConfigFile, model: Config) -> None:
    end = file.get("eos_token_id", 49407)
    # Transformers takes 2, of the first published files, for the largest id.
    model.text_end_id = model.text_tpl.vocab_size - 1 if end == 2 else end


_END = Entry(_read_end, lambda model: {"eos_token_id": model.text_end_id})
_PROJECTION = key(
    "projection_size", "embed_dims", None, fallback=lambda model: model.text_tpl.model_dims
)


def _add_texts(model: Config, *, is_causal: bool) -> None:
    positions = TrainablePositionalEmbedding.HParams.config()
    model.text_tpl = tower(TransformerLm, position_tpl=positions, is_causal=is_causal)


def _add_siglip(file: ConfigFile, model: Config) -> None:
    del file
    _add_texts(model, is_causal=False)
    linear = Identity.HParams.config()
    model.text_projection_tpl = FeedForward.HParams.config(activation_tpl=linear)
    model.image_projection_tpl = None
    model.loss_tpl = ContrastiveLoss.HParams.config(kind="sigmoid")


def _clip_images() -> Config:
    network = tower(VisionTransformer, has_class_token=True, output="class_token")
    network.embedding_norm_tpl = LayerNorm.HParams.config(scale_offset=0.0)
    network.patch_tpl.use_bias = False
    return network


def _siglip_images() -> Config:
    norm = LayerNorm.HParams.config(scale_offset=0.0)
    return tower(VisionTransformer, pool_tpl=AttentionPooling.HParams.config(norm_tpl=norm))


def tower_rows(ours: str, theirs: str, names: Mapping[str, str]) -> tuple[Row, ...]:
    """Return the rows of the layers of a stack, from paths within a layer to names within it."""
    return layer_rows(
        {f"{ours}/stack/{{layer}}/{a}": f"{theirs}{{layer}}.{b}" for a, b in names.items()}
    )


LAYER = {
    **{f"attention/{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
    "attention/output": "self_attn.out_proj",
    "attention_norm": "layer_norm1",
    "feed_forward_norm": "layer_norm2",
    "feed_forward/up": "mlp.fc1",
    "feed_forward/down": "mlp.fc2",
}
_CLIP: dict[str, Any] = {"epsilon": 1e-5, "act": "quick_gelu"}
_SIGLIP: dict[str, Any] = {"epsilon": 1e-6, "act": "gelu_pytorch_tanh"}
_HEAD, _POOL = "vision_model.head.", "vision/pool/"
_IMAGES, _TEXTS = "vision_model.embeddings.", "text_model.embeddings."
_ROWS = (
    Row(_IMAGES + "patch_embedding.weight", "vision/patches/w", PATCHES),
    Row(_IMAGES + "position_embedding.weight", "vision/position/w", TABLE),
    Row(_TEXTS + "token_embedding.weight", "text/softmax/w", TABLE),
    Row(_TEXTS + "position_embedding.weight", "text/position/w", TABLE),
    *tower_rows("vision", "vision_model.encoder.layers.", LAYER),
    *tower_rows("text", "text_model.encoder.layers.", LAYER),
    *layer_rows(
        {
            "vision/final_norm": "vision_model.post_layernorm",
            "text/final_norm": "text_model.final_layer_norm",
        }
    ),
)
_SHARED: dict[str, Any] = {
    "model_class": ContrastiveModel,
    "network_field": "vision_tpl",
    "entries": (),
    "buffers": r"\bposition_ids$",
    "counts": ("vision_config.num_hidden_layers", "text_config.num_hidden_layers"),
}

CLIP = Family(
    model_type="clip",
    architecture="CLIPModel",
    network=_clip_images,
    model_entries=(
        Entry(lambda _, model: _add_texts(model, is_causal=True)),
        key("projection_dim", "embed_dims", 512),
        _images_of(32, "embedding_norm_tpl", **_CLIP),
        _texts_of(512, 2048, 12, 8, vocab=49408, length=77, last=_END, **_CLIP),
    ),
    neutral=frozenset({"logit_scale_init_value"}),
    rows=(
        Row(_IMAGES + "class_embedding", "vision/class_token", "(one embed) -> one embed"),
        *_ROWS,
        *layer_rows({"vision/embedding_norm": "vision_model.pre_layrnorm"}),
        Row("visual_projection.weight", "image_projection/w", LINEAR),
        Row("text_projection.weight", "text_projection/w", LINEAR),
        Row("logit_scale", "loss/log_scale", "->"),
    ),
    **_SHARED,
)
SIGLIP = Family(
    model_type="siglip",
    architecture="SiglipModel",
    network=_siglip_images,
    model_entries=(
        Entry(_add_siglip),
        _images_of(
            16,
            "pool_tpl.norm_tpl",
            activation("hidden_act", _SIGLIP["act"], "pool_tpl.feed_forward_tpl.activation_tpl"),
            fixed("vision_use_head", value=True),
            **_SIGLIP,
        ),
        _texts_of(768, 3072, 12, 12, vocab=32000, length=64, last=_PROJECTION, **_SIGLIP),
    ),
    rows=(
        *_ROWS,
        Row(_IMAGES + "patch_embedding.bias", "vision/patches/b"),
        Row(_HEAD + "probe", _POOL + "probe", "() () dims -> dims"),
        *(
            Row(f"{_HEAD}attention.in_proj_{kind}", f"{_POOL}attention/{name}/{kind[0]}", layout, 0)
            for name in ("query", "key", "value")
            for kind, layout in (("weight", INTO_HEADS), ("bias", BIAS_OF_HEADS))
        ),
        *layer_rows(
            {
                _POOL + "attention/output": _HEAD + "attention.out_proj",
                _POOL + "norm": _HEAD + "layernorm",
                _POOL + "feed_forward/up": _HEAD + "mlp.fc1",
                _POOL + "feed_forward/down": _HEAD + "mlp.fc2",
            }
        ),
        Row("text_model.head.weight", "text_projection/linear/w", LINEAR),
        Row("text_model.head.bias", "text_projection/bias/b"),
        Row("logit_scale", "loss/log_scale", "() ->"),
        Row("logit_bias", "loss/bias", "() ->"),
    ),
    **_SHARED,
)
