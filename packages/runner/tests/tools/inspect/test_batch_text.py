from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_inputs import ByteTokenizer, LocalText
from layerkit_inputs.base.base_input import BaseInput
from layerkit_runner.files.text import draw_table
from layerkit_runner.tools.inspect.batch_forms import row_lines
from layerkit_runner.tools.inspect.batch_rows import read_row, real_rows, sizes_of
from layerkit_runner.tools.inspect.batches import field_table, summary


class Letters(BaseInput):
    """An input in which id 1 is a (A in `src`), 2 is b, and 0 ends a line."""

    def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
        first = "A" if key == "src" else "a"
        return [
            "".join(chr(ord(first) + i - 1) if i else "\n" for i in row[:n])
            for row, n in zip(ids, lengths, strict=True)
        ]


LETTERS = Letters(batch_size=2)


def lines_of(*row: Any, is_colored: bool = False) -> list[str]:
    """Return the lines of a row: its input, batch, number, and perhaps a tokenizer."""
    return list(row_lines(read_row(*row), is_colored=is_colored))


@pytest.fixture
def packed() -> NestedMap:
    """Return two documents and padding in row 0, and a row of padding."""
    return NestedMap(
        ids=np.array([[1, 2, 3, 4, 0, 0], [0] * 6], np.int32),
        labels=np.array([[2, 0, 4, 5, 6, 0], [0] * 6], np.int32),
        weights=np.array([[0, 1, 0, 0, 1, 0], [0] * 6], np.float32),
        paddings=np.array([[0, 0, 0, 0, 0, 1], [1] * 6], np.float32),
        segment_ids=np.array([[1, 1, 2, 2, 2, 0], [0] * 6], np.int32),
        provenance=np.array([7, -1], np.int32),
    )


def test_summary_counts_rows_and_padding_and_the_table_lists_fields(packed: NestedMap):
    assert real_rows(packed).tolist() == [True, False]
    assert summary(packed) == "1 of 2 rows hold data | 58.3% padding | weights 2"
    del packed.labels, packed.segment_ids, packed.paddings
    head, *table = field_table(packed)
    assert draw_table(table, head=head) == [
        "field       shape   dtype    min  max",
        "ids         [2, 6]  int32    0    4",
        "provenance  [2]     int32    -1   7",
        "weights     [2, 6]  float32  0    1",
    ]
    assert summary(packed) == "1 of 2 rows hold data | weights 2"


def test_segments_are_separate_and_labels_of_weight_0_are_marked(packed: NestedMap):
    assert lines_of(LETTERS, packed, 0) == [
        "row 0 (example 7)",
        "  ids[1]: “ab”",
        r"  labels[1]: “⟦b⟧\n”",
        r"  ids[2]: “cd\n”",
        "  labels[2]: “⟦de⟧f”",
    ]
    assert lines_of(LETTERS, packed, 1) == ["row 1: padding"]


def test_labels_are_green_or_dim_on_a_terminal(packed: NestedMap):
    lines = lines_of(LETTERS, packed, 0, is_colored=True)
    assert lines[1] == "  ids[1]: “ab”"
    assert lines[2] == "  labels[1]: “\x1b[2mb\x1b[0m\x1b[32m\\n\x1b[0m”"


def test_long_texts_are_cut_between_whole_marks():
    batch = NestedMap(
        ids=np.ones((1, 300), np.int32),
        labels=np.ones((1, 300), np.int32),
        weights=np.arange(300)[None] % 150 >= 75,
    )
    *_, line = lines_of(LETTERS, batch, 0)
    assert line == f"  labels: “⟦{'a' * 75}⟧{'a' * 5} … ⟦{'a' * 5}⟧{'a' * 75}”"


def test_ids_without_a_vocabulary_are_decoded_by_a_given_tokenizer():
    batch = NestedMap(ids=np.array([[1, 100, 101, 2]]))
    (_, line) = lines_of(BaseInput(batch_size=1), batch, 0, ByteTokenizer())
    assert line == "  ids: “⟪BOS⟫ab⟪EOS⟫”"
    (_, line) = lines_of(LETTERS, NestedMap(ids=np.array([[1, 2]])), 0, ByteTokenizer())
    assert line == "  ids: “ab”"


def test_special_ids_are_marked(tmp_path: Path):
    for name in "ab":
        (tmp_path / name).write_text("EOS")
    dataset = LocalText(batch_size=1, paths=[str(tmp_path)], seq_length=8, split="all")
    assert lines_of(dataset, dataset.get_next(), 0) == [
        "row 0 (example 0)",
        "  ids[1]: “⟪BOS⟫EOS”",
        "  labels[1]: “EOS⟪EOS⟫”",
        "  ids[2]: “⟪BOS⟫EOS”",
        "  labels[2]: “EOS⟪EOS⟫”",
    ]


def test_labels_of_whole_rows_are_numbers_and_rows_without_tokens_have_no_histogram():
    ids, labels = np.array([[1, 2], [0, 0]]), np.array([5, 6])
    batch = NestedMap(ids=ids, labels=labels, weights=np.ones(2), prompt_lengths=np.array([2, 0]))
    assert lines_of(LETTERS, batch, 0)[1:3] == ["  labels: 5", "  prompt_lengths: 2"]
    assert lines_of(LETTERS, batch, 0)[-1] == "  ids: “ab”"
    assert [values.tolist() for _, values in sizes_of(batch)] == [[2], [0, 100]]
    batch.prompt_lengths = np.zeros(2)
    assert [*sizes_of(batch)] == []
