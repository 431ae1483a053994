"""BERT has the published sizes, but for what belongs to the prediction of next sentences."""

from __future__ import annotations

from typing import Any

import pytest

from layerkit_experiments.lm import bert
from layerkit_runner.errors import FieldError
from layerkit_runner.run.resolve import resolve

# layers, model, hidden, heads, rows per device, devices, weights of the published encoder
PUBLISHED = {
    "BertBase": (12, 768, 3072, 12, 16, 16, 109_482_240),
    "BertLarge": (24, 1024, 4096, 16, 4, 64, 335_141_888),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_schedule_are_those_of_the_paper(name: str, num_params: Any):
    layers, model, hidden, heads, rows, devices, weights = PUBLISHED[name]
    experiment = resolve(getattr(bert, name)())
    lm = experiment.task.model.lm_tpl
    assert (lm.num_layers, lm.model_dims, lm.hidden_dims) == (layers, model, hidden)
    assert (lm.num_heads, lm.dim_per_head, lm.vocab_size) == (heads, 64, 30_522)
    data = experiment.datasets[0]
    assert data.percore_batch_size * devices == rows * devices == 256
    assert data.task_feature_lengths == {"targets": 512}
    train = experiment.task.train
    schedule = train.learner.learning_rate.Instantiate()
    for step, value in {0: 0.0, 5000: 5e-5, 10_000: 1e-4, 505_000: 5e-5, 1_000_000: 0.0}.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-4, abs=1e-12)
    adam = train.learner.optimizer
    assert (adam.b1, adam.b2, adam.eps, adam.weight_decay) == (0.9, 0.999, 1e-6, 0.01)
    # What is published counts embeddings of sentences and a pooler, and no bias of the words.
    next_sentence = 2 * model + model * model + model
    assert num_params(f"lm.bert.{name}") == weights - next_sentence + 30_522


def test_decays_end_at_zero_or_a_given_ratio_that_the_linear_one_refuses(raises):
    with raises(FieldError, field="MIN_LEARNING_RATE_RATIO", value=0.2):
        bert.BertBase(MIN_LEARNING_RATE_RATIO=0.2).learner()
    for ratio, fields in {0.0: {}, 0.2: {"MIN_LEARNING_RATE_RATIO": 0.2}}.items():
        made = bert.BertBase(LEARNING_RATE_SCHEDULE="cosine", **fields)
        assert made.learner().learning_rate.min_ratio == ratio
