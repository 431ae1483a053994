"""Optimizers of matrices equal their definitions in NumPy and the published programs."""

from __future__ import annotations

import pathlib
import re
from functools import partial
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
from layerkit.layers import StackedTransformer, StackedTransformerRepeated
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.models import TransformerLm
from layerkit_runner.optim.learner import AuxiliaryOptimizer, Learner
from layerkit_runner.optim.matrix.matrices import all_but_matrices, matrix_lines
from layerkit_runner.optim.matrix.muon import muon
from layerkit_runner.optim.matrix.psgd import psgd
from layerkit_runner.optim.matrix.shampoo import shampoo
from layerkit_runner.optim.matrix.soap import soap
from layerkit_runner.optim.optimizer_groups import stacks_of
from layerkit_runner.optim.optimizers import bfloat16_state, decays
from layerkit_runner.optim.weight_selection import declarations_of, declared
from layerkit_runner.step.step_cost import program_flops

# Inputs of 14 steps and the weights after each, by `soap.py` of github.com/nikhilvyas/SOAP
# (a1e55353), `psgd.py` of github.com/lixilinx/psgd_torch (a8616f1d; without noise, called as by
# kron_torch 0.3.3) and `precondition` of github.com/google-research/precondition (239a8cda).
PUBLISHED = np.load(pathlib.Path(__file__).with_name("published_preconditioners.npz"))
RATE, DECAY, STEPS = 0.02, 0.2, 12


class Muon:
    """Jordan's optimizer, Moonshot's scale and the variants' papers for a matrix `[in, out]`."""

    def __init__(self, shape: Any, *, variant: str = "muon", scale: str = "rms") -> None:
        self.m, self.v, self.variant = np.zeros(shape), 0.0, variant
        ins, outs = shape
        self.factor = {
            "rms": 0.2 * np.sqrt(max(ins, outs)),
            "shape": np.sqrt(max(1, outs / ins)),
            "spectral": np.sqrt(outs / ins),
        }[scale]

    def step(self, g: np.ndarray) -> np.ndarray:
        self.m = 0.95 * self.m + 0.05 * g
        x = 0.05 * g + 0.95 * self.m
        x = np.sign(x) if self.variant == "adamuon" else x
        x /= np.linalg.norm(x) + 1e-7
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        if self.variant != "muon":
            new = x**2 if self.variant == "adamuon" else (x**2).mean(axis=0, keepdims=True)
            self.v = 0.95 * self.v + 0.05 * new
            x = x / np.sqrt(self.v)
            x *= np.sqrt(min(x.shape)) / np.linalg.norm(x)
        return self.factor * x


class Soap:
    """Algorithm 3 of Vyas et al. for a matrix `[in, out]`, in float64, with QR every 3 steps."""

    def __init__(self, shape: Any, *, one_sided: bool) -> None:
        rotated = [not one_sided or shape[0] <= shape[1], not one_sided or shape[1] < shape[0]]
        self.sides = [side for side in (0, 1) if rotated[side]]
        self.averages = [np.zeros((size, size)) for size in shape]
        self.bases = [np.eye(size) for size in shape]
        self.m, self.v, self.count = np.zeros(shape), np.zeros(shape), -1

    def step(self, g: np.ndarray) -> np.ndarray:
        self.count += 1
        update = np.zeros_like(g)
        if self.count:
            left, right = self.bases
            self.m = 0.95 * self.m + 0.05 * g
            self.v = 0.95 * self.v + 0.05 * (left.T @ g @ right) ** 2
            update = left @ (left.T @ self.m @ right / (np.sqrt(self.v) + 1e-2)) @ right.T
            update /= np.sqrt(1 - 0.95**self.count)
        for side in self.sides:
            gram = g.T @ g if side else g @ g.T
            average = self.averages[side] = 0.95 * self.averages[side] + 0.05 * gram
            if self.count == 0:
                self.bases[side] = np.linalg.eigh(average)[1][:, ::-1]
            elif self.count % 3 == 0:
                basis = self.bases[side]
                order = np.argsort(-np.diag(basis.T @ average @ basis))
                self.bases[side] = np.linalg.qr(average @ basis[:, order])[0]
                self.v = np.take(self.v, order, axis=side)
        return update


