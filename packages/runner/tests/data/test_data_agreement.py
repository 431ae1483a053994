"""Processes that read other data than process 0 are found before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerkit_inputs import LocalText
from layerkit_runner.data.training_data import check_same_data
from layerkit_runner.errors import UsageError


def text_input(folder: Path, words: str) -> LocalText:
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(words * 20)
    return LocalText(paths=[str(folder)], batch_size=1, seq_length=8, is_training=True)


def digests_of(dataset: LocalText) -> Any:
    """What a process that reads `dataset` would send."""
    sent: list[Any] = []

    def keep(mine: Any) -> list[Any]:
        sent.append(mine)
        return [mine]

    check_same_data({"train": dataset}, keep)
    return sent[0]


def test_the_same_files_agree_and_others_do_not(tmp_path: Path):
    here = text_input(tmp_path / "here", "one two ")
    same = text_input(tmp_path / "same", "one two ")
    other = text_input(tmp_path / "other", "one three ")
    check_same_data({"train": here}, lambda mine: [mine, digests_of(same)])
    with pytest.raises(UsageError, match=r"the data of 'train' differ between processes: \[2\]"):
        check_same_data({"train": here}, lambda mine: [mine, mine, digests_of(other)])


def test_data_that_cannot_be_read_are_told_without_a_traceback(tmp_path: Path):
    missing = LocalText(paths=[str(tmp_path / "none")], batch_size=1, seq_length=8)
    with pytest.raises(UsageError, match="none"):
        check_same_data({"heldout": missing}, lambda mine: [mine])
