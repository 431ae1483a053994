"""From TFDS folders to LAMBADA's last words, through SeqIO and through Grain, by the command.

The folders are in the true format of C4, The Pile and LAMBADA, of a few thousand made-up sentences;
the vocabulary is a SentencePiece model of theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerkit_inputs.testing.tfds_folders import sample_texts, write_tfds_folder
from layerkit_inputs.tools.build_token_records import build_token_records
from layerkit_runner import cli
from layerkit_runner.observers import read_metrics

pytestmark = pytest.mark.experiments
pytest.importorskip("seqio")
sentencepiece = pytest.importorskip("sentencepiece")
pytest.importorskip("array_record")

VOCAB_SIZE = 128
NUM_PASSAGES = 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tfds` with the three data sets, `tokens` and `passages` for Grain, and `vocab.model`."""
    folder = tmp_path_factory.mktemp("data")
    train, heldout, passages = (
        sample_texts(count, seed=seed) for seed, count in enumerate((2000, 100, NUM_PASSAGES))
    )
    texts = {"train": train, "validation": heldout}
    write_tfds_folder(folder / "tfds", "c4/en:3.0.1", texts=texts)
    write_tfds_folder(folder / "tfds", "the_pile:1.0.0", texts={**texts, "test": heldout})
    write_tfds_folder(
        folder / "tfds", "lambada:1.0.0", texts={"train": heldout, "test": passages}, num_shards=2
    )
    (folder / "text").mkdir()
    lines = (json.dumps({"text": text}) + "\n" for text in train)
    (folder / "text" / "train.jsonl").write_text("".join(lines))
    (folder / "passages").mkdir()
    lines = (json.dumps({"text": text}) + "\n" for text in passages)
    (folder / "passages" / "lambada_test.jsonl").write_text("".join(lines))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(train),
        model_prefix=str(folder / "vocab"),
        vocab_size=VOCAB_SIZE,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    build_token_records(
        [str(folder / "text")],
        folder / "tokens",
        tokenizer=str(folder / "vocab.model"),
        heldout_fraction=0.05,
    )
    return folder


def run(name: str, folder: Path, *flags: str, **fields: Any) -> Any:
    """Runs a reduced experiment; returns the metrics of its only file of them."""
    words = [f"--fdl.{field}={value}" for field, value in fields.items()]
    command = [f"--exp={name}", "--reduced", f"--job_log_dir={folder}", *flags, *words]
    assert cli.main([*command, "--noenable_summary_writer"]) == 0
    (path,) = folder.glob("metrics*.jsonl")
    return read_metrics(path)


def fields_of(data: Path, data_format: str, grain: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "DATA_FORMAT": data_format,
        "VOCAB_PATH": data / "vocab.model",
        "VOCAB_SIZE": VOCAB_SIZE,
        "MAX_SEQ_LEN": 128,
        "PERCORE_BATCH_SIZE": 2.0,
    }
    return fields | ({"GRAIN_DATA_DIR": data / grain} if data_format == "grain" else {})


@pytest.mark.parametrize("data_format", ["seqio", "grain"])
def test_loss_on_c4_falls(data_format: str, data: Path, tmp_path: Path):
    flags = [f"--tfds_data_dir={data / 'tfds'}"] if data_format == "seqio" else []
    fields = fields_of(data, data_format, "tokens")
    metrics = run("lm.c4.C4Spmd1BAdam4Replicas", tmp_path / "c4", *flags, MAX_STEPS=60, **fields)
    losses = [record["loss"] for record in metrics.train]
    assert losses[-1] < losses[0] - 1
    assert abs(metrics.evals["heldout"][-1]["loss"] - losses[-1]) < 0.5


@pytest.mark.parametrize("data_format", ["seqio", "grain"])
def test_lambada_is_evaluated_in_the_folder_of_the_pile(
    data_format: str, data: Path, tmp_path: Path
):
    flags = [f"--tfds_data_dir={data / 'tfds'}"] if data_format == "seqio" else []
    fields = fields_of(data, data_format, "tokens")
    run("lm.pile.Pile126M", tmp_path / "pile", *flags, MAX_STEPS=150, **fields)
    fields = fields_of(data, data_format, "passages")
    metrics = run(
        "lm.pile.Lambada126M",
        tmp_path / "lambada",
        "--mode=eval_once",
        f"--restore_checkpoint_dir={tmp_path / 'pile'}",
        *flags,
        **fields,
    )
    (record,) = metrics.evals["lambada"]
    accuracy = record["last_word_accuracy"]
    # The last word of each of these sentences follows from the word before it.
    assert accuracy > 0.9
    assert accuracy * NUM_PASSAGES == pytest.approx(round(accuracy * NUM_PASSAGES), abs=1e-3)
    assert record["accuracy"] >= accuracy
    assert record["loss"] < 0.3
