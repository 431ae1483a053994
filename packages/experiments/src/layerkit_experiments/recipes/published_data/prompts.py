"""Inputs of prompts for decoding during training: the beginnings of rows of another input."""

from __future__ import annotations

from typing import Any

import numpy as np

from layerkit.config import Config, assigned_fields, target_of
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_inputs import BaseInput, LocalText, SeqIOInput, SyntheticInput, TokenRecords
from layerkit_inputs.base.evaluation import ROW_MARKS


class RowPrompts(BaseInput):
    """The beginnings of the rows of another input, as prompts.

    Batches hold `ids` int32 and `paddings` float32 `[batch, length]`, 1 where padded, and
    `prompt_lengths` int32 `[batch]`. A prompt ends with the first document of its row.
    """

    prompt_length: int = 64
    """Maximum number of ids of a prompt."""

    def get_next(self) -> NestedMap:
        """Return the beginnings of the next rows."""
        batch = super().get_next()
        ids, paddings = (batch[name][:, : self.prompt_length] for name in ("ids", "paddings"))
        valid = paddings == 0
        if "segment_ids" in batch:
            valid &= batch.segment_ids[:, : self.prompt_length] == batch.segment_ids[:, :1]
        return NestedMap(
            {name: batch[name] for name in ROW_MARKS if name in batch},
            ids=np.where(valid, ids, 0).astype(np.int32),
            paddings=(~valid).astype(np.float32),
            prompt_lengths=valid.sum(axis=1).astype(np.int32),
        )


class SeqIOPrompts(RowPrompts, SeqIOInput):
    """Beginnings of the documents of SeqIO tasks."""


class TokenRecordPrompts(RowPrompts, TokenRecords):
    """Beginnings of rows of token records."""


class LocalTextRowPrompts(RowPrompts, LocalText):
    """Beginnings of rows of local text."""


class SyntheticPrompts(RowPrompts, SyntheticInput):
    """Beginnings of rows of synthetic tokens."""

    num_examples: int | None = 1024


# The class that cuts prompts from each class of input.
_PROMPTS = {
    SeqIOInput: SeqIOPrompts,
    TokenRecords: TokenRecordPrompts,
    LocalText: LocalTextRowPrompts,
    SyntheticInput: SyntheticPrompts,
}


def row_prompts(experiment: Any, rows: Config) -> Config:
    """Return the config of an input of prompts. Every decoding reads the same single batch.

    Args:
      experiment: Experiment with PROMPTS_PER_DEVICE and PROMPT_LENGTH.
      rows: Config of the input whose rows are cut; its class must be a key of `_PROMPTS`.
    """
    fields = {name: value for name, value in assigned_fields(rows).items() if value is not None}
    fields |= {
        "name": "prompts",
        "is_training": False,
        "percore_batch_size": experiment.PROMPTS_PER_DEVICE,
        "prompt_length": experiment.PROMPT_LENGTH,
        "reset_for_eval": True,
        "eval_loop_num_batches": 1,
    }
    kind = target_of(rows)
    if kind not in _PROMPTS:
        names = [known.__name__ for known in _PROMPTS]
        raise ConfigError(
            owner=type(experiment).__qualname__,
            field="PROMPTS_PER_DEVICE",
            value=experiment.PROMPTS_PER_DEVICE,
            expected=f"0, or rows of {' or '.join(names)}",
            hint=f"For rows of {kind.__name__}, define decode_datasets() that returns a Config of"
            f" `class Prompts(RowPrompts, {kind.__name__})`, with RowPrompts of {__name__}.",
        )
    return Config(_PROMPTS[kind], **fields)
