"""Passages and their last words, read from JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_experiments.recipes.published_data.last_words import last_word_rows, split_last_word

PASSAGES = ["A cat sat\n on the  mat", "“Who?” he asked the ‘night’"]
FIELDS: dict[str, Any] = {"vocab_path": "bytes", "seq_length": 32, "target_length": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PASSAGES)
    (tmp_path / "lambada_test.jsonl").write_text(lines)
    return tmp_path


def test_split_keeps_the_blank_and_straightens_quotes(raises):
    assert split_last_word(PASSAGES[0]) == ("A cat sat\n on the", " mat")
    assert split_last_word(PASSAGES[1]) == ('"Who?" he asked the', " 'night'")
    assert split_last_word("  one two \n") == ("one", " two")
    with raises(ConfigError, field="passage", value="word"):
        split_last_word("word")


def test_only_the_last_word_counts(folder: Path):
    pytest.importorskip("grain")
    rows = last_word_rows(path=str(folder), **FIELDS)
    assert len(rows) == 2
    for row, passage in zip(rows, PASSAGES, strict=True):
        before, word = split_last_word(passage)
        tokens = [byte + 3 for byte in (before + word).encode()]
        is_valid = np.arange(32) < len(tokens)
        assert row["labels"][is_valid].tolist() == tokens
        assert row["ids"][: len(tokens)].tolist() == [1, *tokens[:-1]]
        counts = is_valid & (np.arange(32) >= len(before.encode()))
        assert (row["weights"] > 0).tolist() == counts.tolist()
        assert row["weights"].sum() == len(word)


def test_invalid_vocabulary_and_record_raise(raises, folder: Path):
    pytest.importorskip("grain")
    with raises(ConfigError, field="VOCAB_PATH", value=None):
        last_word_rows(path=str(folder), **{**FIELDS, "vocab_path": None})
    with raises(ConfigError, field="VOCAB_SIZE", value=258):
        last_word_rows(path=str(folder), **FIELDS, vocab_size=258)
    (folder / "more.jsonl").write_text('{"txt": "a b"}\n')
    with raises(ConfigError, owner=f"{folder}/more.jsonl, line 1"):
        last_word_rows(path=str(folder), **FIELDS)
