"""The SeqIO tasks, on folders in the format of the real data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("seqio")

from layerkit.config import target_of
from layerkit.errors import ConfigError
from layerkit_experiments.lm.c4 import (
    C4Spmd1BAdam4Replicas,
    C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas,
)
from layerkit_experiments.lm.pile import Lambada126M, Pile126M
from layerkit_experiments.recipes.published_data.last_words import last_word_rows, split_last_word
from layerkit_inputs.testing.tfds_folders import write_tfds_folder
from layerkit_runner.run.resolve import resolve

pytestmark = pytest.mark.experiments  # whose session has SeqIO

LONG = "All work and no play makes Jack a dull boy. " * 3
TEXTS = {"train": ["short", LONG, "x", "another one"] * 3, "validation": ["held", "out"]}
PASSAGES = ["A cat sat on the mat", "“Who?” he asked the ‘night’", "one two"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tfds")
    write_tfds_folder(folder, "c4/en:3.0.1", texts=TEXTS, num_shards=2)
    write_tfds_folder(folder, "c4/en:3.0.4", texts={"train2": TEXTS["train"]}, num_shards=1)
    heldout = {"validation_tokenized_5662seqs": TEXTS["validation"]}
    write_tfds_folder(folder, "c4/en:3.0.5", texts=heldout, num_shards=1)
    write_tfds_folder(folder, "the_pile:1.0.0", texts={**TEXTS, "test": ["a", "b"]}, num_shards=2)
    write_tfds_folder(
        folder, "lambada:1.0.0", texts={"train": ["a b"], "test": PASSAGES}, num_shards=1
    )
    return folder


def read(cls: type, folder: Path, **fields: Any) -> list[Any]:
    """The inputs of an experiment, built."""
    return [config.Instantiate() for config in configs_of(cls, folder, **fields)]


def configs_of(cls: type, folder: Path, **fields: Any) -> list[Any]:
    """The configs of the inputs of an experiment, with rows that a few sentences fill."""
    fields = {"VOCAB_PATH": "bytes", "VOCAB_SIZE": 260, "MAX_SEQ_LEN": 32, **fields}
    if cls is Lambada126M:
        fields["TARGET_LENGTH"] = 8
    datasets = resolve(cls(TFDS_DATA_DIR=str(folder), **fields)).datasets
    return [data.clone(batch_size=4, percore_batch_size=None) for data in datasets]


def documents_of(batch: Any) -> list[list[int]]:
    """The tokens of each segment."""
    result = []
    for labels, segments in zip(batch.labels, batch.segment_ids, strict=True):
        numbers = sorted(set(segments[segments > 0].tolist()))
        result += [labels[segments == number].tolist() for number in numbers]
    return result


def pieces_of(text: str) -> list[list[int]]:
    tokens = [*(byte + 3 for byte in text.encode()), 1]
    return [tokens[start : start + 32] for start in range(0, len(tokens), 32)]


@pytest.mark.parametrize("cls", [C4Spmd1BAdam4Replicas, Pile126M])
def test_every_token_of_a_document_is_trained_on(cls: type, folder: Path):
    train, heldout = read(cls, folder)
    expected = {tuple(piece) for text in TEXTS["train"] for piece in pieces_of(text)}
    result: set[tuple[int, ...]] = set()
    for _ in range(20):  # some epochs: where one ends, rows hold documents of two
        batch = train.get_next()
        assert batch.ids.shape == (4, 32)
        result |= {tuple(document) for document in documents_of(batch)}
    assert result == expected
    assert documents_of(heldout.get_next())[0] == pieces_of("held")[0]


def test_documents_of_mlperf_are_joined_and_their_first_token_is_given(folder: Path):
    train, heldout = read(C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas, folder)
    joined = "".join(TEXTS["train"])  # 12 documents are one group, without EOS
    batch = train.get_next()
    assert batch.ids.shape == (4, 32)
    known = [byte + 3 for byte in joined.encode()]
    # TFDS and the shuffle order documents anew, so the texts are compared as letters.
    rows = [train.get_next() for _ in range(len(known) // 128)]
    assert set(np.concatenate([row.ids.ravel() for row in rows]).tolist()) <= {0, *known}
    assert 1 not in batch.ids and 1 not in batch.labels
    np.testing.assert_array_equal(batch.ids[:, 1:], batch.labels[:, :-1])
    np.testing.assert_array_equal(batch.weights[:, -1], 0)
    (batch,) = heldout.eval_batches()
    ids = [[byte + 3 for byte in text.encode()] for text in TEXTS["validation"]]
    result = sorted(row[row > 0].tolist() for row in batch.ids[:2])
    assert result == sorted(ids)
    # Every token but the first of each document has a loss.
    assert batch.weights.sum() == sum(len(document) - 1 for document in ids)


def test_blank_batch_has_the_shapes_of_a_read_batch(folder: Path):
    config, _ = configs_of(Pile126M, folder)
    batch = config.Instantiate().get_next()
    blank = target_of(config).blank_batch(config, 4)
    assert {name: (a.shape, a.dtype) for name, a in batch.items()} == {
        name: (a.shape, a.dtype) for name, a in blank.items()
    }


def test_last_words_are_the_same_through_seqio_and_grain(folder: Path, tmp_path: Path):
    (lambada,) = read(Lambada126M, folder)
    (batch,) = lambada.eval_batches()
    assert batch.eval_sample_weights.tolist() == [1, 1, 1, 0]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PASSAGES)
    (tmp_path / "passages.jsonl").write_text(lines)
    rows = last_word_rows(
        path=str(tmp_path), vocab_path="bytes", seq_length=32, target_length=8, vocab_size=260
    )
    # TFDS writes them in an order of its own.
    places = {tuple(labels.tolist()): place for place, labels in enumerate(batch.labels)}
    for passage, row in zip(PASSAGES, rows, strict=True):
        before, word = split_last_word(passage)
        number = places[tuple(row["labels"].tolist())]
        assert batch.weights[number].sum() == len(word)
        for name in ("labels", "weights", "paddings", "segment_ids", "segment_pos"):
            np.testing.assert_array_equal(batch[name][number], row[name], err_msg=name)
        # Bytes have an id for a beginning here and none in SeqIO; the rest is equal.
        size = len((before + word).encode())
        np.testing.assert_array_equal(batch.ids[number, 1:size], row["ids"][1:size])


@pytest.mark.parametrize(
    ("field", "value"), [("VOCAB_PATH", None), ("VOCAB_PATH", "nowhere.model"), ("VOCAB_SIZE", 100)]
)
def test_invalid_vocabulary_raises(field: str, value: Any, folder: Path):
    with pytest.raises(ConfigError) as caught:
        read(Pile126M, folder, **{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)
