"""Conformer layers equal Praxis', and cached steps and padded rows equal whole rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit.layers import (
    Conformer,
    ConformerEncoder,
    GroupNorm,
    LayerNorm,
    LightConv1D,
    MultiHeadAttention,
    RotaryPositionalEmbedding,
)
from layerkit.ops.attention.masks import AttentionMask, row_positions, segments_from_paddings

HEADS, DIMS = 2, 4
# Praxis adds u and v to scaled queries.
SCALE = (DIMS / HEADS) ** -0.5
NAMES = {
    "fflayer_start/ffn_layer1/linear": "feed_forward_start/up",
    "fflayer_start/ffn_layer1/bias": "feed_forward_start/up_bias",
    "fflayer_start/ffn_layer2/linear": "feed_forward_start/down",
    "fflayer_start/ffn_layer2/bias": "feed_forward_start/down_bias",
    "fflayer_start/layer_norm": "feed_forward_start_norm",
    "fflayer_end/ffn_layer1/linear": "feed_forward/up",
    "fflayer_end/ffn_layer1/bias": "feed_forward/up_bias",
    "fflayer_end/ffn_layer2/linear": "feed_forward/down",
    "fflayer_end/ffn_layer2/bias": "feed_forward/down_bias",
    "fflayer_end/layer_norm": "feed_forward_norm",
    "final_ln": "final_norm",
    "trans_atten/norm": "attention_norm",
    "trans_atten/self_atten/pos_proj": "attention/position_projection",
    "trans_atten/self_atten/post": "attention/output",
    "trans_atten/self_atten": "attention",
    "lconv/ln": "conv_norm",
    "lconv/conv_norm": "conv/norm",
    "lconv/depthwise_conv1d": "conv/conv",
    "lconv/linear_start_act": "conv/value",
    "lconv/linear_start_gated": "conv/gate",
    "lconv/linear_end": "conv/up",
}


def ours(weights: dict, *, power: int = 1) -> dict[str, np.ndarray]:
    """Weights of Praxis, or gradients with power=-1, under our names."""
    flat = {}
    for path, value in jax.tree_util.tree_leaves_with_path(weights):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        theirs = next(theirs for theirs in NAMES if name.startswith(f"{theirs}/"))
        last = name.removeprefix(theirs).replace("gamma", "scale").replace("beta", "bias")
        name = NAMES[theirs] + last
        if name == "attention/output/w":
            value = value.transpose(1, 2, 0)
        if last in ("/u", "/v"):
            value = value / SCALE**power
        flat[name] = jnp.asarray(value)
    return flat


def nested(flat: dict[str, jax.Array]) -> dict:
    tree: dict = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return tree


SLOW = [pytest.mark.slow]


@pytest.mark.parametrize(
    "name",
    [
        "conformer_xl",
        pytest.param("conformer_local", marks=SLOW),
        pytest.param("conformer_causal", marks=SLOW),
    ],
)
def test_layer_and_its_gradient_equal_praxis(praxis, name):
    case = praxis(name)
    config = Conformer.HParams.config(
        input_dims=DIMS,
        hidden_dims=2 * DIMS,
        num_heads=HEADS,
        norm_tpl=LayerNorm.HParams.config(scale_offset=1.0),
        train=False,
    )
    config.conv_tpl.kernel_size = 3
    if name == "conformer_local":
        local = MultiHeadAttention.HParams.config(use_bias=True, window=3)
        config.set(attention_tpl=local, conv_first=True)
    layer = config.Instantiate()
    segments = segments_from_paddings(jnp.asarray(case["paddings"]))
    make = AttentionMask.causal_mask if "causal" in name else AttentionMask.bidirectional_mask
    is_token = (case["paddings"] == 0)[..., None]

    def loss(params):
        variables = {"params": params, "non_trainable": nested(ours(case["moments"]))}
        mask = make(2, 6, segment_ids=segments)
        outputs = layer.apply(variables, case["x"], mask=mask, positions=row_positions(2, 6))
        return jnp.sum(outputs * case["probe"] * is_token), outputs

    gradient, outputs = jax.jit(jax.grad(loss, has_aux=True))(nested(ours(case["weights"])))
    np.testing.assert_allclose(outputs * is_token, case["outputs"] * is_token, atol=1e-5)
    expected = nested(ours(case["gradient"], power=-1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradient, expected)


def encoder(**fields):
    config = ConformerEncoder.HParams.config(
        num_bins=8, num_channels=3, num_layers=1, model_dims=8, hidden_dims=8, num_heads=2
    )
    config.stack_tpl.layer_tpl.conv_tpl.kernel_size = 3
    return config.set(train=False, **fields)


def draw(model):
    """Return weights without the zeros of `init`, and moving averages near 1."""
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def around(mean, tree):
        return jax.tree.map(lambda w: random.normal(mean, 0.3, w.shape).astype(w.dtype), tree)

    moments = around(1.0, shapes.get("non_trainable", {}))
    return {"params": around(0.0, shapes["params"]), "non_trainable": moments}


X = np.random.default_rng(0).normal(size=(2, 32, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("step", "fields"),
    [
        pytest.param(1, {}, marks=SLOW),
        (3, {"look_ahead": 3, "window": 5}),
        pytest.param(
            4,
            {"rotary_tpl": RotaryPositionalEmbedding.HParams.config(), "look_ahead": 4},
            marks=SLOW,
        ),
    ],
    ids=["frames", "chunks_with_left_context", "rotary_chunks"],
)
def test_streaming_of_unequal_rows_equals_whole_rows(step, fields):
    config = encoder(is_causal=True)
    layer = config.stack_tpl.layer_tpl
    if "rotary_tpl" in fields:
        layer.attention_tpl = MultiHeadAttention.HParams.config()
    layer.attention_tpl.set(**fields)
    model = config.Instantiate()
    variables = draw(model)
    x = jnp.concatenate([X, X])
    # Three outputs of the second row, one of the third, and none of the last.
    paddings = (jnp.arange(32) >= jnp.array([32, 10, 1, 0])[:, None]).astype(jnp.float32)
    whole = jax.jit(model.apply)(variables, x, paddings=paddings)
    init_cache = lambda v: model.apply(v, 4, 8, method="init_cache", mutable=["cache"])  # noqa: E731
    _, cache = jax.jit(init_cache)(variables)

    @jax.jit
    def extend(cache, x, paddings, time_step):
        sizes = {"time_step": time_step, "paddings": paddings}
        held = {**variables, **cache}
        return model.apply(held, x, **sizes, method="extend_step", mutable=["cache"])

    outputs = []
    for start in range(0, 8, step):  # the last chunk may be shorter
        frames = slice(4 * start, 4 * (start + step))
        output, cache = extend(cache, x[:, frames], paddings[:, frames], jnp.int32(start))
        outputs.append(output)
    is_frame = (whole.paddings == 0)[..., None]
    assert np.isfinite(whole.encoded).all() and is_frame.sum() == 12
    outputs = jnp.concatenate(outputs, axis=1)
    np.testing.assert_allclose(outputs * is_frame, whole.encoded * is_frame, atol=1e-5)


def test_padded_rows_equal_shorter_rows():
    model = encoder().Instantiate()
    variables = draw(model)
    paddings = (np.arange(32) >= np.array([32, 21])[:, None]).astype(np.float32)
    apply = jax.jit(model.apply)
    padded = apply(variables, X, paddings=paddings)
    short = apply(variables, X[1:, :21], paddings=paddings[1:, :21])
    assert padded.paddings.sum() == 2
    np.testing.assert_allclose(padded.encoded[1, :6], short.encoded[0], atol=1e-5)


def test_group_norm_has_no_cached_steps(raises):
    norm = GroupNorm.HParams.config(num_groups=2)
    layer = LightConv1D.HParams.config(input_dims=4, norm_tpl=norm).Instantiate()
    with raises(ConfigError, field="norm_tpl"):
        layer.apply(layer.init(jax.random.key(0)), 2, 8, method="init_cache", mutable=["cache"])
