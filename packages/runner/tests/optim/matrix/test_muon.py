"""Muon equals torch.optim.Muon, for every layout, kind of matrix and dtype of the weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base.base_layer import PARAMS
from layerkit.base.weights import WeightBox, unbox
from layerkit.layers import MultiHeadAttention
from layerkit_runner.optim.matrix.muon import muon
from layerkit_runner.optim.optimizer_updates import find_problem
from layerkit_runner.optim.optimizers import bfloat16_state
from layerkit_runner.optim.weight_selection import declarations_of, declared

RATE, DECAY, STEPS = 0.1, 0.2, 3
DIMS, HEADS, KV_HEADS, HEAD_DIM = 8, 4, 2, 3
SIZES: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "dim_per_head": HEAD_DIM}
ATTENTION = MultiHeadAttention.HParams.config(input_dims=DIMS, **SIZES)


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Return the result of five iterations, by Jordan's definition."""
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def boxes_of(template: Any) -> Any:
    return jax.eval_shape(template.Instantiate().init_boxed, jax.random.key(0))[PARAMS]


def box_of(shape: tuple[int, int], *, is_transposed: bool = False) -> dict[Any, WeightBox]:
    """Return the declaration of a weight `[in, out]`, or `[out, in]` as PyTorch stores it."""
    box = WeightBox(None, ("embed", "mlp"), fans=shape, is_factor=True)
    ins, outs = ((-1,), (-2,)) if is_transposed else ((-2,), (-1,))
    return {("w",): box.replace(fan_in_dims=ins, fan_out_dims=outs)}


def random_like(boxes: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), unbox(boxes))


