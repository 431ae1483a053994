"""ViT (Dosovitskiy et al., 2020): a Transformer over patches of images, with a classifier."""

from __future__ import annotations

from typing import Any

from layerkit.config import Config
from layerkit.interop.hugging_face.families.clip import (
    PATCHES,
    image_entries,
    tower,
    tower_entries,
    tower_rows,
)
from layerkit.interop.hugging_face.family import Family
from layerkit.interop.hugging_face.keys import ConfigFile, Entry, fixed, key
from layerkit.interop.hugging_face.layouts import LINEAR
from layerkit.interop.hugging_face.parts import layer_rows
from layerkit.interop.hugging_face.tensors import Row
from layerkit.layers.vision.vision_transformer import VisionTransformer
from layerkit.models.classification_model import ClassificationModel


def _read_labels(file: ConfigFile, model: Config) -> None:
    labels = file.get("id2label", {0: "LABEL_0", 1: "LABEL_1"})
    model.softmax_tpl.set(num_classes=len(labels), input_dims=model.network_tpl.model_dims)


def _write_labels(model: Config) -> dict[str, Any]:
    names = {str(n): f"LABEL_{n}" for n in range(model.softmax_tpl.num_classes)}
    return {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}


_LAYER = {
    **{f"attention/{name}": f"attention.attention.{name}" for name in ("query", "key", "value")},
    "attention/output": "attention.output.dense",
    "attention_norm": "layernorm_before",
    "feed_forward_norm": "layernorm_after",
    "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
}
_EMBEDDINGS = "vit.embeddings."

VIT = Family(
    model_type="vit",
    architecture="ViTForImageClassification",
    model_class=ClassificationModel,
    network_field="network_tpl",
    network=lambda: tower(VisionTransformer, has_class_token=True, output="class_token"),
    entries=(
        *tower_entries(768, 3072, 12, 12, epsilon=1e-12, act="gelu"),
        *image_entries(16),
        key("hidden_dropout_prob", ("dropout_rate", "layer.dropout_rate"), 0.0),
        key("attention_probs_dropout_prob", "layer.attention_tpl.dropout_rate", 0.0),
        fixed("qkv_bias", value=True),
    ),
    model_entries=(Entry(_read_labels, _write_labels),),
    neutral=frozenset({"encoder_stride", "pooler_act", "pooler_output_size"}),
    rows=(
        Row(_EMBEDDINGS + "cls_token", "network/class_token", "() one embed -> one embed"),
        Row(_EMBEDDINGS + "position_embeddings", "network/position/w", "() row embed -> row embed"),
        Row(_EMBEDDINGS + "patch_embeddings.projection.weight", "network/patches/w", PATCHES),
        Row(_EMBEDDINGS + "patch_embeddings.projection.bias", "network/patches/b"),
        *tower_rows("network", "vit.encoder.layer.", _LAYER),
        *layer_rows({"network/final_norm": "vit.layernorm"}),
        Row("classifier.weight", "softmax/w", LINEAR),
        Row("classifier.bias", "softmax/b"),
    ),
)
