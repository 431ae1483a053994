"""PairInput and JudgementInput, inputs of preferences in files, by the chat template of a model.

Files, templates and splits are those of `chat_input`; `read_pair` and `read_judgement` read a row.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.base.errors import MissingFileError
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
        chosen, rejected = (self._encode(Conversation(*side)) for side in row)
        if isinstance(chosen, str) or isinstance(rejected, str):
            return chosen if isinstance(chosen, str) else str(rejected)
        return [chosen, rejected]

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
        documents, scores = self._documents, list[Any]()
        ids, has_loss = (
            np.split(array, documents.begins[1:])
            for array in (np.asarray(documents.ids), np.asarray(documents.has_loss))
        )
        for first in range(0, len(ids), _ROWS_AT_A_TIME):
            scores += score_ids(ids[first : first + _ROWS_AT_A_TIME])
        sums = [s.token_log_probs @ one[1:] for s, one in zip(scores, has_loss, strict=True)]
        log_probs = np.array(sums, np.float32).reshape(-1, 2)
        with Path(str(self.reference_file)).open("wb") as file:
            np.savez(file, log_probs=log_probs, digest=np.array(self._digest))

    @functools.cached_property
    def _reference(self) -> np.ndarray:
        """Log-probabilities of the chosen and the rejected answers, float32 `[pairs, 2]`."""
        file = str(self.reference_file)
        if not Path(file).is_file():
            hint = "Write it with PairInput.store_reference; see docs/preferences.md."
            problem = "no log-probabilities of a reference"
            raise MissingFileError(
                problem, owner=self._label, field="reference_file", value=file, hint=hint
            )
        with np.load(file, allow_pickle=False) as stored:
            expected = "a file of the same reference and of the same tokens; write it again"
            is_same = str(stored["digest"]) == self._digest
            require(is_same, self._label, "reference_file", file, expected)
            log_probs: np.ndarray = stored["log_probs"]
        return log_probs

    @functools.cached_property
    def _digest(self) -> str:
        """Digest of the tokens of all answers, and of the reference."""
        documents, digest = self._documents, hashlib.sha256(self.reference_id.encode())
        for part in (documents.ids, documents.ends, documents.has_loss):
            digest.update(np.asarray(part).tobytes())
        return digest.hexdigest()


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
        size, expected = self.global_batch_size, "at least 2, to compare prompts with other answers"
        require(size > 1, self._label, "rows of a batch", size, expected)

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
        return NestedMap(super()._read_rows(rows), is_desirable=np.array(self._labels)[rows])
