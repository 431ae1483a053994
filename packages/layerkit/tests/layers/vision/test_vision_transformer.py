"""Vision Transformers and their patches against Praxis and PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit.layers import (
    AttentionPooling,
    Conv,
    GlobalPooling,
    PatchEmbedding,
    PositionalEmbedding2D,
    ReLU,
    RotaryPositionalEmbedding,
    VisionTransformer,
)
from layerkit.ops.patches import image_to_patch, patch_to_image, resize_grid

KEY = jax.random.key(0)
SIZES = {"model_dims": 8, "hidden_dims": 12, "num_layers": 2, "num_heads": 2}
IMAGES = np.random.default_rng(0).normal(size=(2, 12, 8, 3)).astype(np.float32)


def small(**fields):
    config = VisionTransformer.HParams.config(**{**SIZES, "position_grid": (2, 2), **fields})
    config.patch_tpl.patch_size = 4
    return config


def norm(weights, path):
    return {"scale": weights[f"{path}.scale"], "bias": weights[f"{path}.bias"]}


def read(weights):
    """Return the weights of Praxis' vision Transformer under our names."""

    def part(path, name):
        return weights[f"{path}.{name}"]

    def layer(path):
        attention, feed_forward = f"{path}.self_attention", f"{path}.ff_layer"
        heads = {"query": "query", "key": "key", "value": "value", "output": "post"}
        names = {name: {k: part(f"{attention}.{n}", k) for k in "wb"} for name, n in heads.items()}
        # Praxis stores the output projection as [dims, heads, head_dim].
        names["output"]["w"] = names["output"]["w"].transpose(1, 2, 0)
        wide = {}
        for name, number in (("up", 1), ("down", 2)):
            wide[name] = {"w": part(feed_forward, f"ffn_layer{number}.linear.w")}
            wide[f"{name}_bias"] = {"b": part(feed_forward, f"ffn_layer{number}.bias.b")}
        return {
            "attention": names,
            "attention_norm": norm(weights, f"{path}.layer_norm"),
            "feed_forward": wide,
            "feed_forward_norm": norm(weights, f"{feed_forward}.layer_norm"),
        }

    entry = "entry_stack."
    stack = {f"layers_{i}": layer(f"transformers_stack.x_layers_{i}") for i in range(2)}
    return {
        "patches": {
            "w": weights[entry + "patch_projection.linear.w"].reshape(4, 4, 3, 8),
            "b": weights[entry + "patch_projection.bias.b"],
        },
        "position": {"w": weights[entry + "pos_emb.emb_var"]},
        "stack": stack,
        "final_norm": norm(weights, "exit_stack.ln"),
    }


def test_features_and_gradients_with_interpolated_positions_equal_praxis(praxis):
    case = praxis("vision_transformer")
    config = small()
    config.stack_tpl.layer_tpl.feed_forward_tpl.activation_tpl = ReLU.HParams.config()
    layer = build(config)
    params = read(case["weights"])

    def loss(params, x):
        outputs = layer.apply({"params": params}, x)
        return jnp.sum(outputs * case["cotangent"]), outputs

    (of_params, of_x), outputs = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, case["x"])
    np.testing.assert_allclose(outputs, case["outputs"], atol=1e-5)
    np.testing.assert_allclose(of_x, case["gradient_of_x"], rtol=1e-4, atol=1e-4)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4),
        of_params,
        read(case["gradients"]),
    )


def test_patches_are_put_together_again():
    patches = image_to_patch(IMAGES, 4)
    np.testing.assert_array_equal(patches[1, 3].reshape(4, 4, 3), IMAGES[1, 4:8, 4:])
    np.testing.assert_array_equal(patch_to_image(patches, (3, 2), 4), IMAGES)


def test_patch_embedding_is_a_convolution_with_strides_of_its_kernel():
    layer = PatchEmbedding(patch_size=4, output_dims=5)
    params = jax.tree.map(lambda w: w + 0.1, layer.init(KEY)["params"])
    conv = Conv(
        input_dims=3, output_dims=5, kernel_size=(4, 4), strides=4, padding="VALID", use_bias=True
    )
    expected = conv.apply({"params": params}, IMAGES).reshape(2, 6, 5)
    np.testing.assert_allclose(layer.apply({"params": params}, IMAGES), expected, atol=1e-5)


@pytest.mark.parametrize("aligns_corners", [False, True])
@pytest.mark.parametrize("grid", [(7, 5), (2, 3)], ids=["larger", "smaller"])
def test_resized_grid_equals_that_of_pytorch(grid, aligns_corners):
    torch = pytest.importorskip("torch")
    vectors = np.random.default_rng(0).normal(size=(4, 4, 6)).astype(np.float32)
    expected = torch.nn.functional.interpolate(
        torch.tensor(vectors.transpose(2, 0, 1)[None]),
        size=grid,
        mode="bilinear",
        antialias=not aligns_corners,
        align_corners=aligns_corners,
    )
    table = jnp.asarray(vectors.reshape(16, 6))
    resized = resize_grid(table, (4, 4), grid, aligns_corners=aligns_corners)
    expected = expected[0].numpy().transpose(1, 2, 0).reshape(-1, 6)
    np.testing.assert_allclose(resized, expected, atol=1e-5)


