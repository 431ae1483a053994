"""ResNet-50 has the weights, first draws, settings and losses of Pax's.

`pax/ResNet50Pjit.npz` is what paxml 1.4.0 says of it; `scripts/pax_images.py` writes it.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_experiments.vision.generated_images import GeneratedImages
from layerkit_experiments.vision.imagenet import ResNet50Pjit, warmup_then_tenths
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve

ARCHIVE = Path(__file__).parents[1] / "pax" / "ResNet50Pjit.npz"
SMALL: dict[str, Any] = {
    "CHANNELS": [16, 32],
    "BLOCKS": [1, 1],
    "IMAGE_SIZE": 32,
    "NUM_CLASSES": 10,
    "PERCORE_BATCH_SIZE": 8.0,
    "LEARNING_RATE": 0.05,
    "WARMUP_STEPS": 5,
    "STEP_BOUNDARIES": [15],
    "MAX_STEPS": 20,
    "ICI_MESH_SHAPE": None,
}
NAMES = {
    "bn/scale": "bn/gamma",
    "bn/bias": "bn/beta",
    "softmax/w": "softmax/logits_ffn/linear/w",
    "softmax/b": "softmax/logits_ffn/bias/b",
}


@functools.cache
def recorded() -> dict[str, np.ndarray]:
    with np.load(ARCHIVE) as archive:
        return dict(archive)


@functools.cache
def settings() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(str(recorded()["settings"]))
    return result


def praxis_name(name: str) -> str:
    """The name of Praxis for the name of a weight."""
    end = next((end for end in NAMES if name.endswith(end)), "")
    return name.removesuffix(end) + NAMES.get(end, "")


def test_weights_and_their_draws_are_those_of_pax():
    model = build(resolve(ResNet50Pjit()).task.model)
    key = jax.random.key(5, impl="rbg")  # whose programs are compiled faster
    drawn = flatten_dict(jax.jit(model.init)(key)["params"], sep="/")
    theirs = settings()["weights"]
    assert {praxis_name(name) for name in drawn} == set(theirs)
    assert sum(value.size for value in drawn.values()) == 25_557_032
    for name, value in drawn.items():
        shape, deviation = theirs[praxis_name(name)]
        assert list(value.shape) == shape
        if deviation == 0:
            np.testing.assert_array_equal(value, -1.0 if name.endswith("body_2/bn/scale") else 0.0)
        else:
            # Four standard errors of a deviation that is measured on n values.
            rel = 4 / math.sqrt(2 * value.size)
            assert np.asarray(value, np.float64).std() == pytest.approx(deviation, rel=rel)


def test_settings_are_those_of_pax():
    expected, task = settings(), resolve(ResNet50Pjit()).task
    rate_at = task.train.learner.learning_rate.Instantiate()
    for step, rate in expected["learning_rates"].items():
        assert float(rate_at(int(step))) == pytest.approx(rate, rel=1e-5)
    assert task.train.learner.optimizer.l2_regularizer_weight == expected["l2"]
    for name in expected.keys() - {"learning_rates", "l2", "weights"}:
        assert getattr(task.train, name) == expected[name], name


def test_twenty_steps_equal_those_of_paxml():
    run = recorded()
    partitioner, task = build_parts(resolve(ResNet50Pjit(**SMALL)))
    partitioner.start(jax.devices()[:1])
    partitioner.bind(task)
    state = jax.jit(functools.partial(task.init_state, task.first_key()))()
    given = {
        name: run[f"params/{praxis_name(name)}"] for name in flatten_dict(state.params, sep="/")
    }
    state = state.replace(params=unflatten_dict(given, sep="/"))
    state = jax.device_put(jax.device_get(state), partitioner.state_shardings(task))
    step, losses = partitioner.train_step_fn(task), []
    for images, labels in zip(run["images"], run["labels"], strict=True):
        batch = NestedMap(inputs=images.astype(np.float32), labels=labels.astype(np.int32))
        state, (metrics, _) = step(state, partitioner.put_batch(batch))
        losses.append(float(metrics["loss"].value))
    assert losses[-1] < losses[0] - 0.2  # It learns.
    np.testing.assert_allclose(losses, run["loss"], atol=1e-4)


@pytest.mark.parametrize("boundaries", [[50, 120], [120, 120]])
def test_boundaries_that_do_not_follow_the_warmup_raise(raises, boundaries: list[int]):
    with raises(ConfigError, field="boundaries", value=boundaries):
        warmup_then_tenths(1.0, warmup_steps=100, boundaries=boundaries)


def test_generated_images_repeat_the_pattern_of_their_class():
    config = GeneratedImages.HParams.config(
        name="train", is_training=True, batch_size=64, image_size=16, num_classes=2
    )
    batch = build(config).get_next()
    assert batch.inputs.shape == (64, 16, 16, 3)
    assert 0.9 < batch.inputs.var() < 1.1
    means = [batch.inputs[batch.labels == label].mean(axis=0) for label in (0, 1)]
    assert np.abs(means[0] - means[1]).mean() > 0.5
    heldout = build(config.clone(is_training=False, num_examples=64)).get_next()
    assert np.abs(heldout.inputs[heldout.labels == 0].mean(axis=0) - means[0]).mean() < 0.3


@pytest.mark.parametrize(("field", "value"), [("image_size", 20), ("num_classes", 0)])
def test_generated_images_of_an_invalid_size_raise(raises, field: str, value: int):
    config = GeneratedImages.HParams.config(name="train", is_training=True, batch_size=2)
    with raises(ConfigError, field=field, value=value):
        build(config.clone(**{field: value}))
