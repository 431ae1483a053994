"""The matrices of weights, by the dimensions that layers declare."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from layerkit import layers
from layerkit.base.base_layer import PARAMS
from layerkit.config import Config
from layerkit.layers.attention.base_attention import HeadProjection, OutputProjection
from layerkit.layers.attention.combined_projection import CombinedProjection
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.quantization.lora import add_lora
from layerkit_runner.optim.matrix.matrices import (
    all_but_matrices,
    as_matrices,
    matrix_dims,
)

FFN = layers.TransformerFeedForward.HParams.config(input_dims=4, hidden_dims=6, has_bias=True)
HEADS = HeadProjection.HParams.config(input_dims=4, num_heads=2, head_dim=3, use_bias=True)
QKV = CombinedProjection.HParams.config(input_dims=4, num_heads=6, num_kv_heads=2, head_dim=3)
EXPERTS = MoeFeedForward.HParams.config(
    input_dims=4, hidden_dims=6, num_experts=5, num_shared_experts=1, use_shared_gate=True
)
ADAPTER = layers.MultitaskResidualAdapter.HParams.config(
    input_dims=4, num_tasks=2, bottleneck_dims=3
)
POSITIONS = layers.TrainablePositionalEmbedding.HParams.config(dims=4, max_length=3)

OUTPUT = OutputProjection.HParams.config(num_heads=2, head_dim=3, output_dims=5)
PARTS = [(4, 18), (4, 6), (4, 6)]

MATRICES: dict[str, tuple[Any, dict[str, list[tuple[int, ...]]]]] = {
    "ffn": (FFN, {"up/w": [(4, 6)], "down/w": [(6, 4)]}),
    "repeated": (
        layers.Repeat.HParams.config(sub_tpl=FFN, num_repeats=7),
        {"sub/up/w": [(7, 4, 6)], "sub/down/w": [(7, 6, 4)]},
    ),
    "heads": (HEADS, {"w": [(4, 6)]}),
    "output": (OUTPUT, {"w": [(6, 5)]}),
    "qkv": (QKV, {"w": PARTS}),
    "qkv with LoRA": (
        add_lora(QKV, rank=2),
        {"w": PARTS, "dot/lora_a": [(4, 2)], "dot/lora_b": [(2, 18), (2, 6), (2, 6)]},
    ),
    "heads with DoRA": (
        add_lora(HEADS, rank=2, has_magnitude=True),
        {"w": [(4, 6)], "dot/lora_a": [(4, 2)], "dot/lora_b": [(2, 6)]},
    ),
    "experts": (
        EXPERTS,
        {
            "up": [(5, 4, 6)],
            "gate": [(5, 4, 6)],
            "down": [(5, 6, 4)],
            "shared/up/w": [(4, 6)],
            "shared/gate/w": [(4, 6)],
            "shared/down/w": [(6, 4)],
        },
    ),
    "adapters of tasks": (ADAPTER, {"down_w": [(2, 4, 3)], "up_w": [(2, 3, 4)]}),
    "equation": (
        layers.Einsum.HParams.config(
            equation="btgd,gdnh->btgnh", weight_shape=(5, 4, 2, 3), weight_axes=(None,) * 4
        ),
        {"w": [(5, 4, 6)]},
    ),
    "convolution": (
        layers.FlaxModule.HParams.config(
            module_tpl=Config(nn.Conv, features=6, kernel_size=(2, 3)),
            example_shapes=((1, 5, 5, 4),),
            kernels=("kernel",),
        ),
        {"module/kernel": [(24, 6)]},
    ),
    "embedding": (layers.Embedding.HParams.config(num_classes=5, input_dims=4), {}),
    "tied head": (layers.SharedEmbeddingSoftmax.HParams.config(num_classes=5, input_dims=4), {}),
    "norm": (layers.LayerNorm.HParams.config(dims=4), {}),
    "positions": (POSITIONS, {}),
    "relative bias": (layers.RelativeBias.HParams.config(num_heads=2), {}),
}


def boxes_of(template: Any) -> Any:
    return jax.eval_shape(template.Instantiate().init_boxed, jax.random.key(0))[PARAMS]


@pytest.mark.parametrize("name", MATRICES)
def test_products_are_matrices_and_other_weights_are_none(name: str):
    template, expected = MATRICES[name]
    boxes = boxes_of(template)
    flat = flatten_dict(
        jax.tree.map(lambda box: box.value, boxes, is_leaf=lambda x: hasattr(x, "axes"))
    )
    dims = flatten_dict(matrix_dims(boxes))
    shapes = {
        "/".join(path): [
            m.shape for m in jax.eval_shape(lambda x, d=dims[path]: as_matrices(x, d), x)
        ]
        for path, x in flat.items()
        if dims[path] is not None
    }
    assert shapes == expected
    others = flatten_dict(all_but_matrices(boxes), sep="/")
    assert {path for path, is_other in others.items() if not is_other} == set(expected)


def test_split_heads_gives_a_matrix_for_each_head():
    for template, shape in (
        (HEADS, (2, 4, 3)),
        (QKV, (2, 5, 4, 3)),
        (OUTPUT, (2, 3, 5)),
    ):
        boxes = boxes_of(template)
        dims = matrix_dims(boxes, split_heads=True)["w"]
        (matrices,) = jax.eval_shape(lambda x, dims=dims: as_matrices(x, dims), boxes["w"].value)
        assert matrices.shape == shape
