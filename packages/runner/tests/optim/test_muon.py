"""Muon equals its definition in NumPy, and torch.optim.Muon, for every layout of the weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from layerkit.base.base_layer import PARAMS
from layerkit.base.weights import WeightBox, unbox
from layerkit.config import Partial
from layerkit.errors import ConfigError
from layerkit.layers import MultiHeadAttention, StackedTransformer, StackedTransformerRepeated
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.models import TransformerLm
from layerkit_runner.optim.learner import AuxiliaryOptimizer, Learner
from layerkit_runner.optim.matrices import all_but_matrices, matrix_lines
from layerkit_runner.optim.muon import muon
from layerkit_runner.optim.optimizer_groups import stacks_of
from layerkit_runner.optim.optimizer_updates import find_problem
from layerkit_runner.optim.optimizers import bfloat16_state, decays
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


class Reference:
    """The papers' optimizers of one matrix `[out, in]`, as PyTorch stores it, in float64."""

    def __init__(self, w: np.ndarray, *, variant: str = "muon", scale: str = "rms") -> None:
        self.w, self.variant, self.scale = w, variant, scale
        self.m, self.v = np.zeros_like(w), 0.0

    def step(self, g: np.ndarray) -> None:
        self.m = 0.95 * self.m + 0.05 * g
        direction = 0.05 * g + 0.95 * self.m
        rows, columns = self.w.shape
        if self.variant == "adamuon":
            direction = np.sign(direction)
        o = newton_schulz(direction)
        if self.variant != "muon":
            new = o**2 if self.variant == "adamuon" else (o**2).mean(axis=1, keepdims=True)
            self.v = 0.95 * self.v + 0.05 * new
            o = o / np.sqrt(self.v)
            o *= np.sqrt(min(rows, columns)) / np.linalg.norm(o)
        factors = {
            "rms": 0.2 * np.sqrt(max(rows, columns)),
            "shape": np.sqrt(max(1, rows / columns)),
            "spectral": np.sqrt(rows / columns),
        }
        self.w = self.w * (1 - RATE * DECAY) - RATE * factors[self.scale] * o


def matrices_of(path: tuple[str, ...], x: Any) -> list[np.ndarray]:
    """Return the matrices `[out, in]` of a weight of the model below, by its name."""
    x = np.asarray(x, np.float64)
    name = "/".join(path)
    if "feed_forward/experts" in name or path[-1] in ("up", "gate", "down"):
        return [matrix.T for matrix in x.reshape(-1, *x.shape[-2:])]
    layers = x.reshape(-1, *x.shape[-4:]) if path[-2] == "qkv" else x.reshape(-1, *x.shape[-3:])
    if path[-2] == "output":
        return [w.reshape(HEADS * HEAD_DIM, DIMS).T for w in layers]
    if path[-2] == "qkv":
        group = HEADS // KV_HEADS
        parts = [(w[:, :, :group], w[:, :, group], w[:, :, group + 1]) for w in layers]
        return [part.reshape(DIMS, -1).T for layer in parts for part in layer]
    return [w.reshape(DIMS, -1).T for w in layers]


MATRICES = ("query", "key", "value", "qkv", "output", "up", "gate", "down")


def is_matrix(path: tuple[str, ...]) -> bool:
    return path[-2] in MATRICES or path[-1] in MATRICES


def boxes_of(template: Any) -> Any:
    return jax.eval_shape(template.Instantiate().init_boxed, jax.random.key(0))[PARAMS]


def model(*, repeated: bool) -> Any:
    """Two layers with grouped queries and experts, and a tied head."""
    kind = StackedTransformerRepeated if repeated else StackedTransformer
    stack = kind.HParams.config()
    stack.layer_tpl.attention_tpl.combined_qkv = repeated
    stack.layer_tpl.feed_forward_tpl = MoeFeedForward.HParams.config(num_experts=3)
    return TransformerLm.HParams.config(
        vocab_size=16, model_dims=DIMS, hidden_dims=12, num_layers=2, stack_tpl=stack, **SIZES
    )


