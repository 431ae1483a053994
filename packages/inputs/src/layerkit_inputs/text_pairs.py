"""TextPairs and ParallelText: rows of source and target for an encoder-decoder model.

`TextPairs` makes rows of whatever pairs of texts a subclass has; `ParallelText` reads them from two
files whose lines belong together, the form in which translations are published. Everything is
tokenised when first needed and kept in memory.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.documents import Documents
from layerkit_inputs.features import stretch_pair_features
from layerkit_inputs.first_fit import PackingPlan, plan_packing
from layerkit_inputs.indexed_input import IndexedInput
from layerkit_inputs.tokenizers import ByteTokenizer, Tokenizer

PairPacking = Literal["first_fit", "none"]
"""How pairs share rows: whole pairs, several to a row, or one a row."""


class TextPairs(IndexedInput):
    """Base of readers of pairs of texts, each side ended by EOS.

    Batches hold `src` with `ids` (int32), and `tgt` with `ids`, `labels` (int32) and `weights`
    (float32), both with `segment_ids` (int32) and `paddings` (float32), `[batch, inputs_length]`
    and `[batch, targets_length]`. In packed rows both sides have `segment_pos` (int32) too, and a
    pair the same number in their `segment_ids`; rows of one pair can be decoded. Outside of
    training also `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    tokenizer: Tokenizer | None = None
    """What turns both sides into ids. None: bytes."""
    inputs_length: int = 64
    """Positions of a row of sources, EOS included."""
    targets_length: int = 64
    """Positions of a row of targets, EOS included."""
    packing: PairPacking | None = None
    """`first_fit` (several pairs a row) or `none`. None: `first_fit` while training."""
    trim: bool = False
    """Of longer sources or targets read only the beginning, and EOS. False: they are refused."""

    rows_in_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing is None:
            self.packing = "first_fit" if self.is_training else "none"
        known = get_args(PairPacking)
        if self.packing not in known:
            raise self._config_error(
                f"packing={self.packing!r}{near_names(str(self.packing), known)} Expected one of "
                f"{known}."
            )
        self._check_at_least(1, "inputs_length", "targets_length")
        self._tokenizer = ByteTokenizer() if self.tokenizer is None else self.tokenizer

    @classmethod
    def blank_batch(cls, config: Any, rows: int) -> NestedMap:
        """As many rows without a pair."""
        nothing = np.zeros(0, np.int32)
        is_packed = config.is_training if config.packing is None else config.packing != "none"
        return stretch_pair_features(
            nothing,
            nothing,
            rows=nothing,
            input_sizes=nothing,
            target_sizes=nothing,
            num_rows=rows,
            inputs_length=config.inputs_length,
            targets_length=config.targets_length,
            is_packed=is_packed,
        )

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Source and target of each pair, in a fixed order."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _texts().")

    @functools.cached_property
    def _sides(self) -> tuple[Documents, Documents]:
        """All sources and all targets as ids, each ended by EOS."""
        limits = (self.inputs_length, self.targets_length)
        eos_id = self._tokenizer.eos_id
        end = [] if eos_id is None else [eos_id]
        pieces: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for number, texts in enumerate(self._texts()):
            for side, text, limit in zip(pieces, texts, limits, strict=True):
                tokens = self._tokenizer.encode(text)
                if len(tokens) + len(end) > limit and not self.trim:
                    raise self._config_error(
                        f"pair {number} has a side of {len(tokens) + len(end)} positions, EOS "
                        f"included, and a row holds {list(limits)} (inputs_length, "
                        "targets_length); use longer rows, or trim=True to read only beginnings."
                    )
                if not len(tokens) and not end:
                    raise self._config_error(f"pair {number} has a side of no tokens, {text!r}.")
                side.append(np.append(tokens[: limit - len(end)], end).astype(np.int32))
        if not pieces[0]:
            raise self._config_error("there are no pairs to read.")
        sources, targets = (
            Documents.of(np.concatenate(side), np.array([len(piece) for piece in side]))
            for side in pieces
        )
        return sources, targets

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        """int64 `[pairs, 2]`: positions of both sides. (A document of n ids has n - 1 labels.)"""
        return np.stack([side.num_predictions + 1 for side in self._sides], axis=1)

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
        sizes = self._sizes[pairs]
        sources, targets = (
            side.read(side.begins[pairs], sizes[:, column])
            for column, side in enumerate(self._sides)
        )
        return stretch_pair_features(
            sources,
            targets,
            rows=places,
            input_sizes=sizes[:, 0],
            target_sizes=sizes[:, 1],
            num_rows=len(rows),
            inputs_length=self.inputs_length,
            targets_length=self.targets_length,
            is_packed=is_packed,
            bos_id=self._tokenizer.start_id,
            pad_id=self._tokenizer.pad_id,
        )

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

    def text_tokenizer(self, key: str | None = None) -> Tokenizer:
        """Return the tokenizer that made the ids."""
        return self._tokenizer

    def ids_to_strings(
        self, ids: np.ndarray, lengths: np.ndarray | Sequence[int], key: str | None = None
    ) -> list[str]:
        """Text of ids int `[batch, length]`; both sides have one vocabulary."""
        return [self._tokenizer.decode(row[:n]) for row, n in zip(ids, lengths, strict=True)]

    @property
    def has_prediction_metrics(self) -> bool:
        """Whether rows are single pairs, which can be decoded."""
        return self.packing == "none"

    def prediction_metrics(self, predictions: Mapping[int, str]) -> dict[str, float]:
        """`exact_match`: the share of the decoded targets that are the reference to the letter."""
        _, targets = self._sides
        found = np.array(sorted(predictions))
        sizes = self._sizes[found, 1]
        is_right = [
            predictions[number] == self._tokenizer.decode(targets.ids[begin : begin + size])
            for number, begin, size in zip(
                found.tolist(), targets.begins[found].tolist(), sizes.tolist(), strict=True
            )
        ]
        return {"exact_match": float(np.mean(is_right))}


class ParallelText(TextPairs):
    """Pairs from two files of UTF-8 text: line n of one is the translation of line n of the other.

    Pairs with a blank side are left out.
    """

    source_file: str | None = None
    """What the encoder reads."""
    target_file: str | None = None
    """What is to be written."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("source_file", "target_file"):
            if getattr(self, field) is None:
                raise self._config_error(f"{field} is not set; expected a file of a text per line.")

    def _texts(self) -> Iterator[tuple[str, str]]:
        sources, targets = (self._lines(str(f)) for f in (self.source_file, self.target_file))
        if len(sources) != len(targets):
            raise self._config_error(
                f"{self.source_file} has {len(sources)} lines and {self.target_file}"
                f" {len(targets)}; expected as many, each the translation of the other."
            )
        for source, target in zip(sources, targets, strict=True):
            if source.strip() and target.strip():
                yield source.strip(), target.strip()

    def _lines(self, file: str) -> list[str]:
        """Lines by `\n` alone: texts hold other characters that Python takes for a line's end."""
        if not Path(file).is_file():
            raise FileNotFoundError(f"{type(self).__qualname__}: there is no file {file!r}.")
        return Path(file).read_text(encoding="utf-8").removesuffix("\n").split("\n")