class Shampoo:
    """Anil et al. for a matrix `[in, out]` in float64, with blocks of 4 and roots every 3 steps."""

    def __init__(self, shape: Any, *, graft: str) -> None:
        cuts = [[slice(i, i + 4) for i in range(0, size, 4)] for size in shape]
        self.blocks = [(rows, columns) for rows in cuts[0] for columns in cuts[1]]
        self.graft, self.count, self.statistics, self.roots = graft, 0, {}, {}
        self.m, self.v = np.zeros(shape), np.zeros(shape)

    def step(self, g: np.ndarray) -> np.ndarray:
        self.v = 0.99 * self.v + 0.01 * g**2
        if self.graft == "adam":
            self.m = 0.9 * self.m + 0.1 * g
            x = self.m / (1 - 0.9 ** (self.count + 1))
            grafted = x / (np.sqrt(self.v / (1 - 0.99 ** (self.count + 1))) + 1e-2)
        else:
            x, grafted = g, g / (np.sqrt(self.v) + 1e-2)
        direction = np.zeros_like(g)
        for number, block in enumerate(self.blocks):
            for side, part in enumerate((g[block], g[block].T)):
                old = self.statistics.get((number, side), 1e-3 * np.eye(len(part)))
                self.statistics[number, side] = new = 0.99 * old + 0.01 * part @ part.T
                if self.count % 3 == 0:
                    values, vectors = np.linalg.eigh(new)
                    powers = (values + 1e-3 * values.max()) ** -0.25
                    self.roots[number, side] = vectors * powers @ vectors.T
            direction[block] = self.roots[number, 0] @ x[block] @ self.roots[number, 1]
        direction *= np.linalg.norm(grafted) / np.linalg.norm(direction)
        update = direction if self.count >= 4 else grafted
        self.count += 1
        if self.graft == "rmsprop":
            update = self.m = 0.9 * self.m + 0.1 * update
        return update


class Psgd:
    """Li's quadratic form for a matrix `[in, out]` in float64; roots of sides above 8 are diagonal.

    A fit is a step of gradient descent on both sides of a root, by its curvature. It is due in each
    of the first 6 steps, and then in every other one.
    """

    def __init__(self, shape: Any) -> None:
        self.q = [np.eye(size) for size in shape]
        self.curvatures, self.m, self.count = [0.0, 0.0], np.zeros(shape), 0

    def step(self, g: np.ndarray) -> np.ndarray:
        self.count += 1
        self.m = 0.9 * self.m + 0.1 * g
        m = self.m / (1 - 0.9**self.count)
        if self.count <= 6 or self.count % 2 == 0:
            white = self.whiten(m)
            for side, y in enumerate((white, white.T)):
                gram, target = y @ y.T, y.shape[1]
                if len(gram) > 8:
                    gram = np.diag(np.diag(gram))
                bound = (norm_bound(gram) if len(gram) <= 8 else gram.max()) + target
                self.curvatures[side] = max(0.9 * self.curvatures[side] + 0.1 * bound, bound)
                error = gram - target * np.eye(len(gram))
                factor = np.eye(len(gram)) - 0.05 / self.curvatures[side] * error
                q = factor @ self.q[side] @ factor.T
                self.q[side] = (q + q.T) / 2
        update = self.whiten(m)
        return update * min(1.0, 1.1 / np.sqrt(np.mean(update**2)))

    def whiten(self, x: np.ndarray) -> np.ndarray:
        return self.q[0] @ self.q[0] @ x @ self.q[1] @ self.q[1]


