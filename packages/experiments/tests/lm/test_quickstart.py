"""The quickstart: of a million parameters, and its inputs fit its model."""

from __future__ import annotations

import math
import re

import jax
import pytest

from layerkit_experiments.lm.quickstart import LocalText
from layerkit_inputs.text.tokenizers import VOCAB_SIZE
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.config.requests import parse_override
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.errors import UsageError
from layerkit_runner.run.job import build_parts
from layerkit_runner.run.resolve import resolve, resolve_entry


def test_number_of_weights_equals_a_count_by_hand():
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


def test_stages_of_a_reduced_form_set_its_steps():
    flag = parse_override("STAGES", "[{'until_step': 9}]")
    entry = find_experiment("lm.quickstart.LocalText")
    assert resolve_entry(entry, [flag], reduced=True).experiment.MAX_STEPS == 9


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


@pytest.mark.parametrize(("field", "value"), [("VOCAB_SIZE", 258), ("EOS_ID", 3)])
def test_model_that_does_not_fit_the_tokenizer_raises(raises, field, value):
    with raises(UsageError, field=field, value=value):
        resolve(LocalText(**{field: value}))


def test_missing_tokenizer_file_raises():
    with pytest.raises(UsageError, match=re.escape("none.model")):
        resolve(LocalText(TOKENIZER="none.model"))


def test_lines_of_json_are_read_with_a_tokenizer_of_ones_own(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<end>": 0, "one": 1, "two": 2, "three": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    for name in ("a", "b", "val"):
        (tmp_path / f"{name}.jsonl").write_text('{"body": "one two three"}\n' * 3)
    resolved = resolve(
        LocalText(
            TOKENIZER=str(tmp_path),
            VOCAB_SIZE=4,
            EOS_ID=0,
            TEXT_FILES=[str(tmp_path / "*.jsonl")],
            TEXT_FIELD="body",
            MAX_SEQ_LEN=8,
            PROMPT_LENGTH=2,
        )
    )
    partitioner, _ = build_parts(resolved)
    partitioner.start(jax.devices()[:1])
    train, heldout, prompts = (
        make_input(config, partitioner)
        for config in (*resolved.datasets, *resolved.decode_datasets)
    )
    for dataset in (train, heldout):
        batch = dataset.get_next()
        assert set(batch.labels[batch.paddings == 0].tolist()) == {0, 2, 3}
        assert dataset.token_unit == "token"
    assert prompts.get_next().ids[0].tolist() == [1, 2]
