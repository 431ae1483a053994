"""HuggingFacePairs: inputs and targets of a Hugging Face data set for an encoder-decoder model."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from layerkit.config.checks import require
from layerkit_inputs.base.tokenizer_interface import target_start_id
from layerkit_inputs.hugging_face.text_base import Example
from layerkit_inputs.hugging_face.text_input import TokenisedText
from layerkit_inputs.text.text_pairs import PairPacking, PairRows


class HuggingFacePairs(TokenisedText, PairRows):
    """An input of rows of inputs (`src`) and targets (`tgt`), each with EOS as in SeqIO tasks.

    Batches are those of `PairRows`. Decoding needs `packing="none"`.
    """

    inputs_length: int = 512
    """Positions of a row of inputs, EOS included."""
    targets_length: int = 128
    """Positions of a row of targets, EOS included."""
    packing: PairPacking = "first_fit"
    """`first_fit` (several pairs per row) or `none` (one pair per row)."""

    _is_pair = True

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        has_inputs = self.inputs_field is not None
        require(has_inputs, self._label, "inputs_field", None, "the column of the inputs")

    def _framed(self, example: Example) -> Example:
        """Return a pair with EOS, and before it the id that a target begins with."""
        start, eos_id = target_start_id(self._tokenizer), self._tokenizer.eos_id
        end = np.array([] if eos_id is None else [eos_id], np.int32)
        return Example(np.append(np.int32(start), example.inputs), np.append(example.targets, end))

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
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

    def _read_pairs(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        documents, eos_id = self._documents, self._tokenizer.eos_id
        assert documents.num_inputs is not None
        sizes = self._sizes[pairs] - (eos_id is not None)
        # A document begins with the start id of the target.
        begins = documents.begins[pairs] + 1
        begins = np.stack([begins, begins + documents.num_inputs[pairs]], axis=1)
        # In the order in the file, so that adjacent inputs and targets are read at once.
        tokens = documents.read(begins.reshape(-1), sizes.reshape(-1))
        is_input = np.tile([True, False], len(pairs)).repeat(sizes.reshape(-1))
        inputs, targets = tokens[is_input], tokens[~is_input]
        if eos_id is None:
            return inputs, targets
        ends = np.cumsum(sizes, axis=0)
        return np.insert(inputs, ends[:, 0], eos_id), np.insert(targets, ends[:, 1], eos_id)

    def _fingerprint(self) -> dict[str, Any]:
        return {
            **super()._fingerprint(),
            "inputs_length": self.inputs_length,
            "targets_length": self.targets_length,
            "packing": self.packing,
            "trim": self.trim,
        }
