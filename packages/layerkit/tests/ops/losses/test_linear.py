"""The head's product and the loss in one pass, against NumPy, PyTorch and all logits in memory."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import is_box
from layerkit.errors import ConfigError
from layerkit.layers.basic.embeddings import FullSoftmax, SharedEmbeddingSoftmax
from layerkit.ops.losses.linear import TokenChunks

KEY = jax.random.key(0)
BATCH, LENGTH, DIMS, CLASSES = 2, 10, 6, 13


def make_batch(batch=BATCH, length=LENGTH):
    random = np.random.default_rng(1)
    weights = random.uniform(0.0, 2.0, (batch, length))
    weights[:, :3] = 0.0
    labels = random.integers(0, CLASSES, (batch, length))
    labels[0, 0] = -100  # has no weight
    hidden = random.normal(size=(batch, length, DIMS))
    return hidden.astype(np.float32), labels, weights.astype(np.float32)


def make_weights(layer):
    random = np.random.default_rng(2)
    shapes = jax.eval_shape(layer.init, KEY)
    return jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)


def mean_loss(layer, *args):
    return layer.apply(*args).loss


def differentiate(loss, layer, *args):
    """Return the value and the gradients of weights, hidden states and token weights."""
    run = jax.jit(jax.value_and_grad(loss, (1, 2, 4)), static_argnums=0)
    return run(layer, *args)


def assert_close(got, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, expected)


def numpy_gradients(layer, params, hidden, labels, weights):
    """Compute loss and gradients in float64, by the derivative written out."""
    w, b = np.float64(params["w"]), np.float64(params["b"])
    scaled = np.float64(hidden) * (layer.logit_scale or 1.0)
    raw, slope = scaled @ w + b, 1.0
    if cap := layer.logit_soft_cap:
        slope = 1.0 - np.tanh(raw / cap) ** 2
        raw = cap * np.tanh(raw / cap)
    log_z = np.log(np.exp(raw).sum(-1, keepdims=True))
    p, smoothing = np.exp(raw - log_z), layer.label_smoothing
    target = np.eye(CLASSES)[np.maximum(labels, 0)] * (1 - smoothing) + smoothing / CLASSES
    negative_entropy = (p * np.log(p)).sum(-1, keepdims=True)
    losses = log_z[..., 0] - (target * raw).sum(-1) + layer.z_loss_weight * log_z[..., 0] ** 2
    losses += layer.entropy_loss_weight * negative_entropy[..., 0]
    by_logit = (1 + 2 * layer.z_loss_weight * log_z) * p - target
    by_logit += layer.entropy_loss_weight * p * (np.log(p) - negative_entropy)
    shares = np.float64(weights) / weights.sum()
    by_logit *= shares[..., None] * slope
    mean = (shares * losses).sum()
    counts = weights != 0
    by_weight = (np.where(counts, losses, 0.0) - mean) / weights.sum()
    by_params = {"b": by_logit.sum((0, 1)), "w": np.einsum("bld,blv->dv", scaled, by_logit)}
    by_hidden = by_logit @ w.T * (layer.logit_scale or 1.0)
    return mean, ({"params": by_params}, by_hidden, by_weight)


# Lengths of chunks that divide the row, that do not, and one position each.
@pytest.mark.parametrize(
    ("chunk_size", "options"),
    [
        (5, {}),
        (4, {"label_smoothing": 0.1, "z_loss_weight": 0.01}),
        (1, {"logit_soft_cap": 2.0, "entropy_loss_weight": 0.1, "logit_scale": 0.5}),
    ],
)
def test_loss_and_gradients_equal_numpy(chunk_size, options):
    fields = {"input_dims": DIMS, "num_classes": CLASSES, "use_bias": True, **options}
    layer = FullSoftmax(chunk_size=chunk_size, **fields)
    params, batch = make_weights(layer), make_batch()
    expected = numpy_gradients(layer, params["params"], *batch)
    assert_close(differentiate(mean_loss, layer, params, *batch), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_pytorch(smoothing):
    torch = pytest.importorskip("torch")
    fields = {"input_dims": DIMS, "num_classes": CLASSES, "label_smoothing": smoothing}
    layer = SharedEmbeddingSoftmax(chunk_size=4, **fields)
    params, (hidden, labels, _) = make_weights(layer), make_batch()
    tensors = [torch.tensor(x, requires_grad=True) for x in (params["params"]["w"], hidden)]
    logits = (tensors[1] @ tensors[0].T).reshape(-1, CLASSES)
    loss = torch.nn.functional.cross_entropy(
        logits, torch.tensor(labels).reshape(-1), label_smoothing=smoothing, ignore_index=-100
    )
    loss.backward()
    weights = (labels >= 0).astype(np.float32)
    got, (by_params, by_hidden, _) = differentiate(
        mean_loss, layer, params, hidden, labels, weights
    )
    expected = [loss.detach().numpy(), *(x.grad.numpy() for x in tensors)]
    assert_close([got, by_params["params"]["w"], by_hidden], expected)


def loss_of_rows(layer, *args):
    """Return a loss with other gradients for each token, as those of preferences."""
    return jnp.sum(jnp.exp(-jnp.sum(layer.apply(*args).per_token_xent[:, 3:], axis=1) / 20))


def mixed_loss(layer, *args):
    outputs = layer.apply(*args)
    return 3.0 * outputs.loss + jnp.mean(outputs.per_token_loss[:, 3:] ** 2)


@pytest.mark.parametrize("loss", [loss_of_rows, mixed_loss])
def test_gradients_of_tokens_equal_those_of_all_logits_in_memory(loss):
    fields = {"input_dims": DIMS, "num_classes": CLASSES, "use_bias": True}
    layer = FullSoftmax(chunk_size=4, label_smoothing=0.1, **fields)
    args = make_weights(layer), *make_batch()
    expected = differentiate(loss, layer.clone(chunk_size=None), *args)
    assert_close(differentiate(loss, layer, *args), expected)


def test_product_with_the_hessian_equals_that_of_all_logits_in_memory():
    layer = SharedEmbeddingSoftmax(input_dims=DIMS, num_classes=CLASSES, chunk_size=4)
    params, batch = make_weights(layer), make_batch()

    def multiply(layer):
        gradient = jax.grad(lambda params: mean_loss(layer, params, *batch))
        return jax.jit(lambda params: jax.vjp(gradient, params)[1](params))(params)

    assert_close(multiply(layer), multiply(layer.clone(chunk_size=None)))


def count_products(layer, loss, args, argnums):
    function = jax.grad(loss, argnums) if argnums else loss
    program = jax.jit(function, static_argnums=0).lower(layer, *args).compile().as_text()
    whole = [f"[{BATCH},{LENGTH},{CLASSES}]", f"[{BATCH * LENGTH},{CLASSES}]"]
    return len(re.findall(r" dot\(", program)), any(shape in program for shape in whole)


@pytest.mark.parametrize(
    ("loss", "argnums", "count"),
    [
        (mean_loss, (1, 2), 3),
        (loss_of_rows, (1, 2), 4),  # logits again, for their gradients
        (mean_loss, (2,), 2),  # a frozen head
        (mean_loss, (), 1),
    ],
)
def test_program_has_few_products_and_never_all_logits(loss, argnums, count):
    fields = {"input_dims": DIMS, "num_classes": CLASSES, "fprop_dtype": jnp.bfloat16}
    layer = FullSoftmax(chunk_size=4, use_bias=True, **fields)
    args = make_weights(layer), *make_batch()
    assert count_products(layer, loss, args, argnums) == (count, False)


@pytest.mark.parametrize(
    ("axes", "classes"),
    [(("data", "fsdp", "tensor"), CLASSES), (("fsdp", "context", "tensor"), CLASSES - 1)],
)
def test_meshes_equal_one_device_and_add_gradients_of_the_head_once(axes, classes):
    layer = FullSoftmax(input_dims=DIMS, num_classes=classes, use_bias=True, z_loss_weight=0.1)
    hidden, labels, weights = make_batch(batch=4, length=12)
    args = make_weights(layer), hidden, labels % classes, weights
    expected = differentiate(mean_loss, layer, *args)
    sharding = BoundSharding(Mesh(np.reshape(jax.devices(), (2, 2, 2)), axes))
    rows = sharding.sharding(("batch", "length"))
    # Uneven classes are split within the step only.
    names = {"vocab": "vocab" if classes % 2 == 0 else None, "embed": "embed"}
    boxes = jax.eval_shape(layer.init_boxed, KEY)
    layouts = jax.tree.map(
        lambda box: sharding.sharding([names[axis] for axis in box.axes]), boxes, is_leaf=is_box
    )
    args = jax.device_put(args[0], layouts), *(jax.device_put(x, rows) for x in args[1:])
    layer = layer.clone(sharding=sharding, chunk_size=5)
    assert_close(differentiate(mean_loss, layer, *args), expected)
    run = jax.jit(jax.grad(mean_loss, 1), static_argnums=0)
    program = run.lower(layer, *args).compile().as_text()
    in_loop = [x for x in program.splitlines() if " all-reduce(" in x and "while/body" in x]
    per_device = -(-classes // 2)
    assert in_loop and not any(f"[{per_device},{DIMS}]" in line for line in in_loop)
    assert not any(f"[1,1,{per_device},{DIMS}]" in line for line in in_loop)


def test_chunks_are_equal_and_at_most_chunk_size(caplog):
    layer = FullSoftmax(input_dims=DIMS, num_classes=CLASSES, chunk_size=8)
    hidden, labels, weights = make_batch(length=9)
    with caplog.at_level("INFO", "layerkit"):
        args = make_weights(layer), hidden, labels, weights
        jax.eval_shape(lambda *args: mean_loss(layer, *args), *args)
        # A chunk has a position of each device.
        sharding = BoundSharding(Mesh(np.reshape(jax.devices()[:4], (4,)), ("context",)))
        layer = layer.clone(sharding=sharding, chunk_size=1)
        jax.eval_shape(lambda: mean_loss(layer, args[0], *make_batch(length=8)))
    # Nine positions need two chunks of at most eight: five and four, not eight and one.
    start = "logits: 0.0 GB, 2 chunks of"
    assert caplog.messages == [
        f"{start} 5 positions (chunk_size)",
        f"{start} 4 positions (chunk_size)",
    ]
    x = np.arange(BATCH * 9 * 2).reshape(BATCH, 9, 2)
    chunks = TokenChunks(2)
    np.testing.assert_array_equal(chunks.join(chunks.split(x), *x.shape[:2]), x)


@pytest.mark.parametrize("name", ["labels", "class_probabilities", "weights"])
def test_wrong_lengths_are_errors_where_chunks_would_pad_them(name):
    layer = FullSoftmax(input_dims=DIMS, num_classes=CLASSES, chunk_size=5)
    hidden, labels, weights = make_batch()
    batch = {"labels": labels, "weights": weights}
    if name == "class_probabilities":
        batch = {"class_probabilities": np.ones((BATCH, LENGTH, CLASSES)), "labels": None}
    batch[name] = batch[name][:, :-1]
    with pytest.raises(ConfigError, match=rf"shape of {name}=\[2, 9\b.*Expected \[2, 10\b"):
        layer.apply(make_weights(layer), hidden, **batch)


@pytest.mark.slow
def test_gpu_holds_one_chunk_and_reads_it_once_forward_and_once_backward(absent_devices):
    # The head of GPT-3 126M with 8 rows of 2048 tokens.
    device = SingleDeviceSharding(absent_devices("cuda", 1)[0])
    layer = FullSoftmax(input_dims=768, num_classes=50304, fprop_dtype=jnp.bfloat16)

    def place(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    tokens = 8, 2048
    params = jax.tree.map(lambda x: place(x.shape, x.dtype), jax.eval_shape(layer.init, KEY))
    args = place((*tokens, 768), jnp.bfloat16), place(tokens, jnp.int32), place(tokens, jnp.float32)
    run = jax.jit(jax.grad(mean_loss, (1, 2)), static_argnums=0).lower(layer, params, *args)
    step = run.compile({"xla_gpu_autotune_level": 0})
    program = step.as_text()
    fused = re.findall(r"^%(?!gemm)\S+ \(.*\) -> ", program, re.M)
    assert sum("f32[4096,50304]" in parameters for parameters in fused) == 2
    # The product adds the gradients of the head of the chunks before.
    assert re.search(r"^%gemm\S+ \(.*f32\[50304,768\].*\) -> f32\[50304,768\]", program, re.M)
    assert step.memory_analysis().temp_size_in_bytes < 1.5e9  # 4.9e9 with all logits