def norm_bound(x: np.ndarray) -> float:
    """Return the lower bound of psgd_torch, without noise: four steps from the largest row."""
    v = x[np.argmax(np.linalg.norm(x, axis=1))]
    for _ in range(3):
        v = v @ x
    return float(np.linalg.norm(v @ x) / np.linalg.norm(v))


MATRICES = ("query", "key", "value", "qkv", "output", "up", "gate", "down")


def is_matrix(path: tuple[str, ...]) -> bool:
    return path[-2] in MATRICES or path[-1] in MATRICES


def matrices_of(path: tuple[str, ...], x: Any) -> list[np.ndarray]:
    """Return the matrices `[in, out]` of a weight of the model below, by its name."""
    x = np.asarray(x, np.float64)
    if path[-1] in MATRICES:
        return [*x.reshape(-1, *x.shape[-2:])]
    if path[-2] == "qkv":
        layers = x.reshape(-1, *x.shape[-4:])
        parts = [(w[:, :, :-2], w[:, :, -2], w[:, :, -1]) for w in layers]
        return [part.reshape(8, -1) for layer in parts for part in layer]
    shape = (-1, 8) if path[-2] == "output" else (8, -1)
    return [w.reshape(shape) for w in x.reshape(-1, *x.shape[-3:])]


def boxes_of(template: Any) -> Any:
    return jax.eval_shape(template.Instantiate().init_boxed, jax.random.key(0))[PARAMS]


def model(*, repeated: bool, is_square: bool) -> Any:
    """Two layers of heads and experts with a tied head; maybe all matrices are 8 x 8.

    The first basis of SOAP is not unique where a matrix has a smaller rank than its side.
    """
    kind = StackedTransformerRepeated if repeated else StackedTransformer
    stack = kind.HParams.config()
    stack.layer_tpl.attention_tpl.combined_qkv = repeated
    stack.layer_tpl.feed_forward_tpl = MoeFeedForward.HParams.config(num_experts=3)
    return TransformerLm.HParams.config(
        vocab_size=16,
        model_dims=8,
        hidden_dims=8 if is_square else 12,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4 if is_square else 2,
        dim_per_head=2 if is_square else 3,
        stack_tpl=stack,
    )


def learner_of(optimizer: Any, **fields: Any) -> Learner:
    adamw = AuxiliaryOptimizer.HParams.config(
        name="adamw", weights=all_but_matrices, optimizer=Partial(optax.adamw), learning_rate=0.01
    )
    config = Learner.HParams.config(optimizer=optimizer, learning_rate=RATE, **fields)
    return config.set(auxiliary_optimizers=[adamw]).Instantiate()


def trained(optimizer: Any, boxes: Any, gradients: list[Any], params: Any, **fields: Any) -> Any:
    learner, stacks = learner_of(optimizer, **fields), stacks_of(boxes)

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


# With a small epsilon, a sign of a small number enlarges rounding errors.
SOAP = {"precondition_frequency": 3, "eps": 1e-2}
SHAMPOO: dict[str, Any] = {
    "eps": 1e-2,
    "block_size": 4,
    "root_interval": 3,
    "start_step": 4,
    "matrix_epsilon": 1e-3,
}
PSGD = Partial(
    psgd, max_dimension=8, update_probability=lambda count: jnp.where(count < 6, 1.0, 0.5)
)


