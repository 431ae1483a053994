"""TextPairs and ParallelText, inputs of sources and targets for an encoder-decoder model.

`PairRows` makes rows of pairs of token ids, and `TextPairs` of pairs of texts, which a subclass
supplies. `ParallelText` reads pairs from two files with corresponding lines, the usual format of
translations.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from layerkit.config.checks import check_choice, require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import FIRST_TEXT_BYTES, NUM_FIRST_TEXTS, counted
from layerkit_inputs.base.errors import BadRecordError, MissingFileError, require_extra
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_inputs.base.tokenizer_interface import SpecialIds, Tokenizer, target_start_id
from layerkit_inputs.packing.documents import Documents
from layerkit_inputs.packing.first_fit import PackingPlan, plan_packing
from layerkit_inputs.packing.model_features import encoder_decoder_features, stretch_pair_features
from layerkit_inputs.text.tokenizers import ByteTokenizer

PairPacking = Literal["first_fit", "none"]
"""`first_fit`: several whole pairs in a row; `none`: one pair in a row."""
PairMetric = Literal["exact_match", "word_error_rate", "bleu", "chrf"]
"""Share of equal targets, from 0 to 1; edits of words by words of the targets, from 0; BLEU and
chrF of the corpus by sacrebleu, from 0 to 100."""


def text_metrics(
    targets: Sequence[str],
    predictions: Sequence[str],
    *,
    metrics: Sequence[PairMetric] = ("exact_match",),
) -> dict[str, float]:
    """Return `metrics` of predicted texts, of which there is one for each target.

    Raises:
      ConfigError: A metric is unknown.
      MissingExtraError: BLEU and chrF need sacrebleu.
    """
    scores: dict[str, float] = {}
    for name in metrics:
        check_choice("text_metrics", get_args(PairMetric), metrics=name)
        if name == "exact_match":
            scores[name] = float(np.mean(np.array(predictions) == np.array(targets)))
        elif name == "word_error_rate":
            pairs = [
                (one.split(), other.split())
                for one, other in zip(targets, predictions, strict=True)
            ]
            edits = sum(edit_distance(target, words) for target, words in pairs)
            scores[name] = edits / max(sum(len(target) for target, _ in pairs), 1)
        else:
            sacrebleu = require_extra("sacrebleu", needed_by=f"metrics={name}")
            scores[name] = getattr(sacrebleu, f"corpus_{name}")(predictions, [targets]).score
    return scores


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the least number of insertions, deletions and substitutions (Levenshtein, 1966)."""
    # Distance of the words so far from each beginning of `second`.
    distances = np.arange(len(second) + 1)
    others = np.array(second, dtype=object)
    for word in first:
        best = np.append(
            distances[0] + 1, np.minimum(distances[1:] + 1, distances[:-1] + (others != word))
        )
        # An insertion continues the best distance of a shorter beginning.
        steps = np.arange(len(best))
        distances = np.minimum.accumulate(best - steps) + steps
    return int(distances[-1])