def learner_of(optimizer: Any, **fields: Any) -> Learner:
    adamw = AuxiliaryOptimizer.HParams.config(
        name="adamw",
        weights=all_but_matrices,
        optimizer=Partial(optax.adamw, mask=decays),
        learning_rate=0.01,
    )
    config = Learner.HParams.config(optimizer=optimizer, learning_rate=RATE, **fields)
    return config.set(auxiliary_optimizers=[adamw]).Instantiate()


def trained(learner: Learner, boxes: Any, params: Any, gradients: list[Any]) -> Any:
    """Return the weights after steps with these gradients."""
    stacks = stacks_of(boxes)

    @jax.jit
    def step(params: Any, state: Any, grads: Any, number: jax.Array) -> Any:
        update = learner.update(grads, state, params, step=number, stacks=stacks)
        return update.params, update.opt_state

    with declared(declarations_of(boxes)):
        state = learner.init(params, stacks=stacks)
        for number, grads in enumerate(gradients):
            params, state = step(params, state, grads, jnp.int32(number))
    return params


def random_like(boxes: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), unbox(boxes))


def clipped(path: tuple[str, ...], grad: Any, *, repeated: bool) -> Any:
    """Return a gradient with the norm of each layer of a stack limited to 1."""
    axes = tuple(range(1, grad.ndim)) if repeated and "stack" in path[0] else None
    norm = np.sqrt(np.sum(np.square(grad, dtype=np.float64), axis=axes, keepdims=True))
    return grad * np.minimum(1.0, 1.0 / norm)


@pytest.mark.parametrize(
    ("variant", "scale", "repeated", "clips"),
    [
        ("muon", "rms", True, True),
        ("muon", "shape", False, True),
        ("normuon", "rms", True, False),
        ("adamuon", "spectral", True, False),
    ],
)
def test_updates_equal_the_papers(variant: str, scale: str, repeated: bool, clips: bool):
    boxes = boxes_of(model(repeated=repeated))
    params, *gradients = [random_like(boxes, seed) for seed in range(1 + STEPS)]
    options: dict[str, Any] = {"variant": variant, "scale": scale, "weight_decay": DECAY}
    fields = {"clip_per_tensor_norm": 1.0} if clips else {}
    learner = learner_of(Partial(muon, mask=decays, **options), **fields)
    found = flatten_dict(trained(learner, boxes, params, gradients))
    num_matrices = 0
    for path, w in flatten_dict(params).items():
        grads = [flatten_dict(tree)[path] for tree in gradients]
        if clips:
            grads = [clipped(path, grad, repeated=repeated) for grad in grads]
        if not is_matrix(path):
            adamw, tree = optax.adamw(0.01, weight_decay=1e-4 * (w.ndim > 1)), w
            state = adamw.init(w)
            for grad in grads:
                updates, state = adamw.update(jnp.float32(grad), state, tree)
                tree = optax.apply_updates(tree, updates)
            np.testing.assert_allclose(found[path], tree, atol=1e-5, err_msg="/".join(path))
            continue
        parts = [Reference(part, variant=variant, scale=scale) for part in matrices_of(path, w)]
        for grad in grads:
            for part, g in zip(parts, matrices_of(path, grad), strict=True):
                part.step(g)
        for part, ours in zip(parts, matrices_of(path, found[path]), strict=True):
            np.testing.assert_allclose(ours, part.w, atol=1e-5, err_msg="/".join(path))
            num_matrices += 1
    # Two layers of four projections and three experts of three.
    assert num_matrices == 2 * (4 + 3 * 3)


