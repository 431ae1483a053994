"""Every field of feed-forward blocks, mixtures of experts and stacks changes something."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import layerkit.layers as L  # noqa: N812 - the index is read as one name, a layer a line
from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.layers.moe.base_moe import BaseMoeFeedForward
from layerkit.layers.quantization.fp8 import Fp8Dot
from layerkit.ops.attention.masks import AttentionMask, row_positions
from layerkit.testing import Change, Example, dead_fields, ignored_fields

BATCH, LENGTH, DIMS = 4, 8, 8
NUMBERS = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, LENGTH, 64)), jnp.float32)
MEMORY = NUMBERS[:, ::-1]
POSITIONS = row_positions(BATCH, LENGTH)
SEGMENTS = jnp.asarray(np.sort(np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % 3), jnp.int32)
SOFTMAX = {"params": {"w": NUMBERS[0, :, :8]}}
MASK = AttentionMask.causal_mask(BATCH, LENGTH, segment_ids=SEGMENTS)
GAUSSIAN = WeightInit.Gaussian()
CROSS = Config(L.CrossAttention)
MODULES = {
    *(
        "feed_forward",
        "layer_inputs",
        "moe",
        "ngrammer",
        "pipeline",
        "pipelined_transformer",
        "repeat",
    ),
    *("residual_adapters", "stacks", "transformer"),
}


def of(layer_class, fields, run, **changes):
    return Example(Config(layer_class, **fields), run, changes)


def on_tokens(layer):
    x = NUMBERS[..., : layer.input_dims]
    return layer(x, is_token=SEGMENTS != 0), layer(x)


def route(layer):
    # Twice, so that what a step leaves behind is seen by the next.
    x = NUMBERS[..., : layer.input_dims]
    first = layer(x, is_token=SEGMENTS != 0)
    return first.weights, first.experts, layer(x).experts


def whole_and_cached(layer):
    """With a memory, which only layers with cross attention take."""
    x = NUMBERS[..., : layer.input_dims]
    memory, memory_mask = None, None
    may_skip = getattr(layer, "allow_skip_cross_attention", False)
    if "cross_attention" in repr(layer) and reads_memory(layer) and not may_skip:
        memory = MEMORY[..., : layer.input_dims]
        memory_mask = AttentionMask.cross_mask(BATCH, LENGTH, LENGTH, key_segments=SEGMENTS)
    return layer(x, mask=MASK, positions=POSITIONS, memory=memory, memory_mask=memory_mask)


def reads_memory(layer):
    template = layer if isinstance(layer, L.Transformer) else layer.pattern[0]
    return template.cross_attention_tpl is not None


def cached(layer):
    layer.init_cache(BATCH, LENGTH)
    x = NUMBERS[:, :1, : layer.input_dims]
    return layer.extend_step(x, time_step=jnp.int32(0), positions=POSITIONS[:, :1])


def whole_and_cached_bigrams(layer):
    x = NUMBERS[..., : layer.input_dims]
    whole = layer(SEGMENTS, x, segments=SEGMENTS)
    layer.init_cache(BATCH)
    return whole, layer.extend_step(SEGMENTS[:, :1], x[:, :1], time_step=jnp.int32(0))


def stack(layer):
    whole = whole_and_cached(layer)
    return whole if reads_memory(layer) else (whole, cached(layer))


def look_ahead(layer):
    return layer(NUMBERS[..., :DIMS], MEMORY[..., :DIMS], mask=MASK, positions=POSITIONS)


def predict_further(layer):
    """Return the losses that a row of the softmax's inputs would have."""
    layer(
        NUMBERS[..., :DIMS],
        SEGMENTS,
        targets={"labels": SEGMENTS},
        weights=jnp.ones((BATCH, LENGTH)),
        embed=lambda ids, positions: NUMBERS[..., :DIMS] * ids[..., None],
        softmax=L.FullSoftmax(input_dims=DIMS, num_classes=8).bind(SOFTMAX),
    )
    return NUMBERS[0, 0, 0]


def wide_layer(**fields):
    return Config(L.Transformer, dtype="bfloat16", **fields)


LAYER = {"input_dims": DIMS, "hidden_dims": 8, "num_heads": 4}
STACK_CHANGES = {
    "num_kv_heads": 2,
    "dim_per_head": 4,
    "remat": "full",
    "relative_bias_tpl": Config(L.RelativeBias),
    "block_tpls": (wide_layer(),),
    "first_tpls": Change((wide_layer(parallel=True),), others={"num_layers": 5}),
    "droppath_rate": 0.5,
}
# The compared programs may write a cache, and decoding has no capacity.
UNSEEN = "capacity_in_evaluation"
MOE = {"input_dims": DIMS, "hidden_dims": 8, "num_experts": 4}
WITH_CAPACITY = {"capacity_factor": 1.0}
SHARED = {"num_shared_experts": 1}
IN_GROUPS = {"num_expert_groups": 2, "num_chosen_groups": 1}
BY_SIZE = {"num_microbatches": None, "microbatch_size": 2}

