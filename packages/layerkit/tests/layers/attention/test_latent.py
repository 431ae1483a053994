"""MultiHeadLatentAttention, compared with transformers, and its cache with whole rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.base_layer import CACHE
from layerkit.base.sharding import BoundSharding
from layerkit.layers.attention.latent import MultiHeadLatentAttention
from layerkit.layers.basic.positions import RotaryPositionalEmbedding
from layerkit.layers.quantization.lora import add_lora
from layerkit.ops.attention.masks import AttentionMask
from layerkit.ops.rotary_scaling import YarnScaling, yarn_magnitude

BATCH, LENGTH, SLOTS, DIMS, HEADS = 2, 6, 8, 12, 4
LATENT, QUERY_LATENT, PLAIN, ROTARY, VALUE = 8, 6, 4, 4, 5
SIZES = {
    "input_dims": DIMS,
    "num_heads": HEADS,
    "latent_dims": LATENT,
    "plain_dim_per_head": PLAIN,
    "rotary_dim_per_head": ROTARY,
    "value_dim_per_head": VALUE,
}


def make(**fields):
    return MultiHeadLatentAttention(**{**SIZES, **fields})


def drawn_weights(layer):
    """Return weights without zeros, since weights that start at 0 would hide errors."""
    random, shapes = np.random.default_rng(0), jax.eval_shape(layer.init, jax.random.key(0))
    return jax.tree.map(lambda w: random.normal(0.0, 0.5, w.shape).astype(np.float32), shapes)


def inputs(batch=BATCH):
    return jax.random.normal(jax.random.key(2), (batch, LENGTH, DIMS))


def positions(batch, start, stop):
    return jnp.broadcast_to(jnp.arange(start, stop, dtype=jnp.int32), (batch, stop - start))


@functools.partial(jax.jit, static_argnames="layer")
def whole(layer, weights, x, **options):
    mask = AttentionMask.causal_mask(x.shape[0], LENGTH)
    places = positions(x.shape[0], 0, LENGTH)
    return layer.apply(weights, x, mask=mask, positions=places, **options)


@functools.partial(jax.jit, static_argnames=("layer", "batch"))
def empty_cache(layer, weights, batch=BATCH):
    return layer.apply(weights, batch, SLOTS, method="init_cache", mutable=[CACHE])[1]


@functools.partial(jax.jit, static_argnames="layer")
def extend(layer, weights, cache, x, start, **options):
    return layer.apply(
        {**weights, **cache},
        x,
        time_step=start,
        positions=start + positions(x.shape[0], 0, x.shape[1]),
        method="extend_step",
        mutable=[CACHE],
        **options,
    )


def in_chunks(layer, weights, x, chunks):
    cache, outs, start = empty_cache(layer, weights, x.shape[0]), [], 0
    for size in chunks:
        out, cache = extend(layer, weights, cache, x[:, start : start + size], start)
        outs.append(out)
        start += size
    return jnp.concatenate(outs, axis=1)


def weights_of(attention, query_latent):
    """Return the weights of DeepSeek's layer in the tree of this library."""
    taken = {name: w.detach().numpy().T for name, w in attention.named_parameters()}

    def heads(w, *sizes):
        parts = np.split(w.reshape(-1, HEADS, sum(sizes)), np.cumsum(sizes)[:-1], axis=-1)
        return [{"w": part} for part in parts]

    def down(name, *sizes):
        ends = np.cumsum(sizes)[:-1]
        ws = np.split(taken[f"{name}.weight"], ends, axis=-1)
        return [{"w": w} for w in ws], [{"b": b} for b in np.split(taken[f"{name}.bias"], ends)]

    (latent, rotary), (latent_bias, rotary_bias) = down("kv_a_proj_with_mqa", LATENT, ROTARY)
    key, value = heads(taken["kv_b_proj.weight"], PLAIN, VALUE)
    params = {
        "latent_down": latent,
        "latent_down_bias": latent_bias,
        "rotary_key": rotary,
        "rotary_key_bias": rotary_bias,
        "latent_norm": {"scale": taken["kv_a_layernorm.weight"]},
        "key": key,
        "value": value,
        "output": {
            "w": taken["o_proj.weight"].reshape(HEADS, VALUE, DIMS),
            "b": taken["o_proj.bias"],
        },
    }
    if query_latent is None:
        (params["query"],) = heads(taken["q_proj.weight"], PLAIN + ROTARY)
    else:
        (params["query_down"],), (params["query_down_bias"],) = down("q_a_proj", QUERY_LATENT)
        params["query_norm"] = {"scale": taken["q_a_layernorm.weight"]}
        (params["query"],) = heads(taken["q_b_proj.weight"], PLAIN + ROTARY)
    return {"params": params}


