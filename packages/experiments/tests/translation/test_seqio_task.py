"""Translations through SeqIO, on a folder in the format of WMT's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("seqio")

from layerkit_experiments.translation.wmt import TransformerBase
from layerkit_runner.run.resolve import resolve

PAIRS = {
    "train": [("one", "eins"), ("twenty-one", "einundzwanzig"), ("three", "drei")] * 3,
    "validation": [("two", "zwei"), ("a hundred and eleven", "einhundertelf")],
}
FIELDS: dict[str, Any] = {
    "DATA_FORMAT": "seqio",
    "TOKENIZER": "bytes",
    "START_ID": 0,
    "EOS_ID": 1,
    "MAX_SEQ_LEN": 24,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tensorflow_datasets as tfds

    folder = tmp_path_factory.mktemp("tfds")
    tfds.dataset_builders.store_as_tfds_dataset(
        name="wmt14_translate",
        config="de-en",
        version="1.0.0",
        data_dir=os.fspath(folder),
        features=tfds.features.Translation(languages=("de", "en")),
        split_datasets={
            split: [(number, {"en": en, "de": de}) for number, (en, de) in enumerate(pairs)]
            for split, pairs in PAIRS.items()
        },
    )
    return folder


def test_training_rows_hold_several_pairs_and_decoded_rows_one(folder: Path):
    experiment = resolve(TransformerBase(**FIELDS, TFDS_DATA_DIR=str(folder)))
    train, heldout, translations = (
        config.clone(batch_size=2, percore_batch_size=None).Instantiate()
        for config in (*experiment.datasets, *experiment.decode_datasets)
    )
    batch = train.get_next()
    assert batch.src.segment_ids.max() == batch.tgt.segment_ids.max() > 1
    for dataset in (heldout, translations):
        (batch,) = dataset.eval_batches()
        assert "segment_pos" not in batch.src
        texts = dataset.ids_to_strings(batch.src.ids, [24, 24], key="src")
        assert texts == [english for english, _ in PAIRS["validation"]]
        assert batch.tgt.ids[:, 0].tolist() == [0, 0]
        assert (batch.tgt.labels == 1).sum(axis=1).tolist() == [1, 1]
    metrics = translations.prediction_metrics({0: "zwei", 1: "elf"})
    assert metrics == {"exact_match": 0.5}


def test_bleu_and_chrf_are_those_of_sacrebleu(folder: Path):
    sacrebleu = pytest.importorskip("sacrebleu")
    fields = {**FIELDS, "TFDS_DATA_DIR": str(folder)}
    (config,) = resolve(TransformerBase(**fields)).decode_datasets
    config.mixture_or_task.metrics = ["exact_match", "bleu", "chrf"]
    translations = config.set(batch_size=2, percore_batch_size=None).Instantiate()
    decoded, targets = ["zwei", "einhundertzehn"], [german for _, german in PAIRS["validation"]]
    assert translations.prediction_metrics(dict(enumerate(decoded))) == {
        "exact_match": 0.5,
        "bleu": sacrebleu.BLEU().corpus_score(decoded, [targets]).score,
        "chrf": sacrebleu.CHRF().corpus_score(decoded, [targets]).score,
    }