@pytest.mark.parametrize(("scale", "theirs"), [("rms", "match_rms_adamw"), ("shape", "original")])
@pytest.mark.parametrize("shape", [(6, 4), (3, 7)])
def test_reference_equals_torch(
    shape: Any, scale: str, theirs: str, monkeypatch: pytest.MonkeyPatch
):
    """PyTorch has the code of Jordan and the scaling of Moonshot, in bfloat16."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    w, *gradients = np.random.default_rng(0).normal(size=(1 + STEPS, *shape))
    reference, tensor = Reference(w, scale=scale), torch.nn.Parameter(torch.tensor(w))
    optimizer = torch.optim.Muon([tensor], lr=RATE, weight_decay=DECAY, adjust_lr_fn=theirs)
    for grad in gradients:
        reference.step(grad)
        tensor.grad = torch.tensor(grad)
        optimizer.step()
    np.testing.assert_allclose(tensor.detach().numpy(), reference.w, atol=1e-6)


def attention_updates(grads: Any, optimizer: Any, *, combined: bool = False) -> Any:
    """Return the second of two updates with these gradients."""
    boxes = boxes_of(ATTENTION.clone().set(combined_qkv=combined))
    with declared(declarations_of(boxes)):
        state = optimizer.update(grads, optimizer.init(grads), grads)[1]
        return optimizer.update(grads, state, grads)[0]


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


@pytest.mark.parametrize(
    "optimizer",
    [
        muon(RATE, ns_dtype=jnp.bfloat16, mu_dtype=jnp.bfloat16),
        bfloat16_state(RATE, optimizer=muon),
    ],
)
def test_narrow_dtypes_change_updates_little(optimizer: Any):
    grads = random_like(boxes_of(ATTENTION), 0)
    found, expected = (attention_updates(grads, one) for one in (optimizer, muon(RATE)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-3), found, expected)


@pytest.mark.parametrize("variant", ["normuon", "adamuon"])
def test_wide_momentum_of_narrow_weights_keeps_the_dtypes_of_the_state(variant: str):
    boxes = boxes_of(ATTENTION)
    weights = jax.tree.map(jnp.bfloat16, random_like(boxes, 0))
    with declared(declarations_of(boxes)):
        assert find_problem(muon(RATE, variant=variant, mu_dtype=jnp.float32), weights) is None


def test_report_lists_matrices_and_a_weight_that_is_none_is_an_error():
    boxes = boxes_of(model(repeated=True))
    learner = Learner.HParams.config(optimizer=Partial(muon), learning_rate=RATE).Instantiate()
    with declared(declarations_of(boxes)):
        shapes = random_like(boxes, 0)
        main, adamw = learner_of(Partial(muon)).decayed_weights(shapes, stacks=stacks_of(boxes))
        assert all(map(is_matrix, main.spared)) and not any(map(is_matrix, adamw.spared))
        flat = flatten_dict(shapes)
        rows = matrix_lines({path: leaf for path, leaf in flat.items() if is_matrix(path)})
        assert matrix_lines(flat) == matrix_lines({("undeclared",): jnp.ones((2, 2))}) == []
    assert set(rows) == {
        "layers 2 × [embed 8 → kv_heads 2 · (2, 1, 1) · head_dim 3]: qkv/w",
        "layers 2 × [heads 4 · head_dim 3 → embed 8]: output/w",
        "layers 2 × expert 3 × [embed 8 → mlp 12]: feed_forward/gate, feed_forward/up",
        "layers 2 × expert 3 × [mlp 12 → embed 8]: feed_forward/down",
    }
    with (
        declared(declarations_of(boxes)),
        pytest.raises(
            ConfigError, match=r"none: final_norm/bias, .*auxiliary_optimizers.*all_but_matrices"
        ),
    ):
        learner.init(random_like(boxes, 0), stacks=stacks_of(boxes))


@pytest.mark.parametrize("smallest", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
def test_wide_and_tall_matrices_equal_the_iteration_in_float64(
    shape: tuple[int, int], smallest: float
):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(size, 16)))[0] for size in shape)
    gradient = np.float32(left * np.geomspace(1.0, smallest, 16) @ right.T)
    box = WeightBox(None, ("embed", "mlp"), fans=shape, is_factor=True)
    boxes = {("w",): box.replace(fan_in_dims=(-2,), fan_out_dims=(-1,))}
    optimizer, weights = muon(1.0, nesterov=False, scale="spectral"), {"w": gradient}
    with declared(boxes):
        update, _ = optimizer.update(weights, optimizer.init(weights), weights)
    ours = -np.asarray(update["w"], np.float64) / np.sqrt(shape[1] / shape[0])
    np.testing.assert_allclose(ours, newton_schulz(gradient.astype(np.float64)), atol=1e-5)