@pytest.mark.parametrize(
    ("query_latent", "yarn"),
    [
        (QUERY_LATENT, True),
        pytest.param(None, False, marks=pytest.mark.slow),
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param(QUERY_LATENT, False, marks=pytest.mark.slow),
    ],
)
def test_equals_deepseek_v3(query_latent, yarn):
    torch = pytest.importorskip("torch")
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    rope = {"rope_theta": 100.0, "rope_type": "default"}
    fields = {}
    if yarn:
        scale = {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1}
        rope.update(scale, rope_type="yarn", original_max_position_embeddings=16)
        fields["logit_scale"] = yarn_magnitude(4.0, 1.1) ** 2 / (PLAIN + ROTARY) ** 0.5
    scaling = YarnScaling(original_max_position=16, **scale) if yarn else None
    config = deepseek.DeepseekV3Config(
        hidden_size=DIMS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=query_latent,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=PLAIN,
        qk_rope_head_dim=ROTARY,
        v_head_dim=VALUE,
        attention_bias=True,
        rope_parameters=rope,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = deepseek.DeepseekV3Attention(config, layer_idx=0).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = np.array(inputs())
    hidden = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    places = torch.arange(LENGTH)[None].expand(BATCH, -1)
    with torch.no_grad():
        angles = deepseek.DeepseekV3RotaryEmbedding(config)(torch.tensor(x), places)
        expected = theirs(torch.tensor(x), angles, hidden)[0].numpy()

    rotary = RotaryPositionalEmbedding.HParams.config(
        max_timescale=100.0, pairing="neighbors", scaling=scaling
    )
    ours = make(query_latent_dims=query_latent, use_bias=True, rotary_tpl=rotary, **fields)
    weights = weights_of(theirs, query_latent)
    shapes = jax.eval_shape(ours.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(jnp.shape, shapes)
    np.testing.assert_allclose(whole(ours, weights, x), expected, atol=2e-5)
    np.testing.assert_allclose(in_chunks(ours, weights, x, [4, 1, 1]), expected, atol=2e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 2, "use_bias": True},
        *(
            pytest.param(option, marks=pytest.mark.slow)
            for option in (
                {"query_latent_dims": QUERY_LATENT},
                {"logit_cap": 0.5},
                {"logit_scale": 1.0},
                {"zero_fully_masked_rows": True},
            )
        ),
    ],
)
def test_folded_steps_equal_whole_rows(fields):
    layer = make(**fields)
    weights, x = drawn_weights(layer), inputs()
    expected = whole(layer, weights, x)
    np.testing.assert_allclose(in_chunks(layer, weights, x, [3, 1, 1, 1]), expected, atol=2e-5)


def test_bias_of_cached_steps_equals_bias_of_whole_rows():
    layer = make()
    weights, x = drawn_weights(layer), inputs()
    bias = jax.random.normal(jax.random.key(4), (1, HEADS, SLOTS, SLOTS))
    expected = whole(layer, weights, x, bias=bias[:, :, :LENGTH, :LENGTH])
    cache = empty_cache(layer, weights)
    out, _ = extend(layer, weights, cache, x[:, :3], 0, bias=bias[:, :, :3])
    np.testing.assert_allclose(out, expected[:, :3], atol=2e-5)
    assert np.abs(expected - whole(layer, weights, x)).max() > 1e-2


@pytest.mark.parametrize("what", ["adapters", "biases"])
def test_projection_that_cannot_be_folded_has_effect_in_cached_steps(what):
    config = MultiHeadLatentAttention.HParams.config(**SIZES)
    if what == "adapters":
        config = add_lora(config, rank=2, only="up_tpl")
    else:
        config.up_tpl.use_bias = True
    layer = config.Instantiate()
    weights, x = drawn_weights(layer), inputs()  # lora_b is drawn too, so that adapters act
    expected = whole(layer, weights, x)
    np.testing.assert_allclose(in_chunks(layer, weights, x, [4, 1, 1]), expected, atol=2e-5)


def test_cache_holds_latents_without_heads():
    layer = make(fprop_dtype="bfloat16")
    cache = empty_cache(layer, drawn_weights(layer))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), cache)
    assert shapes == {
        CACHE: {
            "latent": ((BATCH, SLOTS, LATENT), "bfloat16"),
            "rotary_key": ((BATCH, SLOTS, ROTARY), "bfloat16"),
        }
    }


@pytest.mark.parametrize("folds", [True, False])
def test_folded_steps_never_expand_the_cache(folds):
    config = MultiHeadLatentAttention.HParams.config(**SIZES)
    layer = (config if folds else add_lora(config, rank=2)).Instantiate()
    weights = drawn_weights(layer)

    step = functools.partial(extend, layer, weights, start=0)
    program = str(jax.make_jaxpr(step)(empty_cache(layer, weights), inputs()[:, :1]))
    slots_of_heads = f"[{BATCH},{SLOTS},{HEADS},"
    assert (slots_of_heads in program) is not folds


@pytest.mark.parametrize("axis", [pytest.param("fsdp", marks=pytest.mark.slow), "context"])
def test_on_a_mesh_equals_one_device(axis):
    mesh = Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("data", axis, "tensor"))
    layer = make(query_latent_dims=QUERY_LATENT)
    weights, x = drawn_weights(layer), inputs(4)
    expected = whole(layer, weights, x)
    bound = layer.clone(sharding=BoundSharding(mesh))
    np.testing.assert_allclose(whole(bound, weights, x), expected, atol=2e-5)
    np.testing.assert_allclose(in_chunks(bound, weights, x, [4, 1, 1]), expected, atol=2e-5)


def test_extend_step_beyond_the_end_of_the_cache_returns_nan():
    layer = make()
    weights = drawn_weights(layer)
    cache = empty_cache(layer, weights)
    out, _ = extend(layer, weights, cache, inputs()[:, :2], SLOTS - 1)
    assert np.isnan(out).all()
