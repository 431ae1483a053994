"""Functions of whole matrices give the same results on every mesh, without gathering a stack."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding

from layerkit.base.sharding import DEFAULT_RULES as RULES
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import WeightBox
from layerkit_runner.optim.matrix.matrices import MatrixDims
from layerkit_runner.optim.matrix.spread_matrices import map_matrices
from layerkit_runner.optim.weight_selection import declared
from layerkit_runner.partitioning.mesh import make_mesh
from layerkit_runner.tools.plan.collectives import type_bytes
from layerkit_runner.tools.plan.hlo import instructions

AXES = ("data", "fsdp", "tensor", "expert", "stage")
SLOW = pytest.mark.slow
# Names of meshes, sizes within a slice, and sizes across slices.
MESHES = [
    pytest.param([8, 1, 1, 1, 1], None, id="data 8", marks=SLOW),
    pytest.param([1, 8, 1, 1, 1], None, id="fsdp 8", marks=SLOW),
    pytest.param([1, 1, 8, 1, 1], None, id="tensor 8", marks=SLOW),
    pytest.param([1, 1, 1, 8, 1], None, id="expert 8", marks=SLOW),
    pytest.param([2, 2, 2, 1, 1], None, id="data 2 x fsdp 2 x tensor 2"),
    pytest.param([1, 2, 1, 4, 1], None, id="fsdp 2 x expert 4", marks=SLOW),
    pytest.param([1, 1, 2, 2, 2], None, id="tensor 2 x expert 2 x stage 2"),
    pytest.param([1, 4, 1, 1, 1], [2, 1, 1, 1, 1], id="2 slices of fsdp 4", marks=SLOW),
]
# Repeated heads, whose weights combine three products; experts in stages; two equal weights of
# their own; and one that no mesh divides.
WEIGHTS = {
    ("qkv", "w"): (
        ("layers", "embed", "kv_heads", None, "head_dim"),
        (3, 16, 8, 4, 2),
        MatrixDims((-4,), (-3, -2, -1), (-2, (2, 1, 1))),
    ),
    ("experts", "w"): (
        ("stage", "layers", "expert", "mlp", "embed"),
        (2, 2, 8, 24, 16),
        MatrixDims((-2,), (-1,)),
    ),
    ("first", "w"): (("heads", "head_dim", "embed"), (8, 2, 16), MatrixDims((-3, -2), (-1,))),
    ("second", "w"): (("heads", "head_dim", "embed"), (8, 2, 16), MatrixDims((-3, -2), (-1,))),
    ("odd", "w"): (("mlp", "embed"), (13, 11), MatrixDims((-2,), (-1,))),
}


def function(matrices: Any, states: Any) -> Any:
    (x, y), (state,) = matrices, states
    return (state @ x, (x + y) @ x.T @ x, np.sin(1.0) * y), (state + x @ x.T,)


def random_arrays() -> tuple[Any, Any, Any]:
    """Return two trees like the weights, and the states `[*batch, in, in]` of their products."""
    rng = np.random.default_rng(0)
    first, second = (
        {path: rng.normal(size=shape).astype(np.float32) for path, (_, shape, _) in WEIGHTS.items()}
        for _ in range(2)
    )
    shapes = {"qkv": [(3, 16, 16)] * 3, "experts": [(2, 2, 8, 24, 24)], "odd": [(13, 13)]}
    states = {
        path: [rng.normal(size=n).astype(np.float32) for n in shapes.get(path[0], [(16, 16)])]
        for path in WEIGHTS
    }
    return tuple(map(unflatten_dict, (first, second, states)))


def run(*arrays: Any) -> Any:
    dims = unflatten_dict({path: dims for path, (_, _, dims) in WEIGHTS.items()})
    return map_matrices(function, arrays[:2], arrays[2:], dims=dims)


@pytest.mark.parametrize(("sizes", "slices"), MESHES)
def test_results_on_meshes_equal_loops_over_matrices(sizes: Any, slices: Any):
    arrays = random_arrays()
    mesh = make_mesh(AXES, ici_mesh_shape=sizes, dcn_mesh_shape=slices)
    bound = BoundSharding(mesh)

    def layout(axes: Any, shape: Any, _: Any) -> NamedSharding:
        return NamedSharding(mesh, bound.spec(axes, shape=shape, allow_uneven=True))

    boxes = {path: WeightBox(None, axes) for path, (axes, *_) in WEIGHTS.items()}
    with declared(boxes, layout=layout):
        weights, states = jax.jit(run)(*arrays)
    x, y, old = map(flatten_dict, arrays)
    results, (new,) = [*map(flatten_dict, weights)], map(flatten_dict, states)

    def check(path: Any, view: Any, part: int = 0) -> None:
        """Compare the matrices `[batch, in, out]` of a weight with NumPy's results."""
        size = view(x[path]).shape[1]
        before, after = (tree[path][part].reshape(-1, size, size) for tree in (old, new))
        ours = [view(np.asarray(result[path])) for result in results]
        for index, matrices in enumerate(zip(view(x[path]), view(y[path]), strict=True)):
            expected, (state,) = function(matrices, (before[index],))
            for result, want in zip(ours, expected, strict=True):
                np.testing.assert_allclose(result[index], want, rtol=1e-5, atol=1e-4)
            np.testing.assert_allclose(after[index], state, rtol=1e-5, atol=1e-4)

    for part, products in enumerate((slice(0, 2), slice(2, 3), slice(3, 4))):
        check(("qkv", "w"), lambda w, p=products: w[..., p, :].reshape(3, 16, -1), part)
    check(("experts", "w"), lambda w: w.reshape(32, 24, 16))
    for name in ("first", "second"):
        check((name, "w"), lambda w: w.reshape(1, 16, 16))
    check(("odd", "w"), lambda w: w[None])