@pytest.mark.parametrize("repeated", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("optimizer", "reference", "is_square"),
    [
        pytest.param(Partial(muon), Muon, False, id="muon"),
        # One rule in the ordinary tests; published programs are compared below.
        *(
            pytest.param(*case, id=name, marks=pytest.mark.slow)
            for name, case in {
                "normuon": (
                    Partial(muon, variant="normuon", scale="shape"),
                    lambda shape: Muon(shape, variant="normuon", scale="shape"),
                    False,
                ),
                "adamuon": (
                    Partial(muon, variant="adamuon", scale="spectral"),
                    lambda shape: Muon(shape, variant="adamuon", scale="spectral"),
                    False,
                ),
                "soap": (Partial(soap, **SOAP), lambda shape: Soap(shape, one_sided=False), True),
                "soap-one-sided": (
                    Partial(soap, **SOAP, one_sided=True),
                    lambda shape: Soap(shape, one_sided=True),
                    False,
                ),
                "shampoo": (
                    Partial(shampoo, **SHAMPOO),
                    lambda shape: Shampoo(shape, graft="adam"),
                    False,
                ),
                "shampoo-rmsprop": (
                    Partial(shampoo, **SHAMPOO, graft="rmsprop"),
                    lambda shape: Shampoo(shape, graft="rmsprop"),
                    False,
                ),
                "psgd": (PSGD, Psgd, False),
            }.items()
        ),
    ],
)
def test_updates_equal_their_definitions(
    optimizer: Any, reference: Any, is_square: bool, repeated: bool
):
    """Repeated layers with clipping by layer, and unrolled ones without clipping."""
    boxes = boxes_of(model(repeated=repeated, is_square=is_square))
    params, *gradients = [random_like(boxes, seed) for seed in range(1 + STEPS)]
    optimizer = optimizer.clone().set(weight_decay=DECAY, mask=decays)
    fields = {"clip_per_tensor_norm": 1.0} if repeated else {}
    result = flatten_dict(trained(optimizer, boxes, gradients, params, **fields))
    num_matrices = 0
    for path, weight in flatten_dict(params).items():
        grads = [flatten_dict(tree)[path] for tree in gradients]
        if repeated:
            grads = [clipped(path, grad, repeated=repeated) for grad in grads]
        if not is_matrix(path):
            adamw, expected = optax.adamw(0.01), weight
            state = adamw.init(weight)
            for grad in grads:
                updates, state = adamw.update(jnp.float32(grad), state, expected)
                expected = optax.apply_updates(expected, updates)
            np.testing.assert_allclose(result[path], expected, atol=1e-5, err_msg="/".join(path))
            continue
        columns = zip(*(matrices_of(path, grad) for grad in grads), strict=True)
        first, last = matrices_of(path, weight), matrices_of(path, result[path])
        for w, ours, column in zip(first, last, columns, strict=True):
            rule = reference(w.shape)
            for grad in column:
                w = w - RATE * (rule.step(grad) + DECAY * w)
            np.testing.assert_allclose(ours, w, atol=1e-5, err_msg="/".join(path))
            num_matrices += 1
    # Two layers of four projections and three experts of three.
    assert num_matrices == 2 * (4 + 3 * 3)


@pytest.mark.parametrize("shape", ["6x6", "5x8"])
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("soap", soap(0.05, b1=0.9, shampoo_beta=0.8, precondition_frequency=3, max_dimension=6)),
        ("psgd", psgd(0.05, max_dimension=6)),
        (
            "shampoo",
            shampoo(
                0.05,
                b2=0.95,
                graft="rmsprop",
                block_size=4,
                matrix_epsilon=1e-3,
                statistics_interval=2,
                root_interval=4,
                start_step=0,
                weight_decay=0.02,
            ),
        ),
    ],
)
def test_weights_equal_those_of_published_programs(name: str, optimizer: Any, shape: str):
    weight, gradients = PUBLISHED[f"weight_{shape}"], PUBLISHED[f"gradients_{shape}"]
    weights = trained_matrix(optimizer, weight, gradients)
    np.testing.assert_allclose(weights, PUBLISHED[f"{name}_{shape}"], atol=1e-5)


def test_flops_count_the_products_of_soap_at_their_interval():
    sides = {"fan_in_dims": (-2,), "fan_out_dims": (-1,)}
    box = WeightBox(None, ("embed", "mlp"), is_factor=True, fans=(8, 8), **sides)
    tree = {"w": jnp.ones((8, 8))}

    def flops(interval: int) -> float:
        rule = soap(RATE, precondition_frequency=interval)
        with declared({("w",): box}):
            return program_flops(jax.make_jaxpr(rule.update)(tree, rule.init(tree), tree))

    refinement = 2 * 2 * 8**3  # the average of each side times its basis
    assert flops(1) - flops(4) == refinement * 3 / 4


