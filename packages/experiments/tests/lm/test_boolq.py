"""The accuracy of answers, by hand, and the rows of BoolQ."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.errors import UserError
from layerkit.models import TransformerLm
from layerkit_experiments.lm.boolq import LLaMA7B
from layerkit_experiments.recipes.published_data.boolq import ChoiceLanguageModel
from layerkit_runner.run.resolve import resolve


def test_choice_accuracy_compares_the_logits_of_two_answers():
    lm = TransformerLm.HParams.config(
        vocab_size=16, model_dims=8, hidden_dims=16, num_layers=1, num_heads=2
    )
    model = build(ChoiceLanguageModel.HParams.config(lm_tpl=lm))
    variables = jax.jit(model.init)(jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (4, 5), 0, 16)
    # The answers of the rows are at columns 4, 2 and 3; the last row is padding.
    columns, wrong = np.array([4, 2, 3, 0]), np.array([3, 7, 9, 0])
    weights = np.zeros((4, 5), np.float32)
    weights[range(3), columns[:3]] = 1.0
    batch = NestedMap(
        ids=ids, labels=(ids + 1) % 16, weights=jnp.asarray(weights), wrong_targets=wrong[:, None]
    )
    metrics, outputs = jax.jit(model.apply)(variables, batch)
    logits_of = jax.jit(functools.partial(model.apply, method=lambda m, ids: m.lm.logits(ids)))
    logits = np.asarray(logits_of(variables, ids))[range(4), columns]
    labels = np.asarray(batch.labels)[range(4), columns]
    margins = (logits[range(4), labels] - logits[range(4), wrong])[:3]
    np.testing.assert_allclose(outputs.margin[:3], margins, rtol=1e-5)
    assert metrics["choice_accuracy"].value == pytest.approx(np.mean(margins > 0))
    assert metrics["choice_accuracy"].weight == 3


def test_stage_with_a_batch_raises(raises):
    stages = [{"until_step": 2, "length": 2048}, {"until_step": 4, "batch": 64}]
    resolve(LLaMA7B(STAGES=stages[:1]))
    with raises(UserError, owner="LLaMA7B: STAGES[1]", field="batch", value=64):
        resolve(LLaMA7B(STAGES=stages))


@pytest.mark.experiments  # whose session has SeqIO
def test_rows_hold_a_question_and_its_answer(tmp_path: Path):
    pytest.importorskip("seqio")
    from layerkit_inputs.testing.tfds_folders import write_tfds_folder

    texts = {"train": ["one", "two"], "validation": ["I see", "you see"]}
    write_tfds_folder(tmp_path, "super_glue/boolq:1.0.2", texts=texts, num_shards=1)
    fields = {"VOCAB_PATH": "bytes", "VOCAB_SIZE": 260, "MAX_SEQ_LEN": 96, "TARGET_LENGTH": 8}
    datasets = resolve(LLaMA7B(TFDS_DATA_DIR=str(tmp_path), **fields)).datasets
    heldout = datasets[1].clone(batch_size=2, percore_batch_size=None).Instantiate()
    (batch,) = heldout.eval_batches()
    rows = set()
    for row in range(2):
        labels, answer = batch.labels[row], batch.weights[row] > 0
        text = bytes(byte - 3 for byte in labels.tolist() if byte >= 3).decode()
        rows.add((text, bytes(byte - 3 for byte in labels[answer].tolist()).decode()))
        assert batch.ids[row, 0] == 1
        np.testing.assert_array_equal(batch.ids[row, 1:], labels[:-1])
        first = {"yes": "n", "no": "y"}[text.rpartition("answer:")[2]]
        assert batch.wrong_targets[row].tolist() == [ord(first) + 3]
    question = "\nquestion: is there a bird?\nanswer:"
    assert rows == {
        (f"I see and a fish{question}no", "no"),
        (f"you see and a bird{question}yes", "yes"),
    }