class PairRows(IndexedInput):
    """Base class of inputs of pairs of token ids, each side of which ends with EOS.

    Batches hold `src` with `ids` (int32), and `tgt` with `ids`, `labels` (int32) and `weights`
    (float32), both with `segment_ids` (int32) and `paddings` (float32), `[batch, inputs_length]`
    and `[batch, targets_length]`. In packed rows both sides also have `segment_pos` (int32), and a
    pair has the same number in `segment_ids` of both sides. Only rows of one pair can be decoded.
    Evaluation batches also have `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    tokenizer: Tokenizer | None = None
    """Tokenizer of both sides. None: bytes."""
    inputs_length: int = 64
    """Positions of a row of sources, EOS included."""
    targets_length: int = 64
    """Positions of a row of targets, EOS included."""
    packing: PairPacking | None = None
    """`first_fit` (several pairs a row) or `none`. None: `first_fit` while training."""
    trim: bool = False
    """Whether longer sources and targets are cut before EOS. False: they raise an error."""
    metrics: Sequence[PairMetric] = ("exact_match",)
    """Metrics of decoded targets."""

    def __post_init__(self) -> None:
        """Check the fields and derive `packing`."""
        super().__post_init__()
        if self.packing is None:
            self.packing = "first_fit" if self.is_training else "none"
        self._check_at_least(1, "inputs_length", "targets_length")
        self._tokenizer = ByteTokenizer() if self.tokenizer is None else self.tokenizer

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """Return a batch of rows without pairs."""
        is_packed = config.is_training if config.packing is None else config.packing != "none"
        return encoder_decoder_features(
            [()] * rows,
            [()] * rows,
            inputs_length=config.inputs_length,
            targets_length=config.targets_length,
            rows=[[number] for number in range(rows)] if is_packed else None,
        )

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        """Return the positions of both sides of each pair in a row, int64 `[pairs, 2]`."""
        raise NotImplementedError

    def _read_pairs(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated sources and targets of pairs by `_sizes`, int `[tokens]`."""
        raise NotImplementedError

    @functools.cached_property
    def _plan(self) -> PackingPlan:
        return plan_packing(self._sizes, (self.inputs_length, self.targets_length))

    def _num_rows(self) -> int:
        return self._plan.num_rows if self.packing == "first_fit" else len(self._sizes)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        pairs, places = rows, np.arange(len(rows))
        is_packed = self.packing == "first_fit"
        if is_packed:
            pairs, places = self._plan.documents_of_rows(rows)
        return stretch_pair_features(
            *self._read_pairs(pairs),
            rows=places,
            sizes=self._sizes[pairs],
            num_rows=len(rows),
            lengths=(self.inputs_length, self.targets_length),
            is_packed=is_packed,
            bos_id=target_start_id(self._tokenizer),
            pad_id=self._tokenizer.pad_id,
        )

    def special_ids(self) -> SpecialIds:
        """Return the ids that begin a target, end both sides and pad them."""
        tokenizer = self._tokenizer
        return SpecialIds(target_start_id(tokenizer), tokenizer.eos_id, tokenizer.pad_id)

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether rows hold single pairs, which can be decoded."""
        return self.packing == "none"

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """Return the `metrics` of decoded targets, whose references may be cut.

        Without predictions, return an empty dict.
        """
        if not predictions:
            return {}
        pairs = np.array(sorted(predictions))
        _, targets = self._read_pairs(pairs)
        ids = np.split(targets, np.cumsum(self._sizes[pairs, 1])[:-1])
        references = [self._tokenizer.decode(tokens) for tokens in ids]
        decoded = [predictions[number] for number in pairs.tolist()]
        return text_metrics(references, decoded, metrics=self.metrics)


class TextPairs(PairRows):
    """Base class of readers of pairs of texts, which are tokenized and kept in memory."""

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield the source and target of each pair, in a fixed order."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _texts().")

    @functools.cached_property
    def _sides(self) -> tuple[Documents, Documents]:
        """Return the ids of all sources and of all targets. Each text ends with EOS."""
        limits = (self.inputs_length, self.targets_length)
        eos_id = self._tokenizer.eos_id
        end = [] if eos_id is None else [eos_id]
        pieces: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self._texts_to_check: list[bytes] = []
        for number, texts in enumerate(self._texts()):
            if number < NUM_FIRST_TEXTS:
                self._texts_to_check += [text.encode()[:FIRST_TEXT_BYTES] for text in texts]
            for side, text, limit in zip(pieces, texts, limits, strict=True):
                tokens = self._tokenizer.encode(text)
                size = len(tokens) + len(end)
                field = f"length of a text of pair {number}, EOS included"
                expected = f"at most {limit}; use longer rows, or trim=True to cut longer texts"
                require(size <= limit or self.trim, self._label, field, size, expected)
                require(size, self._label, f"text of pair {number}", text, "at least one token")
                side.append(np.append(tokens[: limit - len(end)], end).astype(np.int32))
        require(pieces[0], self._label, "number of pairs", 0, "at least one")
        sources, targets = (
            Documents.of(np.concatenate(side), np.array([len(piece) for piece in side]))
            for side in pieces
        )
        return sources, targets

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        # A document of n ids has n - 1 predictions.
        return np.stack([side.num_predictions + 1 for side in self._sides], axis=1)

    def _read_pairs(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, targets = (
            side.read(side.begins[pairs], self._sizes[pairs, column])
            for column, side in enumerate(self._sides)
        )
        return sources, targets

    def _fingerprint(self) -> dict[str, Any]:
        checksum = 0
        for side in self._sides:
            checksum = zlib.crc32(np.asarray(side.ids[0:None]).astype("<i4").tobytes(), checksum)
            checksum = zlib.crc32(side.ends.astype("<i8").tobytes(), checksum)
        return {
            "pairs_crc32": checksum,
            "tokenizer": self._tokenizer.fingerprint(),
            "inputs_length": self.inputs_length,
            "targets_length": self.targets_length,
            "packing": self.packing,
        }

    def _data_text(self) -> str:
        return counted(len(self._sizes), "pair")

    def _first_texts(self) -> list[bytes]:
        return self._texts_to_check if self._sides else []


class ParallelText(TextPairs):
    """An input of pairs from two UTF-8 files, in which equal line numbers belong together.

    Pairs in which a side is empty or only whitespace are skipped.
    """

    source_file: str
    """File of the encoder's texts, one a line."""
    target_file: str
    """File of the target texts, one a line."""

    def _texts(self) -> Iterator[tuple[str, str]]:
        sources, targets = self._lines("source_file"), self._lines("target_file")
        expected = f"{len(sources)}, as in {self.source_file}"
        is_same = len(sources) == len(targets)
        require(is_same, self._label, "lines of target_file", len(targets), expected)
        for source, target in zip(sources, targets, strict=True):
            if source.strip() and target.strip():
                yield source.strip(), target.strip()

    def _lines(self, field: str) -> list[str]:
        """Return the lines of a file, split only at newlines. Texts may hold other breaks.

        Raises:
          BadRecordError: A line is not UTF-8.
        """
        file = getattr(self, field)
        if not Path(file).is_file():
            raise MissingFileError("file not found", owner=self._label, field=field, value=file)
        content = Path(file).read_bytes()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            where = f"{file}, line {line}"
            raise BadRecordError(f"not UTF-8 ({error.reason})", owner=where) from None
        return text.removesuffix("\n").split("\n")
