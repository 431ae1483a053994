"""Weights of Praxis, however it stacks its layers, become those of each stack of this library."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import build
from layerkit.interop.praxis import axis_order, find_sources
from layerkit.layers import (
    LayerNorm,
    PositionalEmbedding,
    ReLU,
    RotaryPositionalEmbedding,
    StackedTransformer,
    StackedTransformerRepeated,
    TransformerFeedForward,
)
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.models import LanguageModel

LAYERS, DIMS, HIDDEN, HEADS, HEAD_DIM, VOCAB = 8, 6, 10, 2, 3, 11
STACKS = {
    "unrolled": StackedTransformer.HParams.config(),
    "repeated": StackedTransformerRepeated.HParams.config(),
    "pipelined": PipelinedTransformer.HParams.config(num_stages=2, num_microbatches=2),
    "circular": PipelinedTransformer.HParams.config(
        num_stages=2, circular_repeats=2, num_microbatches=2
    ),
}


@functools.cache
def model(stack, *, combined_qkv):
    config = LanguageModel.HParams.config()
    config.lm_tpl.set(
        vocab_size=VOCAB,
        model_dims=DIMS,
        hidden_dims=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        dim_per_head=HEAD_DIM,
        stack_tpl=STACKS[stack].clone(),
    )
    config.lm_tpl.softmax_tpl.use_bias = True
    layer = config.lm_tpl.stack_tpl.layer_tpl
    layer.attention_tpl.set(use_bias=True, per_dim_scale=True, combined_qkv=combined_qkv)
    layer.feed_forward_tpl = TransformerFeedForward.HParams.config(has_bias=True, use_gate=True)
    return build(config)


@functools.cache
def shapes_of(stack, *, combined_qkv):
    """Shapes of the weights by name, without `params/`."""
    made = model(stack, combined_qkv=combined_qkv)
    params = jax.eval_shape(made.init, jax.random.key(0))["params"]
    return {name: leaf.shape for name, leaf in flatten_dict(params, sep="/").items()}


def praxis_layers():
    """The weights of each layer as Praxis declares them."""
    rng = np.random.default_rng(3)
    dense = {"ffn_layer1": (DIMS, HIDDEN), "ffn_layer1_gate": (DIMS, HIDDEN)}
    shapes: dict[str, tuple[int, ...]] = {
        "self_attention/combined_qkv/w": (3, DIMS, HEADS, HEAD_DIM),
        "self_attention/combined_qkv/b": (3, HEADS, HEAD_DIM),
        "self_attention/post/w": (DIMS, HEADS, HEAD_DIM),
        "self_attention/post/b": (DIMS,),
        "self_attention/per_dim_scale/per_dim_scale": (HEAD_DIM,),
    }
    for name, (ins, outs) in {**dense, "ffn_layer2": (HIDDEN, DIMS)}.items():
        shapes |= {f"ff_layer/{name}/linear/w": (ins, outs), f"ff_layer/{name}/bias/b": (outs,)}
    for norm in ("layer_norm", "ff_layer/layer_norm"):
        shapes |= {f"{norm}/scale": (DIMS,), f"{norm}/bias": (DIMS,)}
    return [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(LAYERS)]


def stored(layers, stack):
    """The layers under the names of Praxis, with a leading axis per kind of repetition."""

    def stacked(name, indices):
        flat = np.stack([layers[index][name] for index in indices.reshape(-1)])
        return flat.reshape(*indices.shape, *flat.shape[1:])

    numbers = np.arange(LAYERS)
    # Indices of layers: [..., layers of a block] after the axes of the prefix.
    prefix, blocks = {
        "unrolled": ("", numbers),
        "repeated": ("repeat/sub/", numbers.reshape(LAYERS, 1)),
        "repeated pairs": ("repeat/sub/", numbers.reshape(LAYERS // 2, 2)),
        "pipelined": ("pipeline/body/", numbers.reshape(2, LAYERS // 2)),
        "circular": ("pipeline/body/", numbers.reshape(2, 2, LAYERS // 4)),
    }[stack]
    rng = np.random.default_rng(4)
    arrays = {
        "lm/final_ln/scale": rng.normal(size=DIMS),
        "lm/final_ln/bias": rng.normal(size=DIMS),
        "lm/softmax/logits_ffn/linear/w": rng.normal(size=(DIMS, VOCAB)),
        "lm/softmax/logits_ffn/bias/b": rng.normal(size=VOCAB),
    }
    for name in layers[0]:
        for block in range(blocks.shape[-1]):
            path = f"lm/transformer/{prefix}x_layers_{block}/{name}"
            arrays[path] = stacked(name, blocks[..., block])
    return arrays


def read_whole(source, stored, shape):
    view = source.view(lambda name: ts.array(stored[name]), shape)
    assert view.shape == shape
    return view.read().result()


@pytest.mark.parametrize(
    "theirs", ["unrolled", "repeated", "repeated pairs", "pipelined", "circular"]
)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("combined_qkv", [False, True])
def test_every_layer_has_the_weights_of_its_layer(stack, theirs, combined_qkv):
    layers = praxis_layers()
    source = stored(layers, theirs)
    shapes = shapes_of(stack, combined_qkv=combined_qkv)
    sources = find_sources(shapes, source)
    read = {name: read_whole(sources[name], source, shape) for name, shape in shapes.items()}
    assert {name: value.shape for name, value in read.items()} == shapes
    assert sum(value.size for value in read.values()) == sum(v.size for v in source.values())
    np.testing.assert_array_equal(read["lm/softmax/w"], source["lm/softmax/logits_ffn/linear/w"].T)
    lm = model(stack, combined_qkv=combined_qkv).bind({}).lm
    for number, layer in enumerate(layers):
        path, indices = lm.locate_layer(number)
        own = {
            name.removeprefix("/".join(("lm", *path, ""))): value[indices]
            for name, value in read.items()
            if name.startswith("/".join(("lm", *path, "")))
        }
        x = np.arange(DIMS, dtype=float)
        combined = np.einsum("d,pdnh->pnh", x, layer["self_attention/combined_qkv/w"])
        if combined_qkv:
            projected = np.einsum("d,dnph->pnh", x, own["attention/qkv/w"])
            biases = own["attention/qkv/b"].swapaxes(0, 1)
        else:
            names = ("query", "key", "value")
            projected = np.stack(
                [np.einsum("d,dnh->nh", x, own[f"attention/{name}/w"]) for name in names]
            )
            biases = np.stack([own[f"attention/{name}/b"] for name in names])
        np.testing.assert_allclose(projected, combined)
        np.testing.assert_array_equal(biases, layer["self_attention/combined_qkv/b"])
        heads = combined[0]
        np.testing.assert_allclose(
            np.einsum("nh,nhd->d", heads, own["attention/output/w"]),
            np.einsum("nh,dnh->d", heads, layer["self_attention/post/w"]),
        )
        for name, theirs_name in {"up": "1", "gate": "1_gate", "down": "2"}.items():
            weight = layer[f"ff_layer/ffn_layer{theirs_name}/linear/w"]
            np.testing.assert_array_equal(own[f"feed_forward/{name}/w"], weight)
        np.testing.assert_array_equal(own["attention_norm/scale"], layer["layer_norm/scale"])
        np.testing.assert_array_equal(
            own["feed_forward_norm/bias"], layer["ff_layer/layer_norm/bias"]
        )


def test_separate_projections_and_embeddings_are_read():
    ours = {f"lm/stack/layers_0/attention/{name}/w": (2, 1, 2) for name in ("query", "key")}
    ours |= {"lm/embedding/w": (5, 2), "lm/softmax/w": (2, 5), "lm/position/w": (4, 2)}
    praxis = {
        "lm/transformer/x_layers_0/self_attention/query/w": np.full((2, 1, 2), 1.0),
        "lm/transformer/x_layers_0/self_attention/key/w": np.full((2, 1, 2), 2.0),
        "lm/embedding_lookup/emb_var": np.full((5, 2), 3.0),
        "lm/softmax/logits_ffn/linear/w": np.arange(10.0).reshape(2, 5),
        "lm/position_emb/emb_var": np.full((4, 2), 5.0),
    }
    sources = find_sources(ours, praxis)
    for (name, shape), expected in zip(ours.items(), praxis.values(), strict=True):
        np.testing.assert_array_equal(read_whole(sources[name], praxis, shape), expected)


@pytest.mark.parametrize("combined_qkv", [False, True])
def test_axis_order_gives_the_shapes_of_praxis(combined_qkv):
    theirs = stored(praxis_layers(), "unrolled")
    shapes = shapes_of("unrolled", combined_qkv=combined_qkv)
    sources = find_sources(shapes, theirs)
    weights = unflatten_dict({name: np.empty(shape) for name, shape in shapes.items()}, sep="/")
    for name, order in flatten_dict(axis_order(weights), sep="/").items():
        source = sources[name]
        shape = theirs[source.names[0]].shape
        own = shape if source.weight.part is None else shape[1:]
        assert tuple(shapes[name][axis] for axis in order) == own, name


def test_axis_order_keeps_the_axes_of_weights_that_praxis_lacks():
    weights = {"theirs": np.empty((2, 3)), "lm": {"embedding": {"w": np.empty((5, 4))}}}
    # With an embedding of its own the softmax is [dims, num_classes] in both libraries.
    weights["lm"]["softmax"] = {"w": np.empty((4, 5))}
    assert axis_order(weights) == {
        "theirs": (0, 1),
        "lm": {"embedding": {"w": (0, 1)}, "softmax": {"w": (0, 1)}},
    }


@pytest.mark.parametrize("theirs", ["repeat/sub/", ""])
def test_weights_of_some_layers_are_those_of_their_layers(theirs):
    """The first of every two layers has experts, the second is dense."""
    experts, dense = np.arange(24.0).reshape(2, 2, 2, 3), np.arange(12.0).reshape(2, 2, 3)
    names = {"ff_layer/wi_0": (0, experts), "ff_layer/ffn_layer1/linear/w": (1, dense)}
    stored = {}
    for name, (block, weights) in names.items():
        if theirs:
            stored[f"lm/transformer/{theirs}x_layers_{block}/{name}"] = weights
        else:
            for number, weight in enumerate(weights):
                stored[f"lm/transformer/x_layers_{2 * number + block}/{name}"] = weight
    repeated = {
        "lm/stack/repeat/sub/layers_0/feed_forward/up": experts,
        "lm/stack/repeat/sub/layers_1/feed_forward/up/w": dense,
    }
    unrolled = {
        "lm/stack/layers_2/feed_forward/up": experts[1],
        "lm/stack/layers_1/feed_forward/up/w": dense[0],
    }
    for ours in (repeated, unrolled):
        sources = find_sources(ours, stored)
        for name, expected in ours.items():
            read = read_whole(sources[name], stored, expected.shape)
            np.testing.assert_array_equal(read, expected)


QKV = "lm/transformer/{}/self_attention/combined_qkv/w"
OURS = "lm/stack/{}attention/{}/w"


@pytest.mark.parametrize(
    ("theirs", "leading", "place", "over_layers"),
    [
        (["x_layers_0", "x_layers_1", "x_layers_2"], (), "repeat/sub/", (3,)),
        (["x_layers_0", "x_layers_1", "x_layers_2"], (), "layers_2/", ()),
        (["repeat/sub/x_layers_0", "repeat/sub/x_layers_1"], (3,), "repeat/sub/", (6,)),
        (["repeat/sub/x_layers_0"], (4,), "layers_3/", ()),
        (["repeat/sub/x_layers_0"], (4,), "repeat/sub/layers_1/", (2,)),
        (["pipeline/body/x_layers_0"], (2, 3), "pipeline/stage/repeat/sub/", (3, 2, 1)),
    ],
)
@pytest.mark.parametrize("child", ["key", "qkv"])
def test_blocks_equal_slices_of_the_whole_weight(theirs, leading, place, over_layers, child):
    rng = np.random.default_rng(1)
    stored = {QKV.format(one): rng.normal(size=(*leading, 3, 4, 2, 5)) for one in theirs}
    ours = {OURS.format(place, child), OURS.format(place.replace("_1", "_0"), child)}
    source = find_sources(ours, stored)[OURS.format(place, child)]
    own = (4, 2, 5) if child == "key" else (4, 2, 3, 5)
    view = source.view(lambda name: ts.array(stored[name]), (*over_layers, *own))
    shape = view.shape
    assert shape == (*over_layers, *own)
    whole = view.read().result()

    for _ in range(10):
        starts = [int(rng.integers(0, size)) for size in shape]
        stops = [int(rng.integers(a + 1, size + 1)) for a, size in zip(starts, shape, strict=True)]
        ranges = tuple(map(slice, starts, stops))
        np.testing.assert_array_equal(view[ranges].read().result(), whole[ranges])


QK_NORM = {
    "qk_norm_tpl": LayerNorm.HParams.config(),
    "rotary_tpl": RotaryPositionalEmbedding.HParams.config(),
}
MULTI_QUERY = {"num_kv_heads": 1, "per_dim_scale": False}


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("primer_hybrid", {"norm_policy": "pre_post"}, {}),
    ("post", {"norm_policy": "branch"}, {}),
    ("post_skip", {"norm_policy": "post"}, {}),
    ("qk_norm", {}, QK_NORM),
    ("multi_query", {}, MULTI_QUERY),
    ("multi_query_repeated", {}, {**MULTI_QUERY, "use_bias": False}),
]


# Each case of Praxis with one stack in the ordinary tests.
@pytest.mark.parametrize(
    ("stack", "case", "layer_fields", "attention_fields"),
    [
        pytest.param(
            stack,
            *case,
            id=f"{stack}-{case[0]}",
            marks=[pytest.mark.slow] * ((stack == "repeated") != case[0].endswith("repeated")),
        )
        for stack in ("unrolled", "repeated")
        for case in CASES
    ],
)
def test_logits_of_praxis_with_its_weights(praxis, stack, case, layer_fields, attention_fields):
    recorded = praxis(f"lm_{case}")
    config = LanguageModel.HParams.config()
    sizes = {"vocab_size": 7, "model_dims": 4, "hidden_dims": 6, "num_layers": 2, "num_heads": 2}
    config.lm_tpl.set(**sizes, position_tpl=PositionalEmbedding.HParams.config())
    config.lm_tpl.set(stack_tpl=STACKS[stack].clone())
    config.lm_tpl.softmax_tpl.use_bias = True
    layer = config.lm_tpl.stack_tpl.layer_tpl
    layer.set(**layer_fields)
    layer.attention_tpl.set(**{"use_bias": True, "per_dim_scale": True, **attention_fields})
    layer.feed_forward_tpl.set(has_bias=True, activation_tpl=ReLU.HParams.config())
    model = build(config)
    declared = jax.eval_shape(model.init, jax.random.key(0))["params"]
    shapes = {name: leaf.shape for name, leaf in flatten_dict(declared, sep="/").items()}
    sources = find_sources(shapes, recorded["weights"])
    params = {n: read_whole(sources[n], recorded["weights"], shapes[n]) for n in shapes}
    run = jax.jit(lambda params: model.bind({"params": params}).lm.logits(recorded["ids"]))
    logits = run(unflatten_dict(params, sep="/"))
    np.testing.assert_allclose(logits, recorded["logits"], rtol=1e-5, atol=5e-5)


def test_norm_after_a_branch_is_not_read_from_the_norm_before_it():
    norms = [f"lm/stack/layers_0/attention{norm}/scale" for norm in ("_norm", "_post_norm")]
    before = "lm/transformer/x_layers_0/layer_norm/scale"
    assert list(find_sources(norms, {before})) == norms[:1]
