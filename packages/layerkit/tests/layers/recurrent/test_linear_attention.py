"""Mamba-2, gated delta net and Kimi delta attention against transformers and token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.base_layer import CACHE, PARAMS
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import is_box
from layerkit.errors import ConfigError
from layerkit.layers.recurrent.linear_attention import GatedDeltaNet, KimiDeltaAttention, Mamba2
from layerkit.layers.recurrent.mixer_parts import TimeSteps
from layerkit.ops.attention.masks import AttentionMask, row_positions
from layerkit.ops.recurrence.linear_attention import linear_attention

DIMS = 16
SIZES = {"input_dims": DIMS, "key_dim_per_head": 8, "value_dim_per_head": 6, "tokens_per_chunk": 8}
LAYERS = {
    "mamba2": Mamba2.HParams.config(
        num_key_heads=2, num_value_heads=4, use_conv_bias=True, **SIZES
    ),
    "delta": GatedDeltaNet.HParams.config(num_key_heads=2, num_value_heads=4, **SIZES),
    "kimi": KimiDeltaAttention.HParams.config(
        num_key_heads=4, num_value_heads=4, gate_rank=5, **SIZES
    ),
}
# Every ordinary run compares the recurrences of all kinds token by token.
KINDS = ["delta", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mamba2", "kimi"))]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 20, DIMS)).astype(np.float32)


@functools.cache
def draw_weights(kind, scale=0.3):
    layer = LAYERS[kind].Instantiate()
    random = np.random.default_rng(1)
    return layer, jax.tree.map(
        lambda w: w + scale * random.normal(size=w.shape).astype(np.float32),
        jax.jit(layer.init)(jax.random.key(0))[PARAMS],
    )


def whole(layer, params, x, segments=None):
    batch, length = x.shape[:2]
    mask = AttentionMask.causal_mask(batch, length, segment_ids=segments)
    return layer.apply({PARAMS: params}, x, mask=mask, positions=row_positions(batch, length))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_equal_separate_rows(kind):
    layer, params = draw_weights(kind)
    segments = np.ones((1, 20), np.int32)
    segments[:, 7:17], segments[:, 17:] = 2, 0
    run = jax.jit(lambda x, s=None: whole(layer, params, x, s))
    packed = run(X[:1], segments)
    for part in (slice(0, 7), slice(7, 17)):
        np.testing.assert_allclose(packed[:, part], run(X[:1, part]), atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_cached_steps_equal_the_whole_rows(kind):
    layer, params = draw_weights(kind)
    expected = jax.jit(lambda x: whole(layer, params, x))(X)
    _, state = layer.apply({PARAMS: params}, 3, 20, method="init_cache", mutable=[CACHE])

    @jax.jit
    def step(cache, x, time_step):
        variables = {PARAMS: params, CACHE: cache}
        more = {"time_step": time_step, "positions": None}
        y, state = layer.apply(variables, x, **more, method="extend_step", mutable=[CACHE])
        return y, state[CACHE]

    # The prompt of 12 tokens adds 9 to the state, since later steps repeat the others.
    cache = {**state[CACHE], "num_prompt": jnp.int32(9)}
    prompt, cache = step(cache, X[:, :12], 0)
    np.testing.assert_allclose(prompt[:, :9], expected[:, :9], atol=5e-6)
    for token in range(9, 20):
        y, cache = step(cache, X[:, token : token + 1], token)
        np.testing.assert_allclose(y[:, 0], expected[:, token], atol=5e-6)


def token_by_token(query, key, value, log_decay, beta, segments, state):
    """Compute the recurrence of the papers in float64."""
    outputs, state = np.zeros(value.shape), np.array(state, np.float64)
    per_group = value.shape[2] // key.shape[2]
    for row, head in np.ndindex(value.shape[0], value.shape[2]):
        before = None
        for t in np.flatnonzero(segments[row]):
            if before is not None and segments[row, t] != before:
                state[row, head] = 0
            before = segments[row, t]
            k, q = (x[row, t, head // per_group] for x in (key, query))
            decayed = np.exp(log_decay[row, t, head])[:, None] * state[row, head]
            u = value[row, t, head]
            if beta is not None:
                u = beta[row, t, head] * (u - decayed.T @ k)
            state[row, head] = decayed + np.outer(k, u)
            outputs[row, t, head] = state[row, head].T @ q
    return outputs, state


@pytest.mark.parametrize(
    ("groups", "channels", "delta"), [(1, 1, False), (2, 1, True), (4, 24, True)]
)
@pytest.mark.parametrize(
    ("length", "chunk_size", "parts"),
    [(64, 32, 2), pytest.param(37, 8, 1, marks=pytest.mark.slow)],
)
def test_chunks_equal_the_recurrence_token_by_token(
    groups, channels, delta, length, chunk_size, parts
):
    random = np.random.default_rng(2)
    rows = (2, length)
    query, key = random.normal(size=(2, *rows, groups, 24))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.normal(size=(*rows, 4, 6))
    log_decay = -np.exp(random.normal(-2, 2, size=(*rows, 4, channels)))
    beta = random.uniform(0, 1, (*rows, 4)) if delta else None
    state = random.normal(size=(2, 4, 24, 6)).astype(np.float32)
    # Documents with padding behind them, before them and between their tokens.
    segments = np.sort(random.integers(1, 4, rows), axis=1)
    segments[0, -5:] = segments[1, 9:12] = segments[1, :2] = 0
    expected, after = token_by_token(query, key, value, log_decay, beta, segments, state)
    run = jax.jit(linear_attention, static_argnames=("chunk_size", "parts"))
    outputs, last = run(
        query, key, value, log_decay, state=state, beta=beta, segments=segments,
        chunk_size=chunk_size, parts=parts,
    )  # fmt: skip
    is_token = segments > 0
    np.testing.assert_allclose(outputs[is_token], expected[is_token], atol=3e-5)
    np.testing.assert_allclose(last, after, atol=1e-5)


def heads(weight, num_heads):
    """Return [dims, heads, head_dim] of a weight [heads · head_dim, dims] of PyTorch."""
    return weight.T.reshape(weight.shape[1], num_heads, -1)


def conv(weight, num_heads):
    """Return [width, heads, head_dim] of a weight [channels, 1, width] of torch.nn.Conv1d."""
    return weight[:, 0].T.reshape(weight.shape[-1], num_heads, -1)


def mamba2_of_transformers():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=DIMS, num_heads=4, head_dim=8, expand=2, n_groups=2, state_size=8,
        conv_kernel=4, chunk_size=8, num_hidden_layers=1, use_bias=True,
        time_step_limit=(0.01, 0.5),
    )  # fmt: skip
    layer = Mamba2.HParams.config(
        input_dims=DIMS, num_key_heads=2, num_value_heads=4, key_dim_per_head=8,
        value_dim_per_head=8, use_conv_bias=True, use_bias=True, tokens_per_chunk=8,
    )  # fmt: skip
    layer.time_step_tpl.limits = (0.01, 0.5)
    layer.norm_tpl.epsilon = config.layer_norm_epsilon

    def params(w):
        cuts = np.cumsum([32, 32, 16, 16])
        counts = {"gate": 4, "value": 4, "key": 2, "query": 2, "step": 4}
        tree, kernels = {}, np.split(w["conv1d.weight"], cuts[1:3] - 32)
        biases = np.split(w["conv1d.bias"], cuts[1:3] - 32)
        projections = zip(
            np.split(w["in_proj.weight"], cuts), np.split(w["in_proj.bias"], cuts), strict=True
        )
        for (name, count), (weight, bias) in zip(counts.items(), projections, strict=True):
            tree[name] = {"w": heads(weight, count), "b": bias.reshape(count, -1)}
        for name, kernel, bias in zip(list(counts)[1:4], kernels, biases, strict=True):
            count = counts[name]
            tree[f"{name}_conv"] = {"w": conv(kernel, count), "b": bias.reshape(count, -1)}
        return tree | {
            "time_step": {"bias": w["dt_bias"][:, None], "log_rate": w["A_log"]},
            "skip": w["D"],
            "norm": {"scale": w["norm.weight"].reshape(4, 8)},
            "output": {"w": w["out_proj.weight"].T.reshape(4, 8, DIMS), "b": w["out_proj.bias"]},
        }

    return Mamba2Mixer(config, layer_idx=0), layer, params


def qwen3_next_of_transformers():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=DIMS, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=6, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip

    def params(w):
        # Per key head: query 8, key 8, and two value heads of values and of gates.
        grouped = w["in_proj_qkvz.weight"].reshape(2, 40, DIMS)
        query, key, value, gate = np.split(grouped, [8, 16, 28], axis=1)
        beta, step = np.split(w["in_proj_ba.weight"].reshape(2, 4, DIMS), 2, axis=1)
        parts = {"query": query, "key": key, "value": value, "gate": gate}
        parts |= {"beta": beta, "step": step}
        tree = {
            name: {"w": heads(part.reshape(-1, DIMS), 2 if name in ("query", "key") else 4)}
            for name, part in parts.items()
        }
        kernels = np.split(w["conv1d.weight"], [16, 32])
        for name, kernel in zip(("query", "key", "value"), kernels, strict=True):
            tree[f"{name}_conv"] = {"w": conv(kernel, tree[name]["w"].shape[1])}
        return tree | {
            "time_step": {"bias": w["dt_bias"][:, None], "log_rate": w["A_log"]},
            "norm": {"scale": w["norm.weight"]},
            "output": {"w": w["out_proj.weight"].T.reshape(4, 6, DIMS)},
        }

    return Qwen3NextGatedDeltaNet(config, layer_idx=0), LAYERS["delta"], params


def kimi_of_transformers():
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=DIMS, linear_num_heads=4, linear_head_dim=8, num_hidden_layers=1,
        layer_types=["linear_attention"],
    )  # fmt: skip
    layer = KimiDeltaAttention.HParams.config(
        input_dims=DIMS, num_key_heads=4, num_value_heads=4, key_dim_per_head=8,
        value_dim_per_head=8, gate_rank=8, tokens_per_chunk=32,
    )  # fmt: skip
    layer.norm_tpl.epsilon = config.rms_norm_eps

    def params(w):
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "beta": "b_proj"}
        names |= {"gate": "g_b_proj", "step": "forget_gate.f_b_proj"}
        tree = {name: {"w": heads(w[f"{theirs}.weight"], 4)} for name, theirs in names.items()}
        kernels = np.split(w["conv1d.weight"], 3)
        for name, kernel in zip(("query", "key", "value"), kernels, strict=True):
            tree[f"{name}_conv"] = {"w": conv(kernel, 4)}
        bias = w["forget_gate.dt_bias"].reshape(4, 8)
        return tree | {
            "gate_down": {"w": w["g_a_proj.weight"].T},
            "step_down": {"w": w["forget_gate.f_a_proj.weight"].T},
            "time_step": {"bias": bias, "log_rate": w["forget_gate.A_log"].reshape(4)},
            "norm": {"scale": w["o_norm.weight"]},
            "output": {"w": w["o_proj.weight"].T.reshape(4, 8, DIMS)},
        }

    return KimiLinearDeltaAttention(config, layer_idx=0), layer, params


@pytest.mark.parametrize(
    "make",
    [
        qwen3_next_of_transformers,
        pytest.param(mamba2_of_transformers, marks=pytest.mark.slow),
        pytest.param(kimi_of_transformers, marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients_equal_those_of_transformers(make):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs, config, params_of = make()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(0.4 * torch.randn(weight.shape, generator=generator))
    x = torch.tensor(X, requires_grad=True)
    expected = theirs(x)
    weights = torch.tensor(0.1 * np.random.default_rng(3).normal(size=X.shape), dtype=torch.float32)
    (expected * weights).sum().backward()
    params = params_of({name: w.detach().numpy() for name, w in theirs.named_parameters()})
    gradients = params_of({name: w.grad.numpy() for name, w in theirs.named_parameters()})
    layer = config.Instantiate()

    @jax.jit
    def run(params, x):
        y, vjp = jax.vjp(lambda params, x: whole(layer, params, x), params, x)
        return y, vjp(weights.numpy())

    ours, (of_params, of_x) = run(params, X)
    np.testing.assert_allclose(ours, expected.detach(), atol=1e-5)
    np.testing.assert_allclose(of_x, x.grad, atol=1e-4)
    assert jax.tree.structure(of_params) == jax.tree.structure(gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), of_params, gradients)


# An ordinary run has a hybrid with the delta net in test_all_meshes.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("delta", (2, 1, 2, 2)),
        ("mamba2", (1, 2, 1, 4)),
        ("kimi", (1, 1, 4, 2)),
        ("delta", (1, 1, 1, 8)),
        ("mamba2", (2, 2, 2, 1)),
    ],
)
def test_rows_and_heads_split_over_devices_equal_one_device(kind, sizes):
    layer, params = draw_weights(kind)
    mesh = Mesh(np.reshape(jax.devices(), sizes), ("data", "fsdp", "tensor", "context"))
    bound = BoundSharding(mesh)
    x = np.random.default_rng(4).normal(size=(4, 48, DIMS)).astype(np.float32)
    segments = np.sort(np.random.default_rng(5).integers(1, 4, (4, 48)), axis=1)
    segments[0, -3:] = 0

    def loss(layer, params, x):
        y = whole(layer, params, x, segments)
        return 0.1 * jnp.sum(jnp.sin(y) * (segments > 0)[..., None]), y

    def run(layer):
        return jax.jit(jax.value_and_grad(lambda p, x: loss(layer, p, x), (0, 1), has_aux=True))

    (_, expected), gradients = run(layer)(params, x)
    boxed = jax.eval_shape(layer.init_boxed, jax.random.key(0))[PARAMS]
    place = lambda box: bound.sharding(box.axes, shape=box.value.shape)  # noqa: E731
    split = jax.device_put(params, jax.tree.map(place, boxed, is_leaf=is_box))
    rows = jax.device_put(x, bound.sharding(("batch", "length", None)))
    (_, outputs), of_split = run(layer.clone(sharding=bound))(split, rows)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-5), of_split, gradients
    )


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_float32_in_bfloat16_and_padding_keeps_them(kind):
    layer, params = draw_weights(kind)
    narrow = LAYERS[kind].clone(fprop_dtype=jnp.bfloat16).Instantiate()
    segments = np.ones((3, 20), np.int32)
    segments[:, 11:] = 0

    @jax.jit
    def states(x, segments=None):
        def mix(layer):
            start = layer.initial_state(3)
            return layer.mix(x, start, segments=segments)[1]

        return [mix(one.bind({PARAMS: params})) for one in (layer, narrow)]

    wide, low = states(X, segments)
    assert low["state"].dtype == jnp.float32
    assert low["key_history"].dtype == jnp.bfloat16
    size = np.abs(wide["state"]).max()
    np.testing.assert_allclose(low["state"], wide["state"], atol=0.03 * size)
    alone, _ = states(X[:, :11])
    for name, value in alone.items():
        np.testing.assert_allclose(wide[name], value, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("limits", [(0.5, 0.01), (-1.0, 0.5)])
def test_limits_of_time_steps_that_leave_no_range_are_refused(raises, limits):
    with raises(ConfigError, field="limits", value=limits):
        TimeSteps(num_heads=2, limits=limits).init(jax.random.key(0))
