"""TextPairs: packed rows to train on, single pairs to decode, aligned files, and number words."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit_inputs import NumberWords, ParallelText
from layerkit_inputs.base.errors import MissingFileError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.synthetic.number_words import english_words, german_words
from layerkit_inputs.testing import laws
from layerkit_inputs.text.tokenizers import ByteTokenizer


@pytest.fixture
def files(tmp_path):
    sources = ["a b", "", "ccc", "d", "e e e"]
    targets = ["A", "B", "C C", "", "EE"]
    (tmp_path / "train.en").write_text("\n".join(sources) + "\n", encoding="utf-8")
    (tmp_path / "train.de").write_text("\n".join(targets) + "\n", encoding="utf-8")
    return {
        "source_file": str(tmp_path / "train.en"),
        "target_file": str(tmp_path / "train.de"),
        "inputs_length": 10,
        "targets_length": 6,
    }


@pytest.mark.parametrize("mode", [{"is_training": True}, {}], ids=["training", "epoch"])
@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_reader_obeys_the_laws_of_inputs(law, mode):
    fields = {"batch_size": 4, "end": 30, "num_heldout": 7, "split": "heldout", **mode}
    law(lambda **more: NumberWords(**{**fields, **more}))


def test_a_row_to_decode_holds_one_pair(files):
    source = ParallelText(batch_size=3, **files)
    (batch,) = source.eval_batches()
    assert source.ids_to_strings(batch.src.ids, [10] * 3, "src") == ["a b", "ccc", "e e e"]
    assert source.ids_to_strings(batch.tgt.labels, [6] * 3, "tgt") == ["A", "C C", "EE"]
    # Each side ends with EOS; the decoder begins with BOS and then reads the labels.
    assert batch.src.ids[1, 3] == 2 and batch.src.paddings[1].tolist() == [0] * 4 + [1] * 6
    assert batch.tgt.ids[:, 0].tolist() == [1, 1, 1]
    np.testing.assert_array_equal(batch.tgt.ids[:, 1:3], batch.tgt.labels[:, :2])
    assert batch.tgt.weights.sum(axis=1).tolist() == [2, 4, 3]
    assert "segment_pos" not in batch.src


def test_packed_rows_hold_the_same_pairs_on_both_sides(files):
    source = ParallelText(batch_size=1, **files, packing="first_fit")
    batches = list(source.eval_batches())
    assert [int(batch.src.segment_ids.max()) for batch in batches] == [2, 1]
    first = batches[0]
    assert first.src.segment_ids.tolist() == [[1] * 4 + [2] * 4 + [0] * 2]
    assert first.tgt.segment_ids.tolist() == [[1] * 2 + [2] * 4]
    assert first.tgt.ids[0, [0, 2]].tolist() == [1, 1]


@pytest.mark.parametrize("packing", ["first_fit", "none"])
def test_blank_batch_has_the_spec_of_a_read_batch(files, packing):
    fields = {**files, "packing": packing, "is_training": True}
    blank = ParallelText.blank_batch(ParallelText.HParams.config(**fields), 2)
    assert spec_of(blank) == spec_of(ParallelText(batch_size=2, **fields).get_next())


def test_exact_matches_are_counted(files):
    source = ParallelText(batch_size=1, **files)
    assert source.has_prediction_metrics
    assert source.prediction_metrics({0: "A", 1: "C C", 2: "E"}) == {"exact_match": 2 / 3}
    assert source.prediction_metrics({}) == {}
    assert not ParallelText(batch_size=1, **files, is_training=True).has_prediction_metrics


def test_bleu_and_chrf_are_those_of_sacrebleu(tmp_path):
    sacrebleu = pytest.importorskip("sacrebleu")
    targets = ["The cat sat on the mat.", "It is raining today, I think."]
    (tmp_path / "source").write_text("x\ny\n")
    (tmp_path / "target").write_text("".join(f"{line}\n" for line in targets))
    paths = {"source_file": str(tmp_path / "source"), "target_file": str(tmp_path / "target")}
    source = ParallelText(batch_size=1, **paths, metrics=["exact_match", "bleu", "chrf"])
    decoded = ["The cat sat on a mat.", "It is raining today, I guess."]
    scores = source.prediction_metrics(dict(enumerate(decoded)))
    assert scores["exact_match"] == 0
    assert scores["bleu"] == sacrebleu.BLEU().corpus_score(decoded, [targets]).score
    assert scores["chrf"] == sacrebleu.CHRF().corpus_score(decoded, [targets]).score


def test_lines_end_at_newlines_alone_and_a_byte_order_mark_is_dropped(files, tmp_path):
    (tmp_path / "train.en").write_bytes(b"\xef\xbb\xbfa\rb\r\nc")
    (tmp_path / "train.de").write_bytes(b"A\r\nC\n")
    batch = ParallelText(batch_size=2, **files).get_next()
    texts = ByteTokenizer()
    read = [texts.decode(row[row > 2]) for row in batch.src.ids]
    assert read == ["a\rb", "c"]


def test_longer_texts_raise_or_are_trimmed(raises, files):
    files["targets_length"] = 3
    with raises(ConfigError, field="length of a text of pair 1, EOS included", value=4):
        ParallelText(batch_size=1, **files).get_next()
    batch = ParallelText(batch_size=3, **files, trim=True).get_next()
    assert batch.tgt.labels[1].tolist() == [ord("C") + 3, ord(" ") + 3, 2]


def test_missing_files_and_different_numbers_of_lines_raise(raises, files, tmp_path):
    target = tmp_path / "train.de"
    target.write_text("one\n")
    with raises(ConfigError, field="lines of target_file", value=1):
        ParallelText(batch_size=1, **files).get_next()
    target.unlink()
    with raises(MissingFileError, field="target_file", value=str(target)):
        ParallelText(batch_size=1, **files).get_next()
    with raises(ConfigError, field="source_file, target_file"):
        build(ParallelText.HParams.config(batch_size=1))


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (13, "thirteen", "dreizehn"),
        (17, "seventeen", "siebzehn"),
        (30, "thirty", "dreißig"),
        (66, "sixty-six", "sechsundsechzig"),
        (101, "one hundred and one", "einhunderteins"),
        (999, "nine hundred and ninety-nine", "neunhundertneunundneunzig"),
        (1000, "one thousand", "eintausend"),
        (2021, "two thousand and twenty-one", "zweitausendeinundzwanzig"),
        (
            21_716,
            "twenty-one thousand seven hundred and sixteen",
            "einundzwanzigtausendsiebenhundertsechzehn",
        ),
    ],
)
def test_numbers_are_written_in_english_and_german(number, english, german):
    assert (english_words(number), german_words(number)) == (english, german)


def test_each_number_is_in_one_split_and_has_its_own_words():
    fields = {"batch_size": 1, "end": 200, "num_heldout": 20, "target": "digits"}
    splits = [set(NumberWords(split=split, **fields)._texts()) for split in ("train", "heldout")]
    assert [len(split) for split in splits] == [180, 20]
    assert {int(digits) for split in splits for _, digits in split} == set(range(200))
    assert len({german_words(number) for number in range(2000)}) == 2000
