"""Recurrent layers equal those of Praxis and PyTorch, on packed rows, in steps and on meshes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from layerkit.base.base_layer import CACHE, PARAMS, RANDOM
from layerkit.base.sharding import BoundSharding
from layerkit.base.weights import is_box
from layerkit.errors import ConfigError
from layerkit.layers import (
    AttentionMask,
    Frnn,
    GruCell,
    LstmCell,
    StackedFrnn,
)

KEY = jax.random.key(0)
SLOW = pytest.mark.slow
INS, OUTS, HIDDEN = 4, 6, 8
SIZES = {"input_dims": INS, "output_dims": OUTS}
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 0], [0, 4, 4, 4, 7, 7, 7]], np.int32)
X = np.random.default_rng(0).normal(size=(2, 7, INS)).astype(np.float32)

LSTM, GRU = LstmCell.HParams.config(), GruCell.HParams.config()
CELLS = {
    "plain": LstmCell.HParams.config(forget_gate_bias=1.0, cell_value_cap=0.4),
    "projection": LstmCell.HParams.config(hidden_dims=HIDDEN, zoneout_rate=0.3),
    "cifg": LstmCell.HParams.config(couples_gates=True, output_nonlinearity=False),
    "layer_norm": LstmCell.HParams.config(uses_layer_norm=True, forget_gate_bias=0.5),
    "gru": GRU,
}


def frnn(cell=LSTM, **fields):
    return Frnn(**SIZES, cell_tpl=cell, **fields)


def stack(cell=LSTM, **fields):
    frnn_tpl = Frnn.HParams.config(cell_tpl=cell, **fields.pop("frnn", {}))
    return StackedFrnn(**SIZES, num_layers=2, frnn_tpl=frnn_tpl, **fields)


def draw(layer):
    random = np.random.default_rng(3)
    shapes = jax.eval_shape(layer.init, KEY)[PARAMS]
    return {PARAMS: jax.tree.map(lambda x: random.normal(0, 0.5, x.shape).astype("f"), shapes)}


def mix(layer, variables, x=X, state=None, segments=None):
    segments = None if segments is None else jnp.asarray(segments)
    run = jax.jit(functools.partial(layer.apply, method="mix"))
    return run(variables, jnp.asarray(x), state, segments=segments)


def close(ours, theirs, bound):
    np.testing.assert_allclose(ours, theirs, atol=bound * max(1.0, np.abs(theirs).max()), rtol=0)


# Path of a cell here, path of the cell in Praxis, size of its inputs.
ALONE = {("cell",): ("cell", INS)}
BOTH = {
    (f"{name}_{i}", "cell"): (f"{theirs}frnn_{i}.cell", (INS, OUTS)[i])
    for i in range(2)
    for name, theirs in {"forward": "fwd_", "backward": "bwd_"}.items()
}
STACKED = {(f"forward_{i}", "cell"): (f"frnn_{i}.cell", (INS, OUTS)[i]) for i in range(2)}
PRAXIS = {name: (frnn(CELLS[name]), ALONE) for name in list(CELLS)[:-1]} | {
    "stack": (stack(), STACKED),
    "bidirectional": (stack(is_bidirectional=True), BOTH),
}


def from_praxis(weights, cells, gates):
    """Return the weights of Praxis, or their gradients, by the paths and names of ours."""
    renamed = {"b": "b", "ln_scale": "scale", "w_proj": "projection"}
    tree = {}
    for path, (theirs, ins) in cells.items():
        cell = functools.reduce(lambda node, key: node.setdefault(key, {}), path, tree)
        for name, weight in weights.items():
            if name == f"{theirs}.wm":
                weight = weight.reshape(len(weight), gates, -1)
                cell["w"], cell["recurrent"] = weight[:ins], weight[ins:]
            elif name.startswith(f"{theirs}."):
                name = renamed[name.removeprefix(f"{theirs}.")]
                cell[name] = weight if name == "projection" else weight.reshape(gates, -1)
    return tree


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name == "stack" else ()) for name in PRAXIS]
)
def test_outputs_and_gradients_equal_praxis(praxis, name):
    case, (layer, cells) = praxis(f"lstm_{name}"), PRAXIS[name]
    convert = functools.partial(from_praxis, cells=cells, gates=3 if name == "cifg" else 4)
    segments = case.get("segments", 1 - case.get("paddings", 0)).astype(np.int32)

    def loss(params, x):
        outputs = mix(layer, {PARAMS: params}, x, segments=segments)[0]
        return jnp.sum(outputs * case["cotangent"]), outputs

    params = convert(case["weights"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, draw(layer)[PARAMS])
    grads, outputs = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, case["x"])
    close(outputs, case["outputs"], 1e-5)
    expected = (convert(case["gradients"]), case["gradient_of_x"])
    jax.tree.map(functools.partial(close, bound=1e-4), grads, expected)


# PyTorch

NAMES = {"w": "ih", "recurrent": "hh"}


# PyTorch names the slower of its implementations.
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    "kind", ["gru", pytest.param("lstm", marks=SLOW), pytest.param("projection", marks=SLOW)]
)
def test_bidirectional_stacks_equal_pytorch(kind):
    torch = pytest.importorskip("torch")
    is_gru, size = kind == "gru", HIDDEN if kind == "projection" else OUTS // 2
    fields = {"proj_size": OUTS // 2} if kind == "projection" else {}
    torch.manual_seed(0)
    theirs = (torch.nn.GRU if is_gru else torch.nn.LSTM)(
        INS, size, num_layers=2, batch_first=True, bidirectional=True, **fields
    )
    hidden = HIDDEN if fields else None
    cell = GRU if is_gru else LstmCell.HParams.config(cell_value_cap=None, hidden_dims=hidden)
    layer = stack(cell, is_bidirectional=True)

    def convert(read, path):
        def gates(name):
            # PyTorch's gates of an LSTM are input, forget, candidate, output.
            value = read(f"{name}_{path}")
            value = value.reshape(-1, size, *value.shape[1:])
            return value if is_gru else value[[2, 0, 1, 3]]

        biases = gates("bias_ih"), gates("bias_hh")
        weights = {name: np.moveaxis(gates(f"weight_{n}"), -1, 0) for name, n in NAMES.items()}
        if is_gru:
            kept = np.array([1, 1, 0])[:, None]
            return weights | {"b": biases[0] + kept * biases[1], "recurrent_b": biases[1][2:]}
        projection = {"projection": read(f"weight_hr_{path}").T} if fields else {}
        return weights | {"b": sum(biases)} | projection

    def tree(read):
        suffixes = {"forward": "", "backward": "_reverse"}
        return {
            f"{n}_{i}": {"cell": convert(read, f"l{i}{s}")}
            for i in range(2)
            for n, s in suffixes.items()
        }

    params = tree(lambda name: getattr(theirs, name).detach().numpy())
    x = torch.tensor(X, requires_grad=True)
    expected = theirs(x)[0]
    cotangent = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    (expected * torch.tensor(cotangent)).sum().backward()

    def loss(params, x):
        outputs = mix(layer, {PARAMS: params}, x)[0]
        return jnp.sum(outputs * cotangent), outputs

    grads, outputs = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, X)
    close(outputs, expected.detach().numpy(), 1e-5)
    close(grads[1], x.grad.numpy(), 1e-4)
    expected_grads = tree(lambda name: getattr(theirs, name).grad.numpy())
    for name in ("forward_0", "backward_1"):
        for weight in NAMES:
            close(grads[0][name]["cell"][weight], expected_grads[name]["cell"][weight], 1e-4)


# Laws

LAYERS = {name: frnn(cell) for name, cell in CELLS.items()} | {
    "bidirectional": stack(is_bidirectional=True, frnn={"unroll": 2, "remat": "full"}),
    "residual": stack(has_residual=True),
    "reverse": frnn(CELLS["projection"], reverse=True),
}


def smoke(first, *others):
    """Return the cases of a table, of which an ordinary run has the first."""
    return [first, *(pytest.param(other, marks=SLOW) for other in others)]


@pytest.mark.parametrize("name", smoke("reverse", "projection", "gru", "bidirectional"))
def test_packed_rows_equal_separate_rows_with_gradients(name):
    layer, variables = LAYERS[name], draw(LAYERS[name])
    weights = np.random.default_rng(2).normal(size=(2, 7, OUTS)).astype(np.float32)

    @jax.jit
    def packed(x):
        outputs = mix(layer, variables, x, segments=SEGMENTS)[0]
        return jnp.sum(outputs * weights * (SEGMENTS > 0)[..., None]), outputs

    @jax.jit
    def separate(x):
        tokens = np.nonzero(SEGMENTS)  # of documents with three tokens
        documents = mix(layer, variables, x[tokens].reshape(4, 3, INS))[0].reshape(12, OUTS)
        outputs = jnp.zeros(weights.shape).at[tokens].set(documents)
        return jnp.sum(outputs * weights), outputs

    (_, outputs), gradient = jax.value_and_grad(packed, has_aux=True)(X)
    (_, expected), expected_gradient = jax.value_and_grad(separate, has_aux=True)(X)
    close(np.where(SEGMENTS[..., None] > 0, outputs, 0), expected, 1e-6)
    close(gradient, expected_gradient, 1e-6)


@pytest.mark.parametrize("name", smoke("residual", "projection", "gru"))
def test_cached_steps_and_passed_states_equal_the_full_pass(name):
    layer, variables = LAYERS[name], draw(LAYERS[name])
    mask = AttentionMask.causal_mask(2, 7)
    expected = jax.jit(layer.apply)(variables, X, mask=mask)
    extend = jax.jit(functools.partial(layer.apply, method="extend_step", mutable=[CACHE]))
    init_cache = lambda v: layer.apply(v, 2, 7, method="init_cache", mutable=[CACHE])  # noqa: E731
    _, cache = jax.jit(init_cache)(variables)
    outputs, time_step = [], 0
    for size in (4, 1, 1, 1):
        tokens = X[:, time_step : time_step + size]
        step, cache = extend(variables | cache, tokens, time_step=jnp.int32(time_step))
        outputs.append(step)
        time_step += size
    close(jnp.concatenate(outputs, axis=1), expected, 1e-6)
    _, state = mix(layer, variables, X[:, :4])
    close(mix(layer, variables, X[:, 4:], state)[0], expected[:, 4:], 1e-6)


def test_padding_before_between_and_after_tokens_keeps_the_state():
    layer, variables = frnn(), draw(frnn())
    segments = np.array([[0, 1, 1, 0, 1, 0, 0]], np.int32)
    outputs, state = mix(layer, variables, X[:1], segments=segments)
    expected, last = mix(layer, variables, X[:1, [1, 2, 4]])
    close(outputs[:, [1, 2, 4]], expected, 1e-6)
    jax.tree.map(functools.partial(close, bound=1e-6), state, last)


def test_cell_state_is_float32_and_outputs_have_the_compute_dtype():
    layer = frnn(fprop_dtype="bfloat16")
    outputs, state = mix(layer, draw(layer))
    assert outputs.dtype == state["output"].dtype == jnp.bfloat16
    assert state["cell"].dtype == jnp.float32
    close(outputs.astype(jnp.float32), mix(frnn(), draw(layer))[0], 0.03)


def test_zoneout_in_training_keeps_units_at_its_rate():
    layer = frnn(LstmCell.HParams.config(zoneout_rate=0.25), train=True).clone(output_dims=200)
    x, variables = np.repeat(X[:, :1], 2, axis=1), draw(layer)
    run = functools.partial(layer.apply, method="mix", rngs={RANDOM: KEY})
    outputs, _ = jax.jit(run)(variables, x)
    kept = np.mean(np.asarray(outputs[:, 0]) == 0)  # as the zeros before the first step
    assert 0.2 < kept < 0.3
    assert 0.2 < np.mean(np.asarray(outputs[:, 1] == outputs[:, 0])) < 0.3


@pytest.mark.parametrize(
    "case", smoke(("projection", (1, 2, 2, 2)), ("layer_norm", (1, 2, 4, 1)), ("gru", (2, 1, 2, 2)))
)
def test_meshes_have_the_outputs_and_gradients_of_one_device(case):
    name, sizes = case
    layer = Frnn(input_dims=8, output_dims=8, cell_tpl=CELLS[name])
    variables, random = draw(layer), np.random.default_rng(5)
    x = random.normal(size=(4, 8, 8)).astype(np.float32)
    segments = np.repeat([[1, 1, 1, 2, 2, 2, 3, 0]], 4, axis=0).astype(np.int32)

    def loss(layer, variables, x, segments):
        outputs = layer.apply(
            variables, x, mask=AttentionMask.causal_mask(4, 8, segment_ids=segments)
        )
        return jnp.sum(jnp.square(outputs)), outputs

    run = jax.value_and_grad(loss, (1, 2), has_aux=True)
    expected = jax.jit(functools.partial(run, layer))(variables, x, segments)
    axes = ("data", "fsdp", "tensor", "context")
    bound = BoundSharding(Mesh(np.reshape(jax.devices(), sizes), axes))
    boxed = jax.eval_shape(layer.init_boxed, KEY)
    layouts = jax.tree.map(
        lambda box: bound.sharding(box.axes, shape=box.value.shape), boxed, is_leaf=is_box
    )
    rows = NamedSharding(bound.mesh, bound.spec(("batch", "length")))
    with jax.set_mesh(bound.mesh):
        arguments = jax.device_put((x, segments), rows)
        ours = jax.jit(functools.partial(run, layer.clone(sharding=bound)))(
            jax.device_put(variables, layouts), *arguments
        )
    jax.tree.map(functools.partial(close, bound=1e-5), ours, expected)


def test_masks_that_do_not_fit_the_direction_are_refused(raises):
    bidirectional = AttentionMask.bidirectional_mask(2, 7)
    for layer, mask in (
        (frnn(), bidirectional),
        (frnn(reverse=True), AttentionMask.causal_mask(2, 7)),
        (LAYERS["bidirectional"], AttentionMask.causal_mask(2, 7)),
    ):
        with raises(ConfigError, field="mask"):
            layer.apply(draw(layer), X, mask=mask)
    layer = frnn(reverse=True)
    with raises(ConfigError, field="is_causal"):
        layer.apply(draw(layer), 2, 7, method="init_cache", mutable=[CACHE])
