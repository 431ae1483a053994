"""PairInput and JudgementInput, inputs of preferences in files, by the chat template of a model.

Files, templates and splits are those of `chat_input`; `read_pair` and `read_judgement` read a row.
"""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.chat.chat_input import ConversationFiles
from layerkit_inputs.chat.conversations import Conversation, read_judgement, read_pair
from layerkit_inputs.chat.token_masks import ChatTokens, encode_conversation
from layerkit_inputs.packing.documents import RowPlan

_ROWS_AT_A_TIME = 16


class _Answers(ConversationFiles):
    """Base class of inputs of conversations whose answers are compared or judged, one in a row.

    Rows have the arrays of `ChatInput`, `[batch, length]`, with a weight on the answer. `ids` also
    hold the last token, behind the last label.
    """

    seq_length: int = 1024
    """Positions of a row. Longer conversations are dropped with their pair, and counted."""

    _noun: ClassVar[str]
    _sides: ClassVar[tuple[str, ...]]

    def _encode(self, conversation: Conversation) -> ChatTokens | str:
        encoding = self.special_tokens_in_text
        tokens = encode_conversation(
            conversation, self._template, self._tokenizer, special_tokens_in_text=encoding
        )
        if len(tokens.ids) > self.seq_length:
            return f"{self._noun}s dropped as too long"
        return tokens if tokens.has_loss[1:].any() else f"{self._noun}s dropped without an answer"

    def _num_rows(self) -> int:
        return len(self._documents) // len(self._sides)

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        plan, batch = RowPlan(self._documents.ends, self.seq_length, "none"), NestedMap()
        for number, side in enumerate(self._sides):
            documents, pad_id = len(self._sides) * rows + number, self._tokenizer.pad_id
            batch[side] = self._documents.rows_of(plan, documents, pad_id=pad_id)
            batch[side].ids[:, 1:] = batch[side].labels[:, :-1]
        return batch

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "seq_length": self.seq_length}

    def _data_text(self) -> str:
        return f"{counted(self._num_rows(), self._noun)} of {super()._data_text()}"


class PairInput(_Answers):
    """An input of pairs of answers, of which one is preferred.

    Batches hold `chosen` and `rejected` with the arrays of a row. With a `reference_file` they also
    hold `chosen_reference_log_probs` and `rejected_reference_log_probs`, float32 `[batch]`.
    Evaluation batches have `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    reference_file: str | None = None
    """File of log-probabilities under a reference, which `store_reference` writes. None: none."""
    reference_id: str = ""
    """Text that identifies the reference. The file is refused under another one."""

    _noun = "pair"
    _sides = ("chosen", "rejected")

    def _read(self, row: Mapping[str, Any]) -> Any:
        return read_pair(row)

    def _encode_row(self, row: Sequence[Any]) -> Sequence[ChatTokens] | str:
        sides: Any = [self._encode(Conversation(*side)) for side in row]
        reasons = [side for side in sides if isinstance(side, str)]
        if not reasons and np.array_equal(sides[0].ids, sides[1].ids):
            reasons = ["pairs dropped with equal answers"]
        return reasons[0] if reasons else sides

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        batch = super()._read_rows(rows)
        for number, side in enumerate(self._sides if self.reference_file is not None else ()):
            batch[f"{side}_reference_log_probs"] = self._reference[rows, number]
        return batch

    def store_reference(self, score_ids: Callable[[list[np.ndarray]], Sequence[Any]]) -> None:
        """Write `reference_file`: log-probabilities of all answers under a model.

        Args:
          score_ids: Method of the model, such as `layerkit_runner.load(FOLDER).score_ids`.
        """
        arrays = (self._documents.ids, self._documents.has_loss)
        begins = self._documents.begins[1:]
        ids, has_loss = (np.split(np.asarray(array), begins) for array in arrays)
        firsts = range(0, len(ids), _ROWS_AT_A_TIME)
        scores = (score for i in firsts for score in score_ids(ids[i : i + _ROWS_AT_A_TIME]))
        sums = [s.token_log_probs @ one[1:] for s, one in zip(scores, has_loss, strict=True)]
        log_probs = np.array(sums, np.float32).reshape(-1, 2)
        with Path(str(self.reference_file)).open("wb") as file:
            np.savez(file, log_probs=log_probs, data=np.array(self._reference_data()))

    @functools.cached_property
    def _reference(self) -> np.ndarray:
        """Log-probabilities of the chosen and the rejected answers, float32 `[pairs, 2]`."""
        file, problem = str(self.reference_file), "log-probabilities of other data or references"
        try:
            with Path(file).open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
                if str(stored["data"]) == self._reference_data():
                    return np.asarray(stored["log_probs"])
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            problem = f"cannot read the log-probabilities of a reference ({error})"
        hint = "Write it anew with PairInput.store_reference; see docs/preferences.md."
        raise self._config_error(problem, field="reference_file", value=file, hint=hint)

    def _reference_data(self) -> str:
        """Return what identifies the reference and the tokens of all answers."""
        return json.dumps([self.reference_id, self._fingerprint()], sort_keys=True)


class JudgementInput(_Answers):
    """An input of single answers, each judged as desirable or not.

    A batch has at least two rows over all hosts, since KTO compares prompts with other answers.
    Batches hold `answer` with the arrays of a row, and `is_desirable` (bool `[batch]`). Evaluation
    batches also have `provenance` and `eval_sample_weights`, each `[batch]`.
    """

    _noun = "judgement"
    _sides = ("answer",)

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        size = self.global_batch_size
        require(
            size > 1, self._label, "rows of a batch", size, "at least 2, for mismatched answers"
        )

    def _read(self, row: Mapping[str, Any]) -> Any:
        return read_judgement(row)

    def _begin(self) -> None:
        super()._begin()
        self._labels: list[bool] = []

    def _encode_row(self, row: Sequence[Any]) -> Sequence[ChatTokens] | str:
        tokens = super()._encode_row(row[0])
        if not isinstance(tokens, str):
            self._labels.append(row[1])
        return tokens

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        return NestedMap(
            super()._read_rows(rows), is_desirable=np.array([self._labels[row] for row in rows])
        )
