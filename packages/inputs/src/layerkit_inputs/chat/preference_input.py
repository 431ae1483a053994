"""PairInput and JudgementInput, inputs of preferences in files, by the chat template of a model.

Files, templates and splits are those of `chat_input`; `read_pair` and `read_judgement` read a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from layerkit.config.checks import require
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.base_input import counted
from layerkit_inputs.chat.chat_input import ConversationFiles
from layerkit_inputs.chat.conversations import Conversation, read_judgement, read_pair
from layerkit_inputs.chat.token_masks import ChatTokens
from layerkit_inputs.packing.documents import RowPlan


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
        tokens = self._encode_turns(conversation)
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
            self._with_images(batch[side], np.arange(len(rows)), documents)
        return batch

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "seq_length": self.seq_length}

    def _data_text(self) -> str:
        return f"{counted(self._num_rows(), self._noun)} of {super()._data_text()}"


class PairInput(_Answers):
    """An input of pairs of answers, of which one is preferred.

    Batches hold `chosen` and `rejected` with the arrays of a row. Evaluation batches also have
    `provenance` and `eval_sample_weights`, each `[batch]`.
    """

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


def reference_log_probs(score_ids: Callable[[list[np.ndarray]], Sequence[Any]]) -> Any:
    """Return the function with which `StoredRows.write` stores a reference of a `PairInput`.

    It computes `chosen_reference_log_probs` and `rejected_reference_log_probs`, float32 `[batch]`.

    Args:
      score_ids: Method of the model, such as `layerkit_runner.load(FOLDER).score_ids`.

    Raises:
      ConfigError: The function is called with a batch that has images.
    """

    def compute(batch: NestedMap) -> dict[str, np.ndarray]:
        arrays = {}
        for side in PairInput._sides:
            expected = "no images, which score_ids does not read"
            require("images" not in batch[side], None, side, "images", expected)
            sizes, rows = batch[side].segment_ids.sum(axis=1), batch[side].ids
            scores = score_ids([ids[: size + 1] for ids, size in zip(rows, sizes, strict=True)])
            log_probs = [
                score.token_log_probs @ weights[:size]
                for score, weights, size in zip(scores, batch[side].weights, sizes, strict=True)
            ]
            arrays[f"{side}_reference_log_probs"] = np.array(log_probs, np.float32)
        return arrays

    return compute
