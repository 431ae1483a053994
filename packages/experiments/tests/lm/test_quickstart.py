"""The quickstart: of a million parameters, and its inputs fit its model."""

from __future__ import annotations

import math

import jax

from layerkit_experiments.lm.quickstart import LocalText
from layerkit_inputs.byte_vocabulary import VOCAB_SIZE
from layerkit_runner.infeed import make_input
from layerkit_runner.job import build_parts
from layerkit_runner.resolve import resolve


def test_sizes():
    resolved = resolve(LocalText())
    partitioner, task = build_parts(resolved)
    partitioner.start(jax.devices()[:1])
    partitioner.bind(task)
    params = jax.tree.leaves(partitioner.abstract_state(task).params)
    count = sum(math.prod(leaf.shape) for leaf in params)
    lm = resolved.task.model.lm_tpl
    d, ff, heads = lm.model_dims, lm.hidden_dims, lm.num_heads
    kv_heads = lm.num_kv_heads or heads
    attention = d * d * 2 + 2 * d * (d // heads) * kv_heads
    gated = 3 * d * ff
    norms = 2 * d
    assert count == VOCAB_SIZE * d + lm.num_layers * (attention + gated + norms) + d
    assert 0.5e6 < count < 2e6


def test_every_input_is_of_the_same_bytes():
    resolved = resolve(LocalText())
    partitioner, _ = build_parts(resolved)
    partitioner.start(jax.devices()[:1])
    names = []
    for config in (*resolved.datasets, *resolved.decode_datasets):
        with_data = make_input(config, partitioner)
        batch = with_data.get_next()
        assert batch.ids.min() >= 0
        assert batch.ids.max() < resolved.task.model.lm_tpl.vocab_size == VOCAB_SIZE
        names.append(with_data.name)
    assert names == ["train", "heldout", "prompts"]


def test_the_rate_comes_down_over_the_run_that_was_asked_for():
    for steps in (400, 4000):
        learner = resolve(LocalText(MAX_STEPS=steps)).task.train.learner
        schedule = learner.learning_rate.Instantiate()
        rates = [float(schedule(step)) for step in (0, LocalText.WARMUP_STEPS, steps)]
        expected = [0.0, LocalText.LEARNING_RATE, 0.1 * LocalText.LEARNING_RATE]
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(rates, expected, strict=True))