EXAMPLES = [
    *(
        of(
            block,
            {"input_dims": DIMS, "hidden_dims": 8},
            on_tokens,
            bias_tpl=Change(Config(L.Bias, dtype="bfloat16"), others={"has_bias": True}),
            activation_tpl=Config(L.Tanh),
            down_init=GAUSSIAN,
            gate_multiplier=Change(0.5, others={"use_gate": True}),
        )
        for block in (L.TransformerFeedForward, L.AdaptedFeedForward)
    ),
    of(
        L.ResidualAdapter,
        {"input_dims": DIMS},
        lambda layer: layer(NUMBERS[..., : layer.input_dims]),
        activation_tpl=Config(L.Tanh),
    ),
    of(
        L.AdaptedOutputProjection,
        {"output_dims": DIMS, "num_heads": 2, "head_dim": 4},
        lambda layer: layer(jnp.ones((BATCH, LENGTH, layer.num_heads, layer.head_dim))),
        dot_tpl=Config(Fp8Dot),
    ),
    *(
        of(
            experts,
            MOE,
            on_tokens,
            activation_tpl=Config(L.Tanh),
            router_tpl=Config(L.TopKRouter, logit_cap=0.1),
            gate_limit=0.1,
            dropout_rate=Change(0.5, others=WITH_CAPACITY),
            balance_per_group=Change(value=True, others=WITH_CAPACITY),
            capacity_factor=1.0,
            capacity_in_evaluation=Change(value=True, others=WITH_CAPACITY),
            num_groups=Change(2, others=WITH_CAPACITY),
            grouped_matmul="ragged_dot",
            # The exchange has an effect on a mesh that splits experts.
            expert_exchange=Change("ring", refusal="expert_exchange"),
            weigh_inputs=True,
            exchange_buffer_factor=Change(-1.0, refusal="exchange_buffer_factor"),
            use_shared_gate=Change(value=True, others=SHARED),
            shared_tpl=Change(Config(L.TransformerFeedForward, dtype="bfloat16"), others=SHARED),
            weight_init=GAUSSIAN,
            down_init=WeightInit.Constant(0.5),
            dot_tpl=Change(Config(Fp8Dot), others=WITH_CAPACITY),
            **norms,
        )
        for experts, norms in (
            (L.MoeFeedForward, {}),
            (L.NormalizedMoeFeedForward, {"norm_tpl": Config(L.LayerNorm)}),
        )
    ),
    of(
        L.ExpertChoiceFeedForward,
        MOE,
        on_tokens,
        activation_tpl=Config(L.Tanh),
        router_tpl=Config(L.ExpertChoiceRouter, logit_cap=0.1),
        gate_limit=0.1,
        dropout_rate=0.5,
        capacity_factor=4.0,
        num_groups=2,
        use_shared_gate=Change(value=True, others=SHARED),
        shared_tpl=Change(Config(L.TransformerFeedForward, dtype="bfloat16"), others=SHARED),
        weight_init=GAUSSIAN,
        down_init=WeightInit.Constant(0.5),
        dot_tpl=Config(Fp8Dot),
    ),
    of(
        L.BaseRouter,
        {"input_dims": DIMS, "num_experts": 8},
        lambda layer: layer.inputs_and_logits(NUMBERS[..., : layer.input_dims]),
        logit_cap=0.1,
        weight_init=GAUSSIAN,
    ),
    of(
        L.ExpertChoiceRouter,
        {"input_dims": DIMS, "num_experts": 8},
        lambda layer: layer(NUMBERS[..., : layer.input_dims], capacity=2).weights,
        logit_cap=0.1,
        weight_init=GAUSSIAN,
    ),
    *(
        of(
            router,
            {"input_dims": DIMS, "num_experts": 8},
            route,
            score="sigmoid",
            score_bias_rate=Change(0.1, others={"use_score_bias": True}),
            num_expert_groups=Change(4, others=IN_GROUPS),
            num_chosen_groups=Change(2, others=IN_GROUPS),
            num_group_scores=Change(1, others=IN_GROUPS),
            logit_cap=0.1,
            weight_init=GAUSSIAN,
            **norms,
        )
        for router, norms in (
            (L.TopKRouter, {}),
            (L.NormalizedRouter, {"norm_tpl": Config(L.LayerNorm)}),
        )
    ),
    of(
        L.Transformer,
        LAYER,
        whole_and_cached,
        num_kv_heads=2,
        dim_per_head=4,
        norm_policy="post",
        parallel_shares_norm=Change(value=True, others={"parallel": True}),
        cross_attention_tpl=CROSS,
        allow_skip_cross_attention=Change(value=True, others={"cross_attention_tpl": CROSS}),
        feed_forward_norm_tpl=Config(L.RmsNorm),
        layer_input_tpl=Change(Config(L.GatedInput, dims=4), refusal="layer_input"),
    ),
    of(
        L.GatedInput,
        {"input_dims": DIMS, "dims": 4},
        lambda layer: layer(NUMBERS[..., : layer.input_dims], NUMBERS[..., -layer.dims :]),
        activation_tpl=Config(L.Tanh),
        norm_tpl=Config(L.LayerNorm),
    ),
    of(
        L.LayerInputs,
        {"num_classes": 4, "input_dims": DIMS, "num_layers": 2, "dims": 4},
        lambda layer: layer(SEGMENTS, NUMBERS[..., : layer.input_dims]),
        norm_tpl=Config(L.LayerNorm),
    ),
    of(
        L.NGrammer,
        {
            "input_dims": 8,
            "num_heads": 2,
            "num_buckets": 5,
            "quantizer_tpl": L.VectorQuantizer.HParams.config(num_classes=3),
        },
        whole_and_cached_bigrams,
        input_dims=16,
        vocab_size=Change(6, others={"quantizer_tpl": None, "vocab_size": 5}),
        bigram_dims=3,
        quantizer_tpl=L.VectorQuantizer.HParams.config(num_classes=4),
        norm_tpl=L.LayerNormPerHead.HParams.config(epsilon=0.5),
    ),
    of(
        L.MultitaskResidualAdapter,
        {"input_dims": DIMS, "num_tasks": 2},
        lambda layer: layer(NUMBERS[..., : layer.input_dims], jnp.arange(BATCH) % 2),
        norm_tpl=None,
        activation_tpl=Config(L.Tanh),
    ),
    of(L.StackedTransformer, LAYER, stack, **STACK_CHANGES),
    of(
        L.StackedTransformerRepeated,
        {**LAYER, "num_layers": 4},
        stack,
        stacked_shape=(2, 2),
        unroll=2,
        **STACK_CHANGES,
    ),
    of(
        L.PipelinedTransformer,
        {**LAYER, "num_layers": 2, "num_microbatches": 2},
        stack,
        num_microbatches=1,
        microbatch_size=Change(4, others=BY_SIZE),
        stream_inputs=Change(value=False, others={"num_stages": 2}),
        stage_remat="none",
        **STACK_CHANGES,
    ),
    of(
        L.MultiTokenModule,
        {**LAYER, "layer_tpl": Config(L.Transformer)},
        look_ahead,
        num_kv_heads=2,
        dim_per_head=4,
        layer_tpl=wide_layer(),
    ),
    of(
        L.MultiTokenPrediction,
        {"module_tpl": Config(L.MultiTokenModule, **LAYER, layer_tpl=Config(L.Transformer))},
        predict_further,
        module_tpl=Config(L.MultiTokenModule, **LAYER, layer_tpl=wide_layer()),
    ),
    of(
        L.Repeat,
        {"sub_tpl": Config(L.LayerNorm, dims=DIMS), "num_repeats": 2},
        lambda layer: layer(NUMBERS[..., :DIMS]),
        remat="full",
        unroll=2,
    ),
    of(
        L.Pipeline,
        {"stage_tpl": Config(L.LayerNorm, dims=DIMS), "num_stages": 2, "num_microbatches": 2},
        lambda layer: layer(NUMBERS[..., :DIMS]),
        num_stages=Change(1, others={"stream_inputs": False}),
        num_microbatches=Change(1, others={"stream_inputs": False}),
        microbatch_size=Change(4, others={**BY_SIZE, "stream_inputs": False}),
        remat="none",
    ),
]


# Most of their fields are those of `ExpertChoiceFeedForward`, `StackedTransformer`, `Repeat` and
# `Pipeline`.
SLOW = {
    L.MoeFeedForward,
    L.NormalizedMoeFeedForward,
    L.StackedTransformerRepeated,
    L.PipelinedTransformer,
}


def test_changing_a_field_has_an_effect(example, sharding):
    assert set(dead_fields(example, sharding=sharding)) <= {UNSEEN}


@pytest.mark.slow
def test_ignored_field_raises(example, sharding):
    # One stage streams nothing; how many there are is a matter of the mesh.
    tolerated = ("stream_inputs while num_stages=1", UNSEEN)
    ignored = ignored_fields(example, sharding=sharding)
    assert [field for field in ignored if not field.startswith(tolerated)] == []


def test_every_layer_has_an_example(layers_in):
    here = {layer for layer in layers_in(L) if layer.__module__.split(".")[2] in MODULES}
    assert here - {BaseMoeFeedForward} <= {example.layer_class for example in EXAMPLES}
