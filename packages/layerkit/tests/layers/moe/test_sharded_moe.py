"""Experts on a mesh, compared with one device, and their collectives."""

from __future__ import annotations

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from layerkit.base.base_layer import AUX_LOSS, SUMMARIES
from layerkit.base.sharding import DEFAULT_RULES, BoundSharding
from layerkit.base.weights import is_box
from layerkit.layers.moe.expert_choice import ExpertChoiceFeedForward
from layerkit.layers.moe.normalized import NormalizedMoeFeedForward, NormalizedRouter
from layerkit.layers.moe.token_choice import MoeFeedForward
from layerkit.layers.transformer.pipeline import Pipeline
from layerkit.ops.moe import grouped_matmul

KEY = jax.random.key(0)
BATCH, LENGTH, DIMS, EXPERTS = 8, 6, 4, 8
CAPACITY, DROPLESS = {"capacity_factor": 1.0}, {}
EXPERT_CHOICE = {"kind": ExpertChoiceFeedForward}
RAGGED = {"grouped_matmul": "ragged_dot"}
EXCHANGED = {"expert_exchange": "ragged_all_to_all"}
NORMALIZED = {"kind": NormalizedMoeFeedForward, "router_tpl": NormalizedRouter.HParams.config()}
BIASED = {"use_bias": True, "gate_limit": 0.5, "up_offset": 1.0}
# Experts that are split over two mesh axes.
TWO_AXES = DEFAULT_RULES.replace(expert=("fsdp", "expert"), embed=None, expert_batch="data")
CUBE_OF_DATA = {"data": 2, "expert": 2, "tensor": 2}
CUBE_OF_FSDP = {"fsdp": 2, "expert": 2, "tensor": 2}


def bind(axes, rules=DEFAULT_RULES):
    devices = np.reshape(jax.devices()[: math.prod(axes.values())], tuple(axes.values()))
    return BoundSharding(Mesh(devices, tuple(axes)), rules)


def make(**fields):
    sizes = {"input_dims": DIMS, "hidden_dims": 6, "num_experts": EXPERTS}
    kind = fields.pop("kind", MoeFeedForward)
    layer = kind(**sizes, num_shared_experts=1, train=True, **fields)
    return layer, drawn_weights(layer)


def drawn_weights(layer, scale=0.7):
    random, shapes = np.random.default_rng(3), jax.eval_shape(layer.init, KEY)
    return jax.tree.map(lambda w: random.normal(0.0, scale, w.shape).astype(w.dtype), shapes)


def inputs():
    """Activations, and rows with more and less padding."""
    x = np.random.default_rng(1).normal(size=(BATCH, LENGTH, DIMS)).astype(np.float32)
    return x, np.arange(LENGTH) < np.array([6, 3, 0, 5, 6, 6, 1, 2])[:, None]


def everything(layer):
    """((output, losses, summaries), gradients for weights and inputs)."""

    def loss(variables, x, is_token):
        output, updates = layer.apply(
            variables, x, is_token=is_token, mutable=[AUX_LOSS, SUMMARIES]
        )
        aux = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates[AUX_LOSS]))
        return jnp.sum(jnp.sin(output)) + aux, (output, updates)

    return jax.grad(loss, argnums=(0, 1), has_aux=True)


def compiled_on(bound, layer, weights):
    boxed = jax.eval_shape(layer.init_boxed, KEY)
    places = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    arguments = (weights, *inputs())
    layouts = (places, bound.sharding(("batch", None, None)), bound.sharding(("batch", None)))
    run = jax.jit(
        everything(layer.clone(sharding=bound)),
        in_shardings=layouts,
        out_shardings=((places, layouts[1]), None),
    )
    return run.lower(*arguments).compile(), jax.device_put(arguments, layouts)


@pytest.fixture(scope="module")
def expected():
    """The results of one device by the layer's fields, each computed once."""
    known = {}

    def results(fields):
        names = ("capacity_factor", "router_tpl", "use_bias", "kind", "weigh_inputs")
        key = tuple(name in fields for name in names)
        if key not in known:
            layer, weights = make(**fields)
            known[key] = jax.jit(everything(layer))(weights, *inputs())
        return known[key]

    return results


def assert_close(result, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), result, expected)


def check(expected, axes, fields, rules=DEFAULT_RULES):
    """Compare with one device; return the gradients of weights and the text of the program."""
    layer, weights = make(**fields)
    run, arguments = compiled_on(bind(axes, rules), layer, weights)
    result = run(*arguments)
    assert_close(result, expected(fields))
    return result[0][0]["params"], run.as_text()


def exchanges(program):
    return set(re.findall(r"(all-to-all|all-gather|reduce-scatter|collective-permute)\(", program))


@pytest.mark.slow  # the ordinary tests below split the experts, and test_all_meshes a cube
@pytest.mark.parametrize(
    ("axes", "fields"),
    [
        (CUBE_OF_FSDP, DROPLESS),
        (CUBE_OF_DATA, CAPACITY),
        (CUBE_OF_DATA, DROPLESS),
        (CUBE_OF_FSDP, CAPACITY),
        (CUBE_OF_DATA, EXPERT_CHOICE),
    ],
)
def test_cube_mesh_equals_one_device_and_splits_experts(expected, axes, fields):
    gradients, _ = check(expected, axes, fields)
    dims = DIMS // axes.get("fsdp", 1)
    for name, shape in (("up", (4, dims, 3)), ("down", (4, 3, dims))):
        assert gradients[name].addressable_shards[0].data.shape == shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        # Rows that are not split over the experts' axis, so that devices repeat one another's work.
        DEFAULT_RULES.replace(batch=("data", "fsdp")),
        TWO_AXES,
        # Experts that every device has whole.
        DEFAULT_RULES.replace(expert=None, embed=None),
    ],
)
@pytest.mark.parametrize("fields", [CAPACITY, DROPLESS], ids=["capacity", "dropless"])
def test_other_rules_equal_one_device(expected, rules, fields):
    check(expected, {"fsdp": 2, "expert": 2}, fields, rules)


