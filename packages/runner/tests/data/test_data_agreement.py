"""Detection of processes that read other data than process 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layerkit_inputs import LocalText
from layerkit_runner.data.train_inputs import check_same_data
from layerkit_runner.errors import UsageError


def text_input(folder: Path, words: str) -> LocalText:
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(words * (20 + number))
    return LocalText(paths=[str(folder)], batch_size=1, seq_length=8, is_training=True)


def digests_of(dataset: LocalText) -> Any:
    """Return the values that a process which reads `dataset` sends."""
    sent: list[Any] = []

    def keep(mine: Any) -> list[Any]:
        sent.append(mine)
        return [mine]

    check_same_data({"train": dataset}, keep)
    return sent[0]


def test_processes_with_other_files_raise(raises, tmp_path: Path):
    here = text_input(tmp_path / "here", "one two ")
    same = text_input(tmp_path / "same", "one two ")
    other = text_input(tmp_path / "other", "one three ")
    check_same_data({"train": here}, lambda mine: [mine, digests_of(same)])
    with raises(UsageError, owner="train", field="processes", value=[2]):
        check_same_data({"train": here}, lambda mine: [mine, mine, digests_of(other)])


def test_unreadable_data_raise_a_usage_error(raises, tmp_path: Path):
    missing = LocalText(paths=[str(tmp_path / "none")], batch_size=1, seq_length=8)
    with raises(UsageError, field="paths", value=str(tmp_path / "none")):
        check_same_data({"heldout": missing}, lambda mine: [mine])
