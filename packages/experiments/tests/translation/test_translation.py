"""Translation: the Transformer of 2017 at its published sizes, and pairs that fit it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerkit_experiments.translation import wmt
from layerkit_experiments.translation.numbers import EnglishToGermanNumbers
from layerkit_runner.errors import UsageError
from layerkit_runner.run.resolve import resolve

# model, hidden, heads, dropout, steps, weights in millions (table 3 of the paper)
PUBLISHED = {
    "TransformerBase": (512, 2048, 8, 0.1, 100_000, 65),
    "TransformerBig": (1024, 4096, 16, 0.3, 300_000, 213),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_and_schedule_are_those_of_the_paper(name: str, num_params: Any):
    dims, hidden, heads, dropout, steps, millions = PUBLISHED[name]
    experiment = resolve(getattr(wmt, name)())
    network = experiment.task.model.model_tpl
    assert (network.num_encoder_layers, network.num_decoder_layers) == (6, 6)
    assert (network.model_dims, network.hidden_dims, network.num_heads) == (dims, hidden, heads)
    assert network.dropout_rate == network.encoder_stack_tpl.layer_tpl.dropout_rate == dropout
    assert network.softmax_tpl.label_smoothing == 0.1 and network.softmax_tpl.scale_by_sqrt_dims
    assert network.decoder_stack_tpl.layer_tpl.cross_attention_tpl is not None
    assert network.decoder_stack_tpl.layer_tpl.norm_policy == "post"
    assert network.encoder_norm_tpl is network.decoder_norm_tpl is None
    decoder = experiment.task.model.decoder
    assert (decoder.beam_size, decoder.length_norm_alpha, decoder.eos_id) == (4, 0.6, 2)
    train = experiment.task.train
    assert train.num_train_steps == steps
    adam = train.learner.optimizer
    assert (adam.b1, adam.b2, adam.eps) == (0.9, 0.98, 1e-9)
    schedule = train.learner.learning_rate.Instantiate()
    assert float(schedule(3999)) == pytest.approx((dims * 4000) ** -0.5)
    assert float(schedule(15_999)) == pytest.approx((dims * 16_000) ** -0.5)
    assert num_params(f"translation.wmt.{name}") / 1e6 == pytest.approx(millions, rel=0.04)


def test_a_batch_has_25_thousand_tokens_of_each_side():
    data = resolve(wmt.TransformerBase()).datasets[0]
    assert data.percore_batch_size * 8 * data.inputs_length == 24_576
    assert (data.source_file, data.target_file) == ("wmt14/train.en", "wmt14/train.de")


def test_numbers_fit_their_rows_and_what_may_be_decoded():
    experiment = EnglishToGermanNumbers()
    data = resolve(experiment).datasets[1].clone(batch_size=500, trim=False)
    batch = data.Instantiate().get_next()
    longest = int(np.max(np.sum(batch.tgt.weights, axis=1)))
    assert longest <= experiment.MAX_DECODE_STEPS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("TOKENIZER", "ende.model"),
        ("EOS_ID", 1),
        ("START_ID", 0),
        ("VOCAB_SIZE", 258),
    ],
)
def test_invalid_field_raises(raises: Any, field: str, value: Any):
    with raises(UsageError, field=field, value=value):
        resolve(EnglishToGermanNumbers(**{field: value}))