@pytest.mark.parametrize(
    ("sizes", "mlp", "num_replicas"),
    [
        ([1, 4, 2], "tensor", 1),
        ([2, 2, 2], "tensor", 2),
        ([8, 1, 1], "tensor", 8),
        # As ZeRO stage 1 divides an update.
        ([2, 4, 1], "data", 1),
    ],
)
def test_no_exchange_and_no_temporary_is_as_large_as_a_stack(
    sizes: Any, mlp: str, num_replicas: int
):
    layers, num_in, num_out = 32, 64, 128
    shape, dims = (layers, num_in, num_out), {"w": MatrixDims((-2,), (-1,))}
    mesh = make_mesh(("data", "fsdp", "tensor"), ici_mesh_shape=sizes)
    bound, axes = BoundSharding(mesh, RULES.replace(mlp=mlp)), ("layers", "embed", "mlp")

    def square(matrices: Any, states: Any) -> Any:
        return (matrices[0] @ matrices[0].T @ matrices[0],), states

    def update(weight: jax.Array) -> jax.Array:
        boxes = {("w",): WeightBox(None, axes)}
        with declared(boxes, layout=lambda names, shape, _: bound.sharding(names, shape=shape)):
            ((tree,), _) = map_matrices(square, [{"w": weight}], dims=dims)
        return tree["w"]

    sharding = bound.sharding(axes)
    weight = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    compiled = jax.jit(update, out_shardings=sharding).lower(weight).compile()
    matrix = 4 * num_in * num_out
    exchanged: Counter[tuple[str, int]] = Counter()
    for instruction in instructions(compiled.as_text()):
        if instruction.opcode.startswith(("all-", "collective", "reduce-scatter")):
            exchanged[instruction.opcode, type_bytes(instruction.type)] += instruction.executions
    rounds = layers // 8
    expected = {("all-to-all", matrix): 2 * rounds} if num_replicas < 8 else {}
    expected |= {("all-gather", num_replicas * matrix): rounds} if num_replicas > 1 else {}
    assert exchanged == expected
    stack = layers * matrix
    assert compiled.memory_analysis().temp_size_in_bytes < stack / 8 + (8 + num_replicas) * matrix
