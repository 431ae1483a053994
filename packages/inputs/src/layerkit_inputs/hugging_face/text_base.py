"""HuggingFaceText: the base of inputs that read text or token ids of a Hugging Face data set.

A column of strings is encoded by the tokenizer of the input. A column of lists of integers holds
ids that this tokenizer made. Examples may have two columns, inputs and targets; then only the
targets count for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from layerkit.config.checks import require
from layerkit.errors import ConfigError
from layerkit_inputs.base.base_input import FIRST_TEXT_BYTES, NUM_FIRST_TEXTS
from layerkit_inputs.base.errors import require_extra
from layerkit_inputs.base.tokenizer_interface import Tokenizer, first_ids, last_ids
from layerkit_inputs.hugging_face.dataset_base import HuggingFaceData
from layerkit_inputs.packing.documents import Packing
from layerkit_inputs.packing.model_features import as_tokens
from layerkit_inputs.text.text_files import chat_hint
from layerkit_inputs.text.tokenizers import ByteTokenizer


class Example(NamedTuple):
    """An example as token ids without special ids, each int32 `[tokens]`."""

    inputs: np.ndarray
    """Token ids of the inputs; empty if there is no column of inputs."""
    targets: np.ndarray


class HuggingFaceText(HuggingFaceData):
    """Base of inputs of text, with its columns and its tokenizer."""

    token_unit: ClassVar[str] = "token"

    text_field: str = "text"
    """Column of the text or token ids; with `inputs_field`, column of the targets."""
    inputs_field: str | None = None
    """Column of the inputs, whose tokens have no loss. None: examples have no inputs."""
    tokenizer: Tokenizer | None = None
    """Tokenizer of the text, or the one that made a column of ids. None: bytes."""

    def __post_init__(self) -> None:
        """Set the default of the tokenizer and the token unit."""
        super().__post_init__()
        self._tokenizer = ByteTokenizer() if self.tokenizer is None else self.tokenizer
        self._texts_to_check: list[bytes] = []
        if isinstance(self._tokenizer, ByteTokenizer):
            self.token_unit = "byte"  # type: ignore[misc]  # of this instance

    def _column(self, table: Any, field: str) -> Any:
        """Return the column that a field names, as bytes or as lists of token ids."""
        arrow = require_extra("pyarrow", needed_by=type(self).__qualname__)
        name = getattr(self, field)
        if name not in table.schema.names:
            names, hint = table.schema.names, chat_hint(arrow, table.schema.types)
            raise self._config_error(field=field, value=name, choices=names, hint=hint)
        column = table.column(name)
        kind = column.type
        if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
            # As bytes, so that invalid UTF-8 is found when the text is decoded.
            return column.cast(arrow.large_binary())
        if arrow.types.is_null(kind):  # every example is reported as one without text
            return column
        is_list = arrow.types.is_list(kind) or arrow.types.is_large_list(kind)
        if not is_list or not arrow.types.is_integer(kind.value_type):
            raise self._config_error(
                field=f"type of column {name!r}",
                value=str(kind),
                expected="strings, or lists of integers (token ids)",
                hint=chat_hint(arrow, [kind]),
            )
        expected = f"the tokenizer that made the ids of column {name!r}"
        require(self.tokenizer is not None, self._label, "tokenizer", None, expected)
        return column

    def _examples(self, table: Any, order: Sequence[int]) -> Iterator[tuple[int, Example | str]]:
        """Yield the row number, and the example or its problem, of rows of an Arrow table."""
        columns = [self._column(table, "text_field")]
        if self.inputs_field is not None:
            columns.insert(0, self._column(table, "inputs_field"))
        for row in order:
            try:
                parts = [self._tokens(column[row].as_py()) for column in columns]
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                yield row, f"byte {error.start} of the text is 0x{byte:02x}, which is not UTF-8."
            except ValueError as error:
                yield row, str(error)
            else:
                inputs = parts[0] if len(parts) > 1 else np.zeros(0, np.int32)
                yield row, Example(inputs, parts[-1])

    def _tokens(self, value: bytes | list[int] | None) -> np.ndarray:
        if value is None:
            raise ValueError("no text (null).")
        if isinstance(value, bytes):
            if len(self._texts_to_check) < NUM_FIRST_TEXTS:
                self._texts_to_check.append(value[:FIRST_TEXT_BYTES])
            return self._tokenizer.encode(value)
        if None in value:
            raise ValueError("a null among the token ids.")
        ids = as_tokens(value, where="the token ids")
        if len(ids) and ids.max() >= self._tokenizer.vocab_size:
            raise ValueError(
                f"token id {ids.max()}; the tokenizer has {self._tokenizer.vocab_size} ids."
            )
        return ids

    def _framed(self, example: Example) -> Example:
        """Return an example with the ids before its first token and after its last one.

        Empty inputs are the start id, as an empty prompt is.
        """
        ids = np.concatenate(example)
        first = np.array(first_ids(ids, self._tokenizer), np.int32)
        last = np.array(last_ids(ids, self._tokenizer), np.int32)
        inputs, targets = example.inputs, np.append(example.targets, last)
        if self.inputs_field is None:
            return Example(inputs, np.append(first, targets))
        inputs, start = np.append(first, inputs), self._tokenizer.start_id
        # A prompt has at least one id. Without this one it would be the first target.
        if not len(inputs) and start is not None:
            inputs = np.array([start], np.int32)
        return Example(inputs, targets)

    def _report(self, record: int, problem: str) -> None:
        """Count an example that cannot be used, or raise with its number in the split."""
        self._bad.report(file=f"split {self.split!r}", record=record, problem=problem)

    def _text_identity(self) -> dict[str, Any]:
        """Return the values that determine the tokens of an example, besides the data."""
        return {
            "split": self.split,
            "text_field": self.text_field,
            "inputs_field": self.inputs_field,
            "tokenizer": self._tokenizer.fingerprint(),
        }

    def _first_texts(self) -> list[bytes]:
        return self._texts_to_check


class HuggingFaceRows(HuggingFaceText):
    """Base of inputs of rows of text for language modeling."""

    seq_length: int = 1024
    """Positions of a row."""
    packing: Packing = "stream"
    """`stream` (cut anywhere), `first_fit` (whole examples) or `none` (one example per row)."""
    trim: bool = False
    """True to cut examples to their first `seq_length` predictions, with `packing="none"`. Other
    packings lose no token."""

    def __post_init__(self) -> None:
        """Check the fields of rows."""
        super().__post_init__()
        self._check_at_least(1, "seq_length")
        is_used = not self.trim or self.packing == "none"
        expected = "False, since only packing='none' cuts examples"
        require(is_used, self._label, "trim", self.trim, expected)

    def _too_long(self, number: int, size: int) -> ConfigError:
        """Return the error about example `number`, whose `size` predictions do not fit a row."""
        return self._config_error(
            f"example {number} is too long",
            field="seq_length",
            value=self.seq_length,
            expected=f"at least {size}",
            hint="Use longer rows, set trim=True to cut examples, or use another packing.",
        )
