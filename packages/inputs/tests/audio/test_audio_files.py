"""AudioFiles: recordings that are written here, in lists and folders."""

from __future__ import annotations

import json
import wave

import numpy as np
import pytest

from layerkit.errors import ConfigError
from layerkit_inputs import AudioFiles
from layerkit_inputs.audio.audio_files import read_audio
from layerkit_inputs.base.errors import BadRecordError, MissingExtraError, MissingFileError
from layerkit_inputs.testing import laws
from layerkit_inputs.text.text_pairs import edit_distance, text_metrics
from layerkit_inputs.text.tokenizers import ByteTokenizer

RANDOM = np.random.default_rng(0)
RATE = 8000


def write_wave(path, samples, *, rate=RATE, width=2, channels=1):
    scaled = np.round(samples * (2 ** (8 * width - 1) - 1))
    data = scaled + 128 if width == 1 else scaled
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data.astype({1: "u1", 2: "<i2", 4: "<i4"}[width]).tobytes())


@pytest.fixture
def folder(tmp_path):
    lines = []
    for number, length in enumerate((300, 500, 200, 400, 450, 350)):
        write_wave(tmp_path / f"{number}.wav", RANDOM.uniform(-1, 1, length))
        (tmp_path / f"{number}.txt").write_text(f"text {number}\n")
        lines.append(json.dumps({"audio": f"{number}.wav", "text": f"text {number}"}))
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    return tmp_path


def source(folder, **fields):
    sizes = {"sample_rate": RATE, "max_samples": 500, "max_labels": 8, "batch_size": 4}
    return AudioFiles(**{**sizes, "path": str(folder), **fields})


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("is_training", [True, False], ids=["endless", "epoch"])
def test_reader_obeys_the_laws_of_inputs(law, is_training, folder):
    law(lambda **more: source(folder, **{"is_training": is_training, **more}))


@pytest.mark.parametrize("name", ["", "list.jsonl"], ids=["folder", "list"])
def test_rows_hold_samples_and_labels(name, folder):
    reader = source(folder / name)
    batch = reader.get_next()
    assert batch.src.lengths.tolist() == [300, 500, 200, 400]
    assert batch.src.waveform.shape == (4, 500) and not batch.src.waveform[0, 300:].any()
    ids = batch.tgt.labels[1][batch.tgt.paddings[1] == 0]
    assert reader.ids_to_strings(ids[None], [len(ids)]) == ["text 1"]
    assert reader.prediction_metrics({0: "text 0", 1: "text"}) == {"word_error_rate": 0.25}


def test_inputs_of_ranges_of_lengths_share_all_recordings(folder):
    short = source(folder, max_samples=350, skips_longer=True).get_next_padded()
    long = source(folder, min_samples=350).get_next_padded()
    lengths = [*short.src.lengths, *long.src.lengths]
    assert sorted(lengths) == [0, 0, 200, 300, 350, 400, 450, 500]


def test_recordings_of_other_lengths_are_counted(folder):
    (line,) = source(folder, max_samples=350, skips_longer=True).describe_data()
    assert "3 recordings" in line and "; 3 of other lengths" in line
    assert "other lengths" not in source(folder).describe_data()[0]


def test_transcripts_of_librispeech_are_read(folder):
    (folder / "1-2.trans.txt").write_text("".join(f"{n} SPOKEN {n}\n" for n in range(6)))
    for number in range(6):
        (folder / f"{number}.txt").unlink()
    assert source(folder).prediction_metrics({2: "SPOKEN 2"}) == {"word_error_rate": 0.0}


@pytest.mark.parametrize("width", [1, 2, 4])
def test_waves_of_all_widths_are_read(width, tmp_path):
    samples = RANDOM.uniform(-1, 1, 100)
    write_wave(tmp_path / "a.wav", samples, width=width)
    actual, length = read_audio(tmp_path / "a.wav", sample_rate=RATE)
    assert length == 100 and actual.dtype == np.float32
    np.testing.assert_allclose(actual, samples, atol=2.0 ** (2 - 8 * width) + 1e-6)


@pytest.mark.parametrize(
    ("name", "subtype"), [("a.flac", "PCM_16"), ("a.wav", "FLOAT"), ("a.wav", "PCM_24")]
)
def test_other_formats_are_read_by_soundfile(name, subtype, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    samples = RANDOM.uniform(-1, 1, 100)
    soundfile.write(tmp_path / name, samples, RATE, subtype=subtype)
    actual, _ = read_audio(tmp_path / name, sample_rate=RATE)
    np.testing.assert_allclose(actual, samples, atol=1e-4)


def test_flac_without_soundfile_names_the_extra(tmp_path, monkeypatch, raises):
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    with raises(MissingExtraError):
        read_audio(tmp_path / "a.flac", sample_rate=RATE)


def test_damaged_and_foreign_sounds_raise(tmp_path, raises):
    path = tmp_path / "a.wav"
    for fields, message in (({"rate": 16000}, "rate"), ({"channels": 2}, "channels")):
        write_wave(path, np.zeros(100), **fields)
        with pytest.raises(BadRecordError, match=message):
            read_audio(path, sample_rate=RATE)
    write_wave(path, np.zeros(100))
    for data in (b"", path.read_bytes()[:100]):
        path.write_bytes(data)
        with raises(BadRecordError, owner=str(path)):
            read_audio(path, sample_rate=RATE)
    with raises(MissingFileError):
        read_audio(tmp_path / "b.wav", sample_rate=RATE)


def test_wrong_rows_raise(folder, raises):
    with raises(ConfigError, field=f"samples of {folder / '1.wav'}"):
        source(folder, max_samples=499).get_next()
    with raises(ConfigError, field=f"labels of {folder / '0.wav'}"):
        source(folder, max_labels=5).get_next()
    (folder / "list.jsonl").write_text('{"audio": "0.wav"}\n')
    with raises(BadRecordError, owner=f"{folder}/list.jsonl, line 1"):
        source(folder / "list.jsonl").get_next()
    (folder / "3.txt").unlink()
    with raises(BadRecordError, owner=str(folder / "3.wav")):
        source(folder).get_next()
    with raises(MissingFileError, field="path"):
        source(folder / "none").get_next()


def test_token_0_needs_an_input_without_a_blank(folder, raises):
    class Zeros(ByteTokenizer):
        def encode(self, text):
            return np.zeros(2, np.int32)

    with raises(ConfigError, field=f"labels of {folder / '0.wav'}"):
        source(folder, tokenizer=Zeros()).get_next()
    batch = source(folder, tokenizer=Zeros(), has_blank=False).get_next()
    assert batch.tgt.paddings.sum() == 4 * (8 - 2)


def test_word_errors_are_edits_by_words_of_targets():
    cases = {
        ("a b c", "a b c"): 0,
        ("a b c", ""): 3,
        ("", "a b"): 2,
        ("a b c d", "b c e d f"): 3,
        ("kitten".replace("", " "), "sitting".replace("", " ")): 3,
    }
    for (target, words), edits in cases.items():
        assert edit_distance(target.split(), words.split()) == edits
    score = text_metrics(["a b c", "d"], ["a c", "e f"], metrics=["word_error_rate"])
    assert score == {"word_error_rate": 0.75}
