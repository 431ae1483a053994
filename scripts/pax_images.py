"""Record weights, settings and a run of ResNet-50 of paxml 1.4.0.

Runs under Python 3.10 with paxml 1.4.0 and without this repository's packages (`nox -s
pax_reference`):

    python scripts/pax_images.py FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pax_reference
from paxml import trainer_lib
from paxml.tasks.vision.params import imagenet_resnets
from praxis import base_layer, pax_fiddle, py_utils

IMAGES = {
    "IMAGE_SIZE": 32,
    "TRAIN_BATCH_SIZE": 8,
    "LEARNING_RATE": 0.05,
    "MESH_SHAPE": None,
}


def small_resnet() -> Any:
    """Return the task of ResNet-50 with two stages of a block, and its schedule in 20 steps."""
    cls = type("SmallResNet", (imagenet_resnets.ResNet50Pjit,), IMAGES)
    task = cls().task()
    network, softmax = task.model.network_tpl, task.model.softmax_tpl
    network.channels, network.blocks = (16, 32), (1, 1)
    network.strides, network.kernels = (1, 2), (3, 3)
    softmax.input_dims, softmax.num_classes = 32, 10
    schedule = task.train.learner.optimizer.lr_schedule
    schedule.boundaries, schedule.values = [5, 15, 20], [1, 0.1, 0.01]
    return pax_fiddle.instantiate(task)


def write_images(folder: Path) -> None:
    """Write ResNet50Pjit.npz: images, labels, weights and the numbers of 20 steps.

    `num_weights` is that of the whole ResNet-50, and `settings` are those of its training, as JSON.
    """
    task, rng = small_resnet(), np.random.default_rng(0)
    images = rng.standard_normal((20, 8, 32, 32, 3)).round(1).astype(np.float16)
    labels = rng.integers(0, 10, (20, 8))
    images += labels[..., None, None, None] / 5  # The mean tells the label.

    def batch_of(step: int) -> py_utils.NestedMap:
        return py_utils.NestedMap(
            image=images[step].astype(np.float32),
            label_probs=np.eye(10, dtype=np.float32)[labels[step]],
        )

    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(0))
    declared = task.model.abstract_init_with_metadata(specs)
    state, _ = trainer_lib.initialize_model_state(
        task, jax.random.PRNGKey(0), specs, do_init_checkpoint_rules=False
    )
    weights = jax.tree.map(np.asarray, state.mdl_vars["params"])

    def step(state: Any, key: Any, batch: Any) -> Any:
        state, output = trainer_lib.train_step_single_learner(
            task, state, key, batch, jnp.float32, declared
        )
        return state, output.loss

    run, losses = jax.jit(step), []
    for number in range(20):
        state, loss = run(state, jax.random.PRNGKey(1), batch_of(number))
        losses.append(float(loss))
    whole = imagenet_resnets.ResNet50Pjit()
    full = whole.task()
    image = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    label = jax.ShapeDtypeStruct((2, 1000), jnp.float32)
    sizes = pax_fiddle.instantiate(full.model).abstract_init_with_metadata(
        py_utils.NestedMap(image=image, label_probs=label)
    )["params"]
    flat = py_utils.NestedMap.FromNestedDict(sizes).FlattenItems()
    deviations = {
        name.replace(".", "/"): [list(weight.shape), standard_deviation_of(weight)]
        for name, weight in flat
    }
    optimizer = full.train.learner.optimizer
    schedule = pax_fiddle.instantiate(optimizer.lr_schedule)
    settings = {
        "learning_rates": {
            step: optimizer.learning_rate * float(schedule.value_at(jnp.int32(step)))
            for step in (0, 1000, 12_510, 75_059, 75_060, 150_120, 200_160, 225_179)
        },
        "l2": optimizer.l2_regularizer_weight,
        **{
            name: getattr(full.train, name)
            for name in (
                *("num_train_steps", "save_interval_steps", "save_max_to_keep"),
                *("summary_interval_steps", "eval_interval_steps"),
            )
        },
        "weights": deviations,
    }
    np.savez_compressed(
        folder / "ResNet50Pjit.npz",
        images=images,
        labels=labels,
        loss=np.array(losses),
        settings=json.dumps(settings),
        **{
            f"params/{key.replace('.', '/')}": value
            for key, value in py_utils.NestedMap.FromNestedDict(weights).FlattenItems()
        },
    )
    print(f"ResNet50Pjit: loss {losses[0]:.4f} to {losses[-1]:.4f}")


def standard_deviation_of(weight: base_layer.WeightHParams) -> float:
    """Return the standard deviation also of the initializers of ResNet."""
    if weight.init.method == "gaussian_sqrt_fanout":
        _, fan_out = base_layer.get_fan_in_fan_out(weight.shape)
        return weight.init.scale / math.sqrt(fan_out)
    return pax_reference.standard_deviation(weight)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    write_images(Path(sys.argv[1]))
