"""AudioFiles, an input of recordings with transcripts, and the base class of inputs of speech.

WAV files of integers are read with the standard library. Others, such as FLAC, need soundfile.
"""

from __future__ import annotations

import functools
import json
import wave
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.base.errors import (
    BadRecordError,
    MissingFileError,
    as_bad_record,
    require_extra,
)
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.base.tokenizer_interface import Tokenizer
from layerkit_inputs.text.text_pairs import PairMetric, text_metrics
from layerkit_inputs.text.tokenizers import ByteTokenizer

_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")


class SpeechInput(IndexedInput):
    """Base class of inputs of sounds and their transcripts.

    Batches hold `src` with `waveform` float32 `[batch, max_samples]`, in [-1, 1], and `lengths`
    int32 `[batch]`, and `tgt` with `labels` int32 and `paddings` float32 `[batch, max_labels]`.
    Labels are token ids without special ids. Evaluation batches also have `provenance` and
    `eval_sample_weights`, each `[batch]`.
    """

    sample_rate: int = 16_000
    """Samples per second."""
    max_samples: int = 16_000 * 16
    """Samples of a row, to which shorter sounds are padded with 0."""
    max_labels: int = 256
    """Labels of a row."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of transcripts. None: bytes."""
    has_blank: bool = True
    """Whether id 0 is reserved for a blank, as CTC and transducers need it."""
    metrics: Sequence[PairMetric] = ("word_error_rate",)
    """Metrics of decoded transcripts."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        self._check_at_least(1, "sample_rate", "max_samples", "max_labels")
        self._tokenizer = ByteTokenizer() if self.tokenizer is None else self.tokenizer

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of rows of silence without labels."""
        return _speech_batch([np.zeros(0, np.float32)] * rows, [()] * rows, config)

    def _utterances(self, rows: np.ndarray) -> list[tuple[np.ndarray, str]]:
        """Return the samples float32 `[samples]` and the transcript of each row."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _utterances().")

    def _row_name(self, row: int) -> str:
        """Return the name of a row for error messages."""
        return f"row {row}"

    def _transcript(self, row: int) -> str:
        """Return the transcript of a row."""
        return self._utterances(np.array([row]))[0][1]

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        sounds, texts = zip(*self._utterances(rows), strict=True)
        labels = [self._tokenizer.encode(text) for text in texts]
        for row, ids in zip(rows.tolist(), labels, strict=True):
            field, expected = (
                f"labels of {self._row_name(row)}",
                f"at most max_labels={self.max_labels}",
            )
            require(len(ids) <= self.max_labels, self._label, field, len(ids), expected)
            expected = "ids from 1, since 0 is the blank, or has_blank=False"
            is_valid = np.all(ids) or not self.has_blank
            require(is_valid, self._label, field, ids.tolist(), expected)
        return _speech_batch(sounds, labels, self)

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether `prediction_metrics` reads decoded text: True."""
        return True

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Return the `metrics` of decoded transcripts; an empty dict without predictions."""
        if not predictions:
            return {}
        rows = sorted(predictions)
        targets = [self._transcript(row) for row in rows]
        return text_metrics(targets, [predictions[row] for row in rows], metrics=self.metrics)


class _Recording(NamedTuple):
    """A file, its transcript, and its number of samples."""

    path: Path
    text: str
    num_samples: int


class AudioFiles(SpeechInput):
    """An input of recordings of one channel that a list or a folder names.

    Each line of a list is a JSON object with `audio`, a path relative to the list, and `text`. A
    folder holds sounds and transcripts of the same names, `a/1.flac` and `a/1.txt`, or, as
    LibriSpeech, files `*.trans.txt` with lines of a name and a transcript.

    Inputs with consecutive ranges of `min_samples` and `max_samples` and with batch sizes of their
    own are buckets by length. A run with several training inputs takes turns between them.
    """

    path: str
    """A `.jsonl` list, or a folder."""
    min_samples: int = 0
    """Number of samples that recordings exceed. Recordings of other lengths are left out."""
    skips_longer: bool = False
    """Whether recordings of more than `max_samples` are left out. False: they raise an error."""

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        expected = f"0 to max_samples={self.max_samples}, exclusive"
        is_valid = 0 <= self.min_samples < self.max_samples
        require(is_valid, self._label, "min_samples", self.min_samples, expected)

    @functools.cached_property
    def _all_recordings(self) -> list[_Recording]:
        listed = _listed(self) if Path(self.path).is_file() else _in_folder(self)
        recordings = []
        for path, text in listed:
            _, num_samples = read_audio(path, sample_rate=self.sample_rate, only_length=True)
            longest = self.max_samples
            expected = f"at most max_samples={longest}; skips_longer=True leaves it out"
            is_valid = num_samples <= longest or self.skips_longer
            require(is_valid, self._label, f"samples of {path}", num_samples, expected)
            recordings.append(_Recording(path, text, num_samples))
        return recordings

    @functools.cached_property
    def _recordings(self) -> list[_Recording]:
        shortest, longest = self.min_samples, self.max_samples
        return [one for one in self._all_recordings if shortest < one.num_samples <= longest]

    def _num_rows(self) -> int:
        return len(self._recordings)

    def _utterances(self, rows: np.ndarray) -> list[tuple[np.ndarray, str]]:
        chosen = [self._recordings[row] for row in rows.tolist()]
        rate = self.sample_rate
        return [(read_audio(one.path, sample_rate=rate)[0], one.text) for one in chosen]

    def _row_name(self, row: int) -> str:
        return str(self._recordings[row].path)

    def _transcript(self, row: int) -> str:
        return self._recordings[row].text

    def _fingerprint(self) -> dict[str, Any]:
        checksum = 0
        for one in self._recordings:
            checksum = zlib.crc32(
                f"{one.path.name} {one.num_samples} {one.text}".encode(), checksum
            )
        return {"recordings_crc32": checksum, "tokenizer": self._tokenizer.fingerprint()}

    def _data_text(self) -> str:
        hours = sum(one.num_samples for one in self._recordings) / self.sample_rate / 3600
        text = f"{counted(len(self._recordings), 'recording')}, {hours:.2f} hours"
        left_out = len(self._all_recordings) - len(self._recordings)
        return f"{text}; {left_out} of other lengths left out" if left_out else text

    def _first_texts(self) -> list[bytes]:
        return [one.text.encode() for one in self._recordings[:100]]


def read_audio(
    path: Path, *, sample_rate: int, only_length: bool = False
) -> tuple[np.ndarray, int]:
    """Read a file of one channel.

    Args:
      path: WAV of 8, 16 or 32 bits, or another format that soundfile reads.
      sample_rate: Samples per second that the file must have.
      only_length: True to read the header alone.

    Returns:
      (samples float32 `[samples]` in [-1, 1], empty with `only_length`; number of samples).

    Raises:
      BadRecordError: The file is damaged, or has another rate or several channels.
      MissingExtraError: The format needs soundfile.
    """
    if not path.is_file():
        raise MissingFileError("file not found", field="audio", value=str(path))
    read = _read_wave if path.suffix.lower() == ".wav" else _read_with_soundfile
    with as_bad_record(str(path), "not a readable sound", EOFError, wave.Error, RuntimeError):
        samples, length, rate, channels = read(path, only_length=only_length)
    for name, value, expected in (("sample rate", rate, sample_rate), ("channels", channels, 1)):
        if value != expected:
            problem = f"{name} {value}, expected {expected}; convert it with sox or ffmpeg"
            raise BadRecordError(problem, owner=str(path))
    return samples, length


def _read_wave(path: Path, *, only_length: bool) -> tuple[np.ndarray, int, int, int]:
    try:
        with wave.open(str(path), "rb") as file:
            length, rate = file.getnframes(), file.getframerate()
            width, channels = file.getsampwidth(), file.getnchannels()
            data = b"" if only_length else file.readframes(length)
    except wave.Error as error:
        # The standard library reads integers alone.
        if "unknown format" not in str(error):
            raise
        width = 0
    if width in {0, 3}:
        return _read_with_soundfile(path, only_length=only_length)
    if not only_length and len(data) != length * width * channels:
        raise wave.Error(f"{len(data)} bytes of samples, expected {length * width * channels}")
    samples = np.frombuffer(data, {1: "u1", 2: "<i2", 4: "<i4"}[width]).astype(np.float32)
    samples = samples - 128.0 if width == 1 else samples
    return samples / np.float32(2 ** (8 * width - 1)), length, rate, channels


def _read_with_soundfile(path: Path, *, only_length: bool) -> tuple[np.ndarray, int, int, int]:
    soundfile = require_extra("soundfile", needed_by=f"{path.suffix} audio")
    with soundfile.SoundFile(path) as file:
        samples = np.zeros(0, np.float32) if only_length else file.read(dtype="float32")
        return samples, file.frames, file.samplerate, file.channels


def _listed(source: AudioFiles) -> list[tuple[Path, str]]:
    entries = []
    for number, line in enumerate(Path(source.path).read_text("utf-8").splitlines(), 1):
        try:
            record = json.loads(line) if line.strip() else None
            if record is not None:
                entries.append((Path(source.path).parent / record["audio"], str(record["text"])))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"expected a JSON object with audio and text ({error!r})"
            raise BadRecordError(problem, owner=f"{source.path}, line {number}") from None
    return entries


def _in_folder(source: AudioFiles) -> list[tuple[Path, str]]:
    folder = Path(source.path)
    if not folder.is_dir():
        expected = "a .jsonl list or a folder"
        raise MissingFileError(
            owner=source._label, field="path", value=source.path, expected=expected
        )
    listed = {}
    for file in folder.rglob("*.trans.txt"):
        for line in file.read_text("utf-8").splitlines():
            name, _, text = line.partition(" ")
            listed[file.parent / name] = text
    entries = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES):
        stem, transcript = path.with_suffix(""), path.with_suffix(".txt")
        if stem in listed:
            entries.append((path, listed[stem]))
        elif transcript.is_file():
            entries.append((path, transcript.read_text("utf-8").strip()))
        else:
            problem = f"no transcript; expected {transcript.name} or a line of a *.trans.txt"
            raise BadRecordError(problem, owner=str(path))
    return entries


def _speech_batch(sounds: Any, labels: Any, sizes: Any) -> NestedMap:
    rows = len(sounds)
    waveform = np.zeros((rows, sizes.max_samples), np.float32)
    ids = np.zeros((rows, sizes.max_labels), np.int32)
    paddings = np.ones((rows, sizes.max_labels), np.float32)
    for row, (sound, tokens) in enumerate(zip(sounds, labels, strict=True)):
        waveform[row, : len(sound)] = sound
        ids[row, : len(tokens)] = tokens
        paddings[row, : len(tokens)] = 0.0
    lengths = np.array([len(sound) for sound in sounds], np.int32)
    return NestedMap(
        src=NestedMap(waveform=waveform, lengths=lengths),
        tgt=NestedMap(labels=ids, paddings=paddings),
    )
