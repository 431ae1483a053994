"""Pairs and judgements of files as rows: tokens, weights, drops, stored references, and laws."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.config import build
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs.base.errors import MissingFileError
from layerkit_inputs.chat.chat_input import ChatPrompts
from layerkit_inputs.chat.conversations import read_judgement, read_pair
from layerkit_inputs.chat.preference_input import (
    JudgementInput,
    PairInput,
    reference_log_probs,
)
from layerkit_inputs.chat.template import load_chat_template
from layerkit_inputs.chat.token_masks import encode_conversation
from layerkit_inputs.mixing.stored_rows import StoredRows, add_stored_arrays
from layerkit_inputs.testing import laws
from layerkit_inputs.text.tokenizers import ByteTokenizer

PAIRS = [
    {"prompt": f"{n} + {n}?", "chosen": f"{2 * n}.", "rejected": "No" * (n % 3 + 1)}
    for n in range(20)
]
JUDGEMENTS = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]
LENGTH = 64


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    def of(kind: Any, rows: list[Any] | None = None, **options: Any) -> Any:
        path = tmp_path / f"{kind.__name__}.jsonl"
        rows = rows or (JUDGEMENTS if kind is JudgementInput else PAIRS)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {"batch_size": 4, "paths": [str(path)], "split": "all", "chat_template": "zephyr"}
        fields |= {} if kind is ChatPrompts else {"seq_length": LENGTH}
        return kind(**{**fields, **options})

    return of


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("kind", [PairInput, JudgementInput], ids=["pairs", "judgements"])
@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
def test_inputs_of_preferences_fulfill_the_laws(law, kind, is_training, make):
    law(lambda **options: make(kind, is_training=is_training, **options))


def check_row(rows: Any, number: int, conversation: Any) -> None:
    """Compare a row with the tokens of a conversation, all of which are in `ids`."""
    tokenizer = ByteTokenizer()
    template = load_chat_template("zephyr", tokenizer)
    ids, has_loss = encode_conversation(conversation, template, tokenizer)[:2]
    size = len(ids) - 1
    np.testing.assert_array_equal(rows.ids[number, : size + 1], ids)
    np.testing.assert_array_equal(rows.labels[number, :size], ids[1:])
    np.testing.assert_array_equal(rows.weights[number, :size], has_loss[1:])
    assert rows.segment_ids[number].sum() == size and not rows.weights[number, size:].any()


def test_rows_hold_the_tokens_of_both_answers_with_weights_on_the_answer(make):
    batch = make(PairInput).get_next()
    for number, row in enumerate(PAIRS[:4]):
        pair = read_pair(row)
        check_row(batch.chosen, number, pair.chosen)
        check_row(batch.rejected, number, pair.rejected)
    judged = make(JudgementInput).get_next()
    assert judged.is_desirable.tolist() == [True, False, True, False]
    for number, row in enumerate(JUDGEMENTS[:4]):
        check_row(judged.answer, number, read_judgement(row).conversation)


def test_prompts_of_pairs_end_before_the_answers(make):
    batch = make(ChatPrompts, prompt_length=LENGTH).get_next()
    text = ByteTokenizer().decode(batch.ids[1, : batch.prompt_lengths[1]])
    assert text == "<|user|>\n1 + 1?\n<|assistant|>\n"


@pytest.mark.parametrize("kind", [PairInput, JudgementInput], ids=["pairs", "judgements"])
def test_rows_that_are_too_long_are_dropped_with_a_count(kind, make):
    long = {"prompt": "?", "completion": "x" * LENGTH, "label": 1}
    if kind is PairInput:
        long = {"prompt": "?", "chosen": "x", "rejected": "x" * LENGTH}
    rows = JUDGEMENTS if kind is JudgementInput else PAIRS
    source = make(kind, [long, *rows, long])
    assert source._num_rows() == len(rows)
    noun = "pairs" if kind is PairInput else "judgements"
    (line, *_) = source.describe_data()
    assert f"{len(rows)} {noun} of" in line and f"{noun} dropped as too long: 2" in line
    side = "chosen" if kind is PairInput else "answer"
    first, expected = source.get_next()[side], make(kind).get_next()[side]
    np.testing.assert_array_equal(first.ids, expected.ids)


def test_pairs_with_equal_answers_are_dropped_with_a_count(make):
    source = make(PairInput, [*PAIRS, {"prompt": "?", "chosen": "x", "rejected": "x"}])
    assert source._num_rows() == len(PAIRS)
    assert "pairs dropped with equal answers: 1" in source.describe_data()[0]


@dataclasses.dataclass
class Score:
    token_log_probs: np.ndarray


def score_ids(rows: list[np.ndarray]) -> list[Score]:
    """Scores that depend on the tokens alone."""
    return [Score(-np.asarray(ids[1:], np.float32) / 100) for ids in rows]


def test_stored_reference_is_read_with_its_pairs_and_missing_for_others(make, raises, tmp_path):
    def stored(rows: list[Any] | None = None, *, is_training: bool = False) -> StoredRows:
        source = make(PairInput.HParams.config, rows, name="train", is_training=is_training)
        return build(add_stored_arrays(source, folder=str(tmp_path), about={"reference": "a"}))

    with raises(MissingFileError, field="file"):
        stored().get_next()
    stored().write(reference_log_probs(score_ids))
    source = stored(is_training=True)
    for _ in range(7):
        batch = source.get_next()
        for side in ("chosen", "rejected"):
            expected = -(batch[side].labels * batch[side].weights).sum(-1) / 100
            log_probs = batch[f"{side}_reference_log_probs"]
            np.testing.assert_allclose(log_probs, expected, rtol=1e-5)
    with raises(MissingFileError, field="file"):
        stored([*PAIRS[1:], PAIRS[0]]).get_next()


def test_stored_reference_rejects_images_that_scores_leave_out(raises):
    batch = NestedMap(chosen=NestedMap(images=np.zeros(1)))
    with raises(ConfigError, field="chosen"):
        reference_log_probs(lambda ids: ids)(batch)
