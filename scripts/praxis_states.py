"""Cases of `praxis_reference.py` that are about layers with a state and vector quantizers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_layer, pax_fiddle, py_utils
from praxis.layers import frnn, quantizer, rnn_cell, ssm

RANDOM = np.random.default_rng(44)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 3, 3, 0, 0]], np.int32)


def normal(*shape, scale=0.7):
    """Return normal numbers of few digits, which JSON holds exactly."""
    return np.round(RANDOM.normal(0.0, scale, shape), 3).astype(np.float32)


def run(layer_class, *args, outputs_of, **fields):
    """Return weights, outputs and gradients of a layer of Praxis with drawn weights.

    The gradients are those of the sum of the product of the outputs and `cotangent`, with respect
    to weights and to the first argument.

    Args:
      layer_class: Class of the layer.
      *args: Arrays; the first one is differentiated.
      outputs_of: Function of the layer and the arguments that calls it.
      **fields: Fields of the layer.
    """
    layer = base_layer.instantiate(pax_fiddle.Config(layer_class, name="layer", **fields))
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
        variables = layer.init(jax.random.PRNGKey(0), *args, method=outputs_of)
        weights = jax.tree_util.tree_map(lambda w: normal(*w.shape), variables["params"])

        def apply(weights, x):
            keys = {"random": jax.random.PRNGKey(1)}
            call = functools.partial(layer.apply, method=outputs_of, rngs=keys)
            return call({"params": weights}, x, *args[1:], mutable=["decoder_cache"])[0]

        outputs = apply(weights, args[0])
        cotangent = normal(*outputs["outputs"].shape)

        def loss(weights, x):
            out = apply(weights, x)
            return jnp.sum(out["outputs"] * cotangent) + out.get("loss", 0.0)

        gradients, of_x = jax.grad(loss, (0, 1))(weights, args[0])
    flat = {
        name: dict(py_utils.NestedMap.FromNestedDict(tree).FlattenItems())
        for name, tree in {"weights": weights, "gradients": gradients}.items()
    }
    return {"x": args[0], "cotangent": cotangent, "gradient_of_x": of_x, **flat, **outputs}


def recurrent(record):
    """Cells run over rows, and stacks of them."""

    def call(layer, x, paddings, segments=None):
        inputs = py_utils.NestedMap(act=x, padding=paddings[..., None])
        if segments is not None:
            inputs.segment_ids = segments[..., None]
        return {"outputs": layer(inputs)[0]}

    paddings = (SEGMENTS == 0).astype(np.float32)
    sizes = {"num_input_nodes": 4, "num_output_nodes": 6, "reset_cell_state": True}
    cells = {
        "plain": (rnn_cell.LstmCellSimple, {"forget_gate_bias": 1.0, "cell_value_cap": 0.4}),
        "projection": (rnn_cell.LstmCellSimple, {"num_hidden_nodes": 8, "zo_prob": 0.3}),
        "cifg": (rnn_cell.CifgLstmCellSimple, {"output_nonlinearity": False}),
        "layer_norm": (rnn_cell.LayerNormalizedLstmCellSimple, {"forget_gate_bias": 0.5}),
    }
    for name, (cell, fields) in cells.items():
        case = run(
            frnn.LstmFrnn if name == "projection" else frnn.FRnn,
            normal(2, 7, 4),
            paddings,
            SEGMENTS,
            outputs_of=call,
            cell_tpl=pax_fiddle.Config(cell, **sizes, **fields),
        )
        record(f"lstm_{name}", segments=SEGMENTS, **case)
    for name, stack in {"stack": frnn.StackFrnn, "bidirectional": frnn.StackBiFrnn}.items():
        case = run(
            stack,
            normal(2, 7, 4),
            paddings,
            outputs_of=call,
            frnn_tpl=pax_fiddle.Config(
                frnn.FRnn, cell_tpl=pax_fiddle.Config(rnn_cell.LstmCellSimple)
            ),
            num_layers=2,
            num_input_nodes=4,
            num_output_nodes=6,
        )
        record(f"lstm_{name}", paddings=paddings, **case)


def quantizers(record):
    """Vector quantizers, whose codebooks are frozen or trained."""

    def call(layer, x, paddings):
        out = layer(x, paddings)
        return {"outputs": out.pop("z_q"), **out}

    paddings = (SEGMENTS == 0).astype(np.float32)
    cases = {
        "random": (quantizer.RandomVectorQuantizer, {"projection_dim": 6}),
        "random_groups": (
            quantizer.RandomVectorQuantizer,
            {
                "projection_dim": 6,
                "num_groups": 2,
                "normalize_latent_vector": True,
                "normalize_codebook": True,
            },
        ),
        "trained": (quantizer.VectorQuantizer, {"beta": 0.25}),
        "trained_groups": (
            quantizer.VectorQuantizer,
            {
                "beta": 0.5,
                "num_groups": 2,
                "normalize_latent_vector": False,
                "normalize_codebook": False,
            },
        ),
    }
    for name, (layer, fields) in cases.items():
        sizes = {"latent_dim": 4, "num_latent_classes": 5}
        case = run(layer, normal(2, 7, 4), paddings, outputs_of=call, **sizes, **fields)
        case.pop("z_onehot")
        record(f"quantizer_{name}", **{**case, "paddings": paddings})


def state_spaces(record):
    """S4D and S5 with each kind of poles."""
    for name, layer in {"s4d": ssm.SSM, "s5": ssm.S5}.items():
        for poles in ("ss4d-1d", "ss4d-1d-legs", "ss4d-1d-lagt"):
            fields = {"nheads": 6, "dim": 4, "l_max": 9, "decode_num_samples": 1}
            fields |= {"step_size": 0.1, "hippo_type": poles}
            case = run(
                layer, normal(2, 9, 4), outputs_of=lambda ssm, x: {"outputs": ssm(x)}, **fields
            )
            record(f"{name}_{poles}", **case)
