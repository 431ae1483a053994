from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
from layerkit.base.base_layer import BaseLayer
from layerkit.config import Config, build
from layerkit.config.field_types import FieldTypeError
from layerkit.config.hparams import Conditions
from layerkit.errors import ConfigError
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.basic.dots import unused_templates
from layerkit.layers.basic.embeddings import Embedding, FullSoftmax, SharedEmbeddingSoftmax
from layerkit.layers.basic.linears import Bias
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.transformer import TransformerFeedForward
from layerkit.models.encoder_decoder import TransformerEncoderDecoder
from layerkit.models.transformer_lm import TransformerLm

KEY = jax.random.key(0)


class Numbers(BaseLayer):
    count: int = 1
    scale: float = 1.0
    limit: float | None = None
    sizes: tuple[int, ...] = ()
    flag: bool = False
    seed: int | bool = 0
    anything: Any = None

    def setup(self):
        raise AssertionError("setup runs after the checks")


@pytest.mark.parametrize(("field", "value"), [("scale", math.nan), ("limit", -math.inf)])
def test_float_that_is_not_finite_raises(raises, field, value):
    with raises(ConfigError, field=field, value=value, expected="a finite number"):
        build(Config(Numbers, **{field: value})).init(KEY)


@pytest.mark.parametrize(("field", "value"), [("count", "8"), ("count", True), ("sizes", (1, 2.5))])
def test_value_of_another_type_raises_in_a_layer_without_config(raises, field, value):
    with raises(FieldTypeError, owner="Numbers()", field=field, value=value):
        Numbers(**{field: value}).init(KEY)


def test_types_of_a_built_layer_were_checked_by_its_config():
    with pytest.raises(AssertionError, match="setup runs after the checks"):
        build(Config(Numbers, count=np.int64(3), scale=3, sizes=[1, 2])).init(KEY)


@pytest.mark.parametrize(
    ("layer", "field"),
    [
        (L.RmsNorm(dims=4, epsilon=-1.0), "epsilon"),
        (L.RmsNormNoScale(epsilon=float("nan")), "epsilon"),
        (L.FullSoftmax(input_dims=4, num_classes=4, logit_scale=-1.0), "logit_scale"),
        (L.FullSoftmax(input_dims=4, num_classes=4, logit_soft_cap=float("inf")), "logit_soft_cap"),
        (L.Dropout(rate=1.5), "rate"),
        (L.StochasticResidual(rate=-0.1), "rate"),
        (MultiHeadAttention(input_dims=4, num_heads=2, window=True), "window"),
        (MultiHeadAttention(input_dims=4, num_heads=True), "num_heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_number_out_of_range_raises(raises, layer, field):
    with raises(ConfigError, field=field):
        layer.init(KEY, jnp.ones((1, 4)))


BIAS = Config(Bias, dtype="bfloat16")
HEADS = {"input_dims": 8, "num_heads": 2}
EXPERTS = {"input_dims": 8, "hidden_dims": 8, "num_experts": 4}
SEPARATE = Config(Embedding)


@pytest.mark.parametrize(
    ("layer_class", "fields", "ignored"),
    [
        (MultiHeadAttention, {**HEADS, "qkv_tpl.dtype": "bfloat16"}, "qkv_tpl.dtype"),
        (
            MultiHeadAttention,
            {**HEADS, "combined_qkv": True, "key_tpl.weight_axes": (None,) * 3},
            "key_tpl.weight_axes",
        ),
        (TransformerFeedForward, {"bias_tpl.dtype": "bfloat16"}, "bias_tpl.dtype"),
        (L.FeedForward, {"bias_tpl": BIAS, "has_bias": False}, "bias_tpl.dtype"),
        (MoeFeedForward, {**EXPERTS, "shared_tpl.has_bias": True}, "shared_tpl.has_bias"),
        (MoeFeedForward, {**EXPERTS, "use_gate": False, "gate_limit": 7.0}, "gate_limit"),
        *(
            (
                model,
                {"embedding_tpl": SEPARATE, "softmax_tpl.scale_by_sqrt_dims": True},
                "softmax_tpl.scale_by_sqrt_dims",
            )
            for model in (TransformerLm, TransformerEncoderDecoder)
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_field_that_another_switches_off_raises(raises, layer_class, fields, ignored):
    config = Config(layer_class)
    for path, value in fields.items():
        parent, _, name = path.rpartition(".")
        setattr(getattr(config, parent) if parent else config, name, value)
    with raises(ConfigError, owner=f"{layer_class.__name__}()", field=ignored):
        build(config).init(KEY)


def test_condition_on_a_field_that_the_template_lacks_is_skipped():
    config = TransformerLm.HParams.config(
        vocab_size=8, model_dims=4, hidden_dims=4, num_heads=1, embedding_tpl=SEPARATE
    )
    config.softmax_tpl = FullSoftmax.HParams.config(use_bias=True)
    jax.eval_shape(build(config).init, KEY)


def test_conditions_of_a_base_class_hold_with_the_defaults_of_the_subclass(raises):
    class Tied(SharedEmbeddingSoftmax):
        used_only_if: ClassVar[Conditions] = {"chunk_size": "z_loss_weight"}
        bias_axes = (None,)

    sizes = {"input_dims": 4, "num_classes": 4}
    Tied(**sizes).init(KEY)
    for field, value in {"bias_axes": ("embed",), "chunk_size": 2}.items():
        with raises(ConfigError, field=field, value=value):
            Tied(**sizes, **{field: value}).init(KEY)


def test_templates_without_children_follow_from_the_conditions():
    config = MultiHeadAttention.HParams.config(combined_qkv=True)
    unused = unused_templates(config)
    assert {id(config.query_tpl), id(config.key_tpl), id(config.value_tpl)} == unused