@pytest.mark.parametrize(("scale", "theirs"), [("rms", "match_rms_adamw"), ("shape", "original")])
@pytest.mark.parametrize("shape", [(6, 4), (3, 7)])
def test_weights_equal_those_of_torch(
    shape: Any, scale: Any, theirs: str, monkeypatch: pytest.MonkeyPatch
):
    """PyTorch has the code of Jordan and the scaling of Moonshot, in bfloat16."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    first, *gradients = np.random.default_rng(0).normal(size=(4, *shape))
    params, tensor = {"w": jnp.float32(first)}, torch.nn.Parameter(torch.tensor(first))
    theirs = torch.optim.Muon([tensor], lr=0.1, weight_decay=0.2, adjust_lr_fn=theirs)
    ours = muon(0.1, weight_decay=0.2, scale=scale)
    with declared(box_of(shape, is_transposed=True)):
        state = ours.init(params)
        for grad in gradients:
            updates, state = ours.update({"w": jnp.float32(grad)}, state, params)
            params = optax.apply_updates(params, updates)
            tensor.grad = torch.tensor(grad)
            theirs.step()
    np.testing.assert_allclose(params["w"], tensor.detach().numpy(), atol=1e-5)


def attention_updates(grads: Any, optimizer: Any, *, combined: bool = False) -> Any:
    """Return the second of two updates with these gradients."""
    boxes = boxes_of(ATTENTION.clone().set(combined_qkv=combined))

    def second(grads: Any) -> Any:
        state = optimizer.update(grads, optimizer.init(grads), grads)[1]
        return optimizer.update(grads, state, grads)[0]

    with declared(declarations_of(boxes)):
        return jax.jit(second)(grads)


@pytest.mark.parametrize("options", [{}, {"variant": "normuon"}, {"split_heads": True}])
def test_combined_projection_is_updated_as_separate_ones(options: Any):
    rng = np.random.default_rng(0)
    group = HEADS // KV_HEADS
    qkv = rng.normal(size=(DIMS, KV_HEADS, group + 2, HEAD_DIM)).astype(np.float32)
    output = {"w": rng.normal(size=(HEADS, HEAD_DIM, DIMS)).astype(np.float32)}
    separate = {
        "query": {"w": qkv[:, :, :group].reshape(DIMS, HEADS, HEAD_DIM)},
        "key": {"w": qkv[:, :, group]},
        "value": {"w": qkv[:, :, group + 1]},
        "output": output,
    }
    combined = attention_updates(
        {"qkv": {"w": qkv}, "output": output}, muon(RATE, **options), combined=True
    )
    expected = attention_updates(separate, muon(RATE, **options))
    w = np.asarray(combined["qkv"]["w"])
    np.testing.assert_allclose(
        w[:, :, :group].reshape(DIMS, HEADS, HEAD_DIM), expected["query"]["w"], atol=1e-7
    )
    np.testing.assert_allclose(w[:, :, group], expected["key"]["w"], atol=1e-7)
    np.testing.assert_allclose(w[:, :, group + 1], expected["value"]["w"], atol=1e-7)
    if "split_heads" in options:
        heads = np.asarray(expected["output"]["w"], np.float64)
        factor = 0.2 * np.sqrt(DIMS)
        expected_heads = [-RATE * factor * newton_schulz(head) for head in output["w"]]
        np.testing.assert_allclose(heads, expected_heads, atol=1e-6)


def test_combined_projection_does_not_depend_on_a_weight_that_is_shaped_as_its_keys():
    rng, shape = np.random.default_rng(0), (DIMS, KV_HEADS * HEAD_DIM)
    combined = boxes_of(ATTENTION.clone().set(combined_qkv=True))["qkv"]["w"]
    boxes = {("before", "w"): box_of(shape)["w",], ("qkv", "w"): combined}
    grads = {
        "before": {"w": rng.normal(size=shape).astype(np.float32)},
        "qkv": {"w": rng.normal(size=combined.value.shape).astype(np.float32)},
    }
    optimizer = muon(RATE)
    with declared(boxes):
        both, alone = (
            optimizer.update(tree, optimizer.init(tree), tree)[0]
            for tree in (grads, {"qkv": grads["qkv"]})
        )
    np.testing.assert_allclose(both["qkv"]["w"], alone["qkv"]["w"], atol=1e-7)


@pytest.mark.parametrize(
    "optimizer",
    [
        muon(RATE, ns_dtype=jnp.bfloat16, mu_dtype=jnp.bfloat16),
        bfloat16_state(RATE, optimizer=muon),
    ],
)
def test_narrow_dtypes_change_updates_little(optimizer: Any):
    grads = random_like(boxes_of(ATTENTION), 0)
    result, expected = (attention_updates(grads, one) for one in (optimizer, muon(RATE)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-3), result, expected)


@pytest.mark.parametrize("variant", ["normuon", "adamuon"])
def test_wide_momentum_of_narrow_weights_keeps_the_dtypes_of_the_state(variant: str):
    boxes = boxes_of(ATTENTION)
    weights = jax.tree.map(jnp.bfloat16, random_like(boxes, 0))
    with declared(declarations_of(boxes)):
        assert (
            find_problem(muon(RATE, variant=variant, mu_dtype=jnp.float32), weights, weights)
            is None
        )


@pytest.mark.parametrize("scale", ["rms", "shape", "spectral"])
def test_a_weight_of_no_layer_of_a_stack_has_an_empty_update(scale: Any):
    """A state in host memory is updated one layer at a time, without the weights of others."""
    empty = {"w": np.zeros((0, 6), np.float32)}
    with declared(box_of((4, 6))):
        updates, _ = muon(RATE, scale=scale).update(empty, muon(RATE).init(empty), empty)
    assert updates["w"].shape == (0, 6)


@pytest.mark.parametrize("smallest", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
def test_wide_and_tall_matrices_equal_the_iteration_in_float64(
    shape: tuple[int, int], smallest: float
):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(size, 16)))[0] for size in shape)
    gradient = np.float32(left * np.geomspace(1.0, smallest, 16) @ right.T)
    optimizer, weights = muon(1.0, nesterov=False, scale="spectral"), {"w": gradient}
    with declared(box_of(shape)):
        update, _ = optimizer.update(weights, optimizer.init(weights), weights)
    ours = -np.asarray(update["w"], np.float64) / np.sqrt(shape[1] / shape[0])
    np.testing.assert_allclose(ours, newton_schulz(gradient.astype(np.float64)), atol=1e-5)