def test_capacity_exchanges_tokens_by_all_to_all_only(expected):
    _, program = check(expected, {"expert": 4}, CAPACITY)
    assert exchanges(program) == {"all-to-all"}
    # To the experts and back, and so the gradients.
    assert len(re.findall(r"all-to-all\(", program)) == 4


def test_dropless_gathers_tokens_and_scatters_sums(expected):
    _, program = check(expected, {"expert": 4}, DROPLESS)
    assert exchanges(program) == {"all-gather", "reduce-scatter"}


# One mesh of each implementation in the ordinary tests.
@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        pytest.param(EXCHANGED, CUBE_OF_FSDP, id="blocks-cube of fsdp"),
        pytest.param(EXCHANGED, CUBE_OF_DATA, id="blocks-cube of data", marks=pytest.mark.slow),
        pytest.param(EXCHANGED, {"expert": 8}, id="blocks-experts", marks=pytest.mark.slow),
        pytest.param({**EXCHANGED, **RAGGED}, {"expert": 8}, id="ragged-experts"),
        *(
            pytest.param(
                {**EXCHANGED, **RAGGED}, cube, id=f"ragged-cube of {name}", marks=pytest.mark.slow
            )
            for name, cube in (("fsdp", CUBE_OF_FSDP), ("data", CUBE_OF_DATA))
        ),
    ],
)
def test_exchanged_rows_equal_one_device(expected, axes, fields):
    check(expected, axes, fields)


@pytest.mark.slow
def test_rows_exchanged_over_two_mesh_axes_equal_one_device(expected):
    check(expected, {"fsdp": 2, "expert": 4}, EXCHANGED, TWO_AXES)


def test_choices_beyond_the_buffer_are_counted():
    layer, weights = make(**EXCHANGED, exchange_buffer_factor=0.5)
    run, arguments = compiled_on(bind({"expert": 8}), layer, weights)
    _, (_, updates) = run(*arguments)
    summaries = updates[SUMMARIES]
    # Each device has one expert, 6 tokens with 2 choices, and room for half as many rows.
    num_choices = 2 * int(np.sum(inputs()[1]))
    load = np.array([summaries[f"expert_load/{expert}"][0] for expert in range(EXPERTS)])
    beyond = np.maximum(0, load * num_choices / EXPERTS - 6).sum()
    assert beyond > 0
    np.testing.assert_allclose(summaries["fraction_dropped"][0], beyond / num_choices, rtol=1e-5)


def test_buffer_of_all_rows_and_evaluation_drop_nothing(expected):
    layer, weights = make(**EXCHANGED, exchange_buffer_factor=8.0)
    run, arguments = compiled_on(bind({"expert": 8}), layer, weights)
    _, (output, updates) = run(*arguments)
    assert updates[SUMMARIES]["fraction_dropped"][0] == 0.0
    np.testing.assert_allclose(output, expected({})[1][0], rtol=1e-4, atol=2e-5)
    small = layer.clone(exchange_buffer_factor=0.1, train=False)
    run, arguments = compiled_on(bind({"expert": 8}), small, weights)
    np.testing.assert_allclose(run(*arguments)[1][0], output, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(DROPLESS, id="gathered", marks=pytest.mark.slow),
        pytest.param(EXCHANGED, id="exchanged"),
    ],
)
def test_biases_norms_and_weighed_inputs_on_a_mesh_equal_one_device(expected, fields):
    check(expected, CUBE_OF_FSDP, {**NORMALIZED, **fields})
    biased = {**BIASED, "weigh_inputs": True, **fields}
    gradients, _ = check(expected, CUBE_OF_FSDP, biased)
    assert gradients["down_bias"].addressable_shards[0].data.shape == (4, DIMS // 2)


@pytest.mark.parametrize("fields", [DROPLESS, EXCHANGED], ids=["gathered", "exchanged"])
def test_block_size_equals_that_of_one_device(monkeypatch, fields):
    seen = []

    def block_size(num_rows, num_groups):
        seen.append(original(num_rows, num_groups))
        return seen[-1]

    original = grouped_matmul.block_size
    monkeypatch.setattr(grouped_matmul, "block_size", block_size)
    layer = MoeFeedForward(input_dims=DIMS, hidden_dims=6, num_experts=EXPERTS, **fields)
    x = jax.ShapeDtypeStruct((BATCH, 128, DIMS), np.float32)
    weights = jax.eval_shape(layer.init, KEY)
    for sharding in (None, bind({"expert": 8})):
        jax.eval_shape(layer.clone(sharding=sharding).apply, weights, x)
    assert seen == [64, 64]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [DROPLESS, EXCHANGED, CAPACITY])
def test_pipelined_experts_on_a_mesh_equal_one_device(fields):
    stage = MoeFeedForward.HParams.config(input_dims=DIMS, hidden_dims=6, num_experts=4, **fields)
    layer = Pipeline(stage_tpl=stage, num_stages=2, num_microbatches=2, train=True)
    weights = drawn_weights(layer, scale=0.4)
    run, arguments = compiled_on(bind({"data": 2, "stage": 2, "expert": 2}), layer, weights)
    assert_close(run(*arguments), jax.jit(everything(layer))(weights, *inputs()))
