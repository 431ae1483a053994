"""Weights, gradients and settings of a comparison with Praxis' optimizers, and its recording.

In an environment of Python 3.10 with paxml 1.4.0, this writes `praxis_updates.npz` beside it:

    python packages/runner/tests/optim/praxis_updates.py
"""

from __future__ import annotations

import pathlib

import numpy as np

RECORDED = pathlib.Path(__file__).with_suffix(".npz")
STEPS = 20
RATE = 0.03
SHAPES = {"matrix": (6, 5), "vector": (5,), "tensor": (3, 4, 5), "scalar": ()}

ADAFACTOR = {
    "int8": {"decay_method": "adam", "decay_adam": 0.98, "beta1": 0.9, "quantized_dtype": "int8"},
    "int16, capped and decayed": {
        "decay_method": "adam",
        "decay_adam": 0.99,
        "beta1": 0.8,
        "quantized_dtype": "int16",
        "clip_threshold": 0.5,
        "weight_decay": 0.1,
    },
    "power, bfloat16": {
        "decay_method": "pow",
        "decay_pow": 0.8,
        "beta1": 0.9,
        "quantized_dtype": "bfloat16",
        "multiply_by_parameter_scale": True,
        "epsilon2_param_scale_reg": 0.5,
    },
    "no factors, float32": {
        "decay_method": "adam",
        "decay_adam": 0.9,
        "beta1": 0.5,
        "quantized_dtype": "float32",
        "factored": False,
        "clip_threshold": None,
        "epsilon1_grad_sq_reg": 1e-4,
    },
    "no momentum": {"decay_method": "pow", "decay_pow": 0.6, "beta1": 0.0},
}
EWC_WEIGHT = 0.7
# Norm of the regularizer, its weight, and whether vectors and scalars are left out. The last update
# is recorded.
REGULARIZERS = {"l1": (1.0, 0.1, False), "l1, matrices": (1.0, 0.1, True), "l2": (2.0, 0.2, False)}
# Adam with a decoupled decay, which spares a vector as it does those of LayerNorm.
ADAM = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "clip_threshold": 1.0}
DECOUPLED_DECAY, SPARED = 0.3, "vector"
EMA_DECAY = 0.4
# Values and weights of two losses in two shards.
LOSSES = {"first": ([1.5, 4.0], [3.0, 1.0]), "second": ([0.5, -2.0], [1.0, 4.0])}


def first_weights():
    """Return weights by name, float32."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(step):
    """Return gradients by name, float32, of different sizes; a column of one is always zero."""
    rng = np.random.default_rng(1 + step)
    size = 10.0 ** rng.integers(-2, 2)
    grads = {n: np.asarray(size * rng.normal(size=s), np.float32) for n, s in SHAPES.items()}
    grads["matrix"][:, 2] = 0.0
    return grads


def rate_at(step):
    """Return the learning rate, which falls."""
    return RATE / (1.0 + 0.1 * step)


def _record():
    import jax
    import jax.numpy as jnp
    from paxml import base_metrics
    from praxis import base_layer, optimizers, py_utils, schedules

    constant = schedules.Constant.config()

    def run(transformation):
        params = py_utils.NestedMap(first_weights())
        state = transformation.init(params)
        update = jax.jit(transformation.update)
        updates = []
        for step in range(STEPS):
            result, state = update(py_utils.NestedMap(gradients(step)), state, params)
            params = jax.tree_map(jnp.add, params, result)
            updates.append(result)
        return {name: np.stack([one[name] for one in updates]) for name in SHAPES}, state

    recorded = {}
    for case, fields in ADAFACTOR.items():
        optimizer = optimizers.ShardedAdafactor.config(lr_schedule=constant, **fields).Instantiate()
        updates, state = run(optimizer._get_raw_grad_transformation(rate_at))
        recorded |= {f"{case}/{name}": value for name, value in updates.items()}
        if fields.get("quantized_dtype", "").startswith("int"):
            recorded |= {f"{case}/m/{name}": np.array(state.m[name]) for name in SHAPES}
    sgd = optimizers.sharded_sgd(rate_at, momentum=None, nesterov=False)
    ewc = optimizers.apply_ewc_regularization(rate_at, ewc_regularizer_weight=EWC_WEIGHT)
    updates, _ = run(optimizers.sharded_chain(sgd, ewc))
    recorded |= {f"ewc/{name}": value for name, value in updates.items()}
    for case, (norm, weight, skips_vectors) in REGULARIZERS.items():
        sgd = optimizers.sharded_sgd(rate_at, momentum=None, nesterov=False)
        lp = optimizers.apply_lp_regularizer(
            None, regularizer_weight=weight, p=norm, skip_lp_1d_vectors=skips_vectors
        )
        updates, _ = run(optimizers.sharded_chain(lp, sgd))
        recorded |= {f"{case}/{name}": value[-1] for name, value in updates.items()}
    decoupled = optimizers.Adam.config(
        lr_schedule=constant, learning_rate=RATE, decoupled_weight_decay=DECOUPLED_DECAY, **ADAM
    ).Instantiate()
    skips = [base_layer.WeightHParamsCollection.SKIP_LP_REGULARIZATION]
    hparams = {
        name: base_layer.WeightHParams(shape, collections=skips if name == SPARED else [])
        for name, shape in SHAPES.items()
    }
    updates, _ = run(decoupled.get_grad_transformation(py_utils.NestedMap(hparams)))
    recorded |= {f"decoupled/{name}": value for name, value in updates.items()}
    averages = optimizers.apply_ema_weights(decay=EMA_DECAY)
    _, (_, state) = run(optimizers.sharded_chain(sgd, averages))
    recorded |= {f"ema/{name}": value for name, value in state.ema.items()}
    aggregators = {
        "first": base_metrics.LossAggregator(loss_key="first"),
        "both": base_metrics.MultiLossAggregator(loss_keys=["first", "second"]),
    }
    for case, aggregator in aggregators.items():
        losses = {name: tuple(map(jnp.asarray, pair)) for name, pair in LOSSES.items()}
        _, mean, _ = jax.vmap(aggregator.aggregate, axis_name=base_layer.PMAP_PARALLEL_AXIS_NAME)(
            losses
        )
        recorded[f"aggregated/{case}"] = np.array(mean)
    np.savez_compressed(RECORDED, **recorded)


if __name__ == "__main__":
    _record()