def test_patches_attend_within_windows_that_do_not_divide_the_grid(raises):
    config = small(position_tpl=None, position_grid=None, has_grid_positions=True, window_size=2)
    rotary = RotaryPositionalEmbedding.HParams.config(sections=(0, 1, 1), section_order="axial")
    config.stack_tpl.layer_tpl.attention_tpl.set(rotary_tpl=rotary, chunk=4)
    layer = build(config)
    variables = jax.jit(layer.init)(KEY)
    features = jax.jit(layer.apply)
    changed = IMAGES.copy()
    changed[:, :4, 4:] += 1.0  # The patch in row 0 and column 1 of 3 rows and 2 columns.
    difference = features(variables, changed) - features(variables, IMAGES)
    is_changed = np.abs(difference).max(axis=(0, 2)) > 0
    np.testing.assert_array_equal(is_changed, [True] * 4 + [False] * 2)
    with raises(ConfigError, field="chunk of layers", value=[4]):
        layer.clone(window_size=None).init(KEY)


def test_outputs_are_those_of_the_tokens():
    config = small(num_layers=1, position_grid=(3, 2), has_class_token=True, num_registers=2)
    layer = build(config)
    variables = jax.jit(layer.init)(KEY)

    def run(layer, method="fprop"):
        return jax.jit(lambda v: layer.apply(v, IMAGES, method=method))(variables)

    tokens = run(layer, "tokens")
    assert tokens.shape == (2, 1 + 2 + 6, 8)
    np.testing.assert_array_equal(run(layer), tokens[:, 3:])
    np.testing.assert_array_equal(run(build(config.clone(output="class_token"))), tokens[:, 0])
    mean = run(build(config.clone(pool_tpl=GlobalPooling.HParams.config())))
    np.testing.assert_allclose(mean, tokens[:, 3:].mean(1), atol=1e-6)
    config.patch_tpl.remainder = 4
    rest = build(config)
    shapes = jax.eval_shape(lambda v: rest.apply(v, IMAGES, method="tokens"), variables)
    assert shapes.shape == (2, 1 + 2 + 2, 8)


def test_sinusoids_follow_rows_and_columns():
    layer = build(small(position_tpl=PositionalEmbedding2D.HParams.config(), position_grid=None))

    @jax.jit
    def capture(key):
        options = {"capture_intermediates": True, "mutable": "intermediates"}
        return layer.apply(layer.init(key), IMAGES, **options)[1]

    state = capture(KEY)
    [result] = state["intermediates"]["position"]["__call__"]
    table = PositionalEmbedding2D(dims=8)
    expected = table.apply({}, jnp.array([[0, 0, 1, 1, 2, 2]]), jnp.array([[0, 1, 0, 1, 0, 1]]))
    np.testing.assert_array_equal(result, expected)


def test_attention_pooling_equals_that_of_pytorch():
    torch = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    torch.nn.init.normal_(theirs.in_proj_bias)
    layer = build(AttentionPooling.HParams.config(input_dims=8, hidden_dims=4, num_heads=2))
    params = layer.init(KEY)["params"]
    weights, biases = theirs.in_proj_weight.detach(), theirs.in_proj_bias.detach()
    for name, w, b in zip(
        ("query", "key", "value"), weights.chunk(3), biases.chunk(3), strict=True
    ):
        split = {"w": w.numpy().T.reshape(8, 2, 4), "b": b.numpy().reshape(2, 4)}
        params["attention"][name] = split
    out = theirs.out_proj
    params["attention"]["output"]["w"] = out.weight.detach().numpy().T.reshape(2, 4, 8)
    params["attention"]["output"]["b"] = out.bias.detach().numpy()
    params["feed_forward"]["down"]["w"] *= 0
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)
    probe = torch.tensor(np.array(params["probe"])).expand(3, 1, 8)
    expected, _ = theirs(probe, torch.tensor(x), torch.tensor(x))
    result = layer.apply({"params": params}, x)
    np.testing.assert_allclose(result, expected[:, 0].detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"output": "class_token"}, "has_class_token", False),
        ({"position_grid": None}, "position_grid", None),
        ({"num_registers": -1}, "num_registers", -1),
        ({"num_registers": 1, "has_grid_positions": True}, "has_grid_positions", True),
        ({"window_size": 2, "has_grid_positions": True}, "chunk of layers", []),
    ],
)
def test_vision_transformer_rejects_what_does_not_fit(raises, fields, field, value):
    with raises(ConfigError, field=field, value=value):
        build(small(**fields)).init(KEY)


def test_images_that_patches_do_not_tile_raise(raises):
    with raises(ConfigError, value=(10, 8)):
        image_to_patch(jnp.zeros((1, 10, 8, 3)), 4)
