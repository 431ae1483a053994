"""HuggingFacePairs: inputs and targets of a Hugging Face data set for an encoder-decoder model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.tokenizer_interface import SpecialIds, target_start_id
from layerkit_inputs.hugging_face.text_base import Example
from layerkit_inputs.hugging_face.text_input import TokenisedText
from layerkit_inputs.packing.first_fit import PackingPlan, plan_packing
from layerkit_inputs.packing.model_features import stretch_pair_features
from layerkit_inputs.text.text_pairs import PairPacking


class HuggingFacePairs(TokenisedText):
    """An input of rows of inputs (`src`) and targets (`tgt`), each with EOS as in SeqIO tasks.

    `src` arrays are `[batch, inputs_length]`, `tgt` arrays `[batch, targets_length]`. Both hold
    `ids`, `segment_ids` (int32) and `paddings` (float32); `tgt` also holds `labels` (int32) and
    `weights` (float32). Evaluation batches also have `provenance` and `eval_sample_weights`, each
    `[batch]`. With `packing="first_fit"` both sides have `segment_pos` (int32), and a pair has one
    number in the `segment_ids` of both. Decoding needs `packing="none"`.
    """

    inputs_length: int = 512
    """Positions of a row of inputs, EOS included."""
    targets_length: int = 128
    """Positions of a row of targets, EOS included."""
    packing: PairPacking = "first_fit"
    """`first_fit` (several pairs per row) or `none` (one pair per row)."""
    trim: bool = False
    """True to cut longer inputs and targets before EOS. False: they raise ConfigError."""

    _is_pair = True

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        has_inputs = self.inputs_field is not None
        require(has_inputs, self._label, "inputs_field", None, "the column of the inputs")
        self._check_at_least(1, "inputs_length", "targets_length")

    def _framed(self, example: Example) -> Example:
        """Return a pair with EOS, and before it the id that a target begins with."""
        start, eos_id = target_start_id(self._tokenizer), self._tokenizer.eos_id
        end = np.array([] if eos_id is None else [eos_id], np.int32)
        return Example(np.append(np.int32(start), example.inputs), np.append(example.targets, end))

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        """Row positions of inputs and targets of each pair, int64 `[pairs, 2]`."""
        num_inputs = self._documents.num_inputs
        assert num_inputs is not None
        # The predictions of a document are inputs, targets, and EOS if the tokenizer has one.
        num_targets = self._documents.num_predictions - num_inputs
        has_eos = self._tokenizer.eos_id is not None
        lengths = np.stack([num_inputs + has_eos, num_targets], axis=1)
        limits = np.array([self.inputs_length, self.targets_length])
        too_long = np.flatnonzero((lengths > limits).any(axis=1))
        if len(too_long) and not self.trim:
            needed, row = lengths[too_long[0]].tolist(), limits.tolist()
            expected = f"at least {needed} for pair {too_long[0]}, or trim=True to cut pairs"
            raise self._config_error(
                field="[inputs_length, targets_length]", value=row, expected=expected
            )
        return np.minimum(lengths, limits)

    @functools.cached_property
    def _plan(self) -> PackingPlan:
        return plan_packing(self._lengths, (self.inputs_length, self.targets_length))

    def _num_rows(self) -> int:
        return self._plan.num_rows if self.packing == "first_fit" else len(self._lengths)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        pairs, places = rows, np.arange(len(rows))
        if self.packing == "first_fit":
            pairs, places = self._plan.documents_of_rows(rows)
        inputs, targets = self._sides_of(pairs)
        sizes = self._lengths[pairs]
        return stretch_pair_features(
            inputs,
            targets,
            rows=places,
            input_sizes=sizes[:, 0],
            target_sizes=sizes[:, 1],
            num_rows=len(rows),
            inputs_length=self.inputs_length,
            targets_length=self.targets_length,
            is_packed=self.packing == "first_fit",
            bos_id=target_start_id(self._tokenizer),
            pad_id=self._tokenizer.pad_id,
        )

    def _sides_of(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated inputs and targets of some pairs with EOS, int32 `[tokens]`."""
        documents, eos_id = self._documents, self._tokenizer.eos_id
        assert documents.num_inputs is not None
        sizes = self._lengths[pairs] - (eos_id is not None)
        # A document begins with the start id of the target.
        begins = documents.begins[pairs] + 1
        begins = np.stack([begins, begins + documents.num_inputs[pairs]], axis=1)
        # In the order in the file, so that adjacent inputs and targets are read at once.
        tokens = documents.read(begins.reshape(-1), sizes.reshape(-1))
        is_input = np.tile([True, False], len(pairs)).repeat(sizes.reshape(-1))
        inputs, targets = tokens[is_input], tokens[~is_input]
        if eos_id is None:
            return inputs, targets
        return _ended(inputs, sizes[:, 0], eos_id), _ended(targets, sizes[:, 1], eos_id)

    def special_ids(self) -> SpecialIds:
        """Return the ids that begin a target, end both sides and pad them."""
        tokenizer = self._tokenizer
        return SpecialIds(target_start_id(tokenizer), tokenizer.eos_id, tokenizer.pad_id)

    def _fingerprint(self) -> dict[str, Any]:
        return {
            **super()._fingerprint(),
            "inputs_length": self.inputs_length,
            "targets_length": self.targets_length,
            "packing": self.packing,
            "trim": self.trim,
        }


def _ended(tokens: np.ndarray, sizes: np.ndarray, eos_id: int) -> np.ndarray:
    """Insert `eos_id` after each stretch of `sizes` tokens: int32 `[tokens + stretches]`."""
    ended = np.full(len(tokens) + len(sizes), eos_id, np.int32)
    is_token = np.ones(len(ended), bool)
    is_token[np.cumsum(sizes + 1) - 1] = False
    ended[is_token] = tokens
    return ended