def trained_matrix(optimizer: Any, weight: Any, gradients: Any) -> np.ndarray:
    """Return a matrix `[in, out]` after each step."""
    box = WeightBox(None, ("embed", "mlp"), is_factor=True, fans=weight.shape, fan_in_dims=(-2,))
    params, weights = {"w": weight}, []
    with declared({("w",): box.replace(fan_out_dims=(-1,))}):
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for grad in gradients:
            updates, state = update({"w": grad}, state, params)
            params = optax.apply_updates(params, updates)
            weights.append(params["w"])
    return np.array(weights)


def test_soap_without_bases_is_adam_from_the_second_gradient():
    weight, gradients = PUBLISHED["weight_5x8"], PUBLISHED["gradients_5x8"]
    first, *weights = trained_matrix(soap(0.05, max_dimension=4), weight, gradients)
    np.testing.assert_array_equal(first, weight)
    expected = trained_matrix(optax.adam(0.05, b1=0.95, b2=0.95), weight, gradients[1:])
    np.testing.assert_allclose(weights, expected, atol=1e-5)


def unconditional_text(text: str) -> str:
    """Return the compiled computations that run in each step, outside of branches."""
    blocks = re.finditer(r"^(ENTRY )?%?([\w.-]+) \(.*?^}", text, re.M | re.S)
    bodies = {match[1] or match[2]: match[0] for match in blocks}
    todo, reached = ["ENTRY "], set()
    while todo:
        name = todo.pop()
        calls = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", bodies[name])
        todo += [call for call in calls if call not in reached]
        reached.add(name)
    return "\n".join(bodies[name] for name in reached)


@pytest.mark.parametrize(
    ("optimizer", "work", "number"),
    [(soap, "lapack_sgeqrf", 0), (shampoo, "lapack_ssyevd", 0), (psgd, " dot(", 4)],
)
def test_factors_are_computed_in_a_branch_of_the_compiled_step(
    optimizer: Any, work: str, number: int
):
    boxes = boxes_of(model(repeated=True, is_square=False))
    path = ("stack", "repeat", "sub", "attention", "output")
    tree, rule = {"w": flatten_dict(random_like(boxes, 0))[*path, "w"]}, optimizer(RATE)
    with declared({("w",): declarations_of(boxes)[*path, "w"]}):
        step = jax.jit(lambda g, s: rule.update(g, s, g))
        text = step.lower(tree, rule.init(tree)).compile().as_text()
    always = unconditional_text(text)
    assert " conditional(" in always
    assert text.count(work) > always.count(work) == number


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(shampoo, start_step=0),
        pytest.param(soap, marks=pytest.mark.slow),
        pytest.param(psgd, marks=pytest.mark.slow),
    ],
)
def test_state_in_bfloat16_changes_weights_little(optimizer: Any):
    """Also if the singular values of gradients fall by a factor of 1000."""
    noise = np.random.default_rng(0).normal(size=(62, 32, 32))
    left, right = (np.linalg.qr(x)[0] * np.geomspace(1, 1000**-0.5, 32) for x in noise[:2])
    gradients, zeros = np.float32(left @ noise[2:] @ right.T), np.zeros((32, 32), np.float32)
    optimizers = optimizer(RATE), bfloat16_state(RATE, optimizer=optimizer)
    whole, narrow = (trained_matrix(one, zeros, gradients)[-1] for one in optimizers)
    assert np.linalg.norm(narrow - whole) < 0.1 * np.linalg.norm(whole)


def test_report_lists_matrices_and_a_weight_that_is_none_is_an_error():
    boxes = boxes_of(model(repeated=True, is_square=False))
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
    layers = Partial(soap), boxes, [], random_like(boxes, 0)
    with pytest.raises(ConfigError, match="per_layer=True.*soap takes the layers"):
        trained(*layers, per_layer=True)
