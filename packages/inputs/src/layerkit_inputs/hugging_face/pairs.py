"""HuggingFacePairs: inputs and targets of a Hugging Face data set for an encoder-decoder model."""

from __future__ import annotations

import functools
from typing import Any, get_args

import numpy as np

from layerkit.near_names import near_names
from layerkit.nested_map import NestedMap
from layerkit_inputs.features import stretch_pair_features
from layerkit_inputs.first_fit import PackingPlan, plan_packing
from layerkit_inputs.hugging_face.input import TokenisedText
from layerkit_inputs.text_pairs import PairPacking


class HuggingFacePairs(TokenisedText):
    """Rows of inputs (`src`) and targets (`tgt`), each column ended by EOS as SeqIO's tasks do.

    Batches hold `src` and `tgt`, each with `ids`, `segment_ids` (int32) and `paddings` (float32),
    `tgt` also with `labels` (int32) and `weights` (float32), `[batch, inputs_length]` and `[batch,
    targets_length]`; outside of training also `provenance` and `eval_sample_weights`, each
    `[batch]`. With `packing="first_fit"` both sides have `segment_pos` (int32) too, and a pair the
    same number in their `segment_ids`; rows of one pair can be decoded.
    """

    inputs_length: int = 512
    """Positions of a row of inputs, EOS included."""
    targets_length: int = 128
    """Positions of a row of targets, EOS included."""
    packing: PairPacking = "first_fit"
    """`first_fit` (several pairs a row) or `none`."""
    trim: bool = False
    """Of longer inputs or targets read only the beginning, and EOS. False: they are refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs_field is None:
            raise self._config_error(
                "inputs_field is not set; expected the column that `src` is from."
            )
        known = get_args(PairPacking)
        if self.packing not in known:
            raise self._config_error(
                f"packing={self.packing!r}{near_names(str(self.packing), known)} Expected one of "
                f"{known}."
            )
        self._check_at_least(1, "inputs_length", "targets_length")

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        """int64 `[pairs, 2]`: positions that inputs and targets take in a row."""
        num_inputs = self._documents.num_inputs
        assert num_inputs is not None
        # The document's predictions are the inputs, the targets, and EOS where there is one.
        num_targets = self._documents.num_predictions - num_inputs
        has_eos = self._tokenizer.eos_id is not None
        lengths = np.stack([num_inputs + has_eos, num_targets], axis=1)
        limits = np.array([self.inputs_length, self.targets_length])
        too_long = np.flatnonzero((lengths > limits).any(axis=1))
        if len(too_long) and not self.trim:
            pair = too_long[0]
            raise self._config_error(
                f"pair {pair} takes {lengths[pair].tolist()} positions for inputs and targets, a "
                f"row holds {limits.tolist()} (inputs_length, targets_length); use longer rows, or "
                "trim=True to read only beginnings."
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
            bos_id=self._tokenizer.start_id,
            pad_id=self._tokenizer.pad_id,
        )

    def _sides_of(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of pairs by number, each int32 `[tokens]`: end to end, with EOS."""
        documents, eos_id = self._documents, self._tokenizer.eos_id
        assert documents.num_inputs is not None
        sizes = self._lengths[pairs] - (eos_id is not None)
        # A document begins with its start id.
        begins = documents.begins[pairs] + 1
        begins = np.stack([begins, begins + documents.num_inputs[pairs]], axis=1)
        # In the order that they lie in, as inputs and targets that follow one another are read
        # at once.
        tokens = documents.read(begins.reshape(-1), sizes.reshape(-1))
        is_input = np.tile([True, False], len(pairs)).repeat(sizes.reshape(-1))
        inputs, targets = tokens[is_input], tokens[~is_input]
        if eos_id is None:
            return inputs, targets
        return _ended(inputs, sizes[:, 0], eos_id), _ended(targets, sizes[:, 1], eos_id)

    def _fingerprint(self) -> dict[str, Any]:
        return {
            **super()._fingerprint(),
            "inputs_length": self.inputs_length,
            "targets_length": self.targets_length,
            "packing": self.packing,
            "trim": self.trim,
        }


def _ended(tokens: np.ndarray, sizes: np.ndarray, eos_id: int) -> np.ndarray:
    """Stretches of `sizes` tokens, with `eos_id` after each: int32 `[tokens + stretches]`."""
    ended = np.full(len(tokens) + len(sizes), eos_id, np.int32)
    is_token = np.ones(len(ended), bool)
    is_token[np.cumsum(sizes + 1) - 1] = False
    ended[is_token] = tokens
    return ended
