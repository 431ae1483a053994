"""Records that were left out are told once, again when they have doubled, and counted always."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from layerkit_runner.data.batch_checks import SkippedRecords, report_skipped
from layerkit_runner.observers import Observer


class Recorder(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_while_training(tiny: SimpleNamespace):
    class Holed(tiny.Points):
        """Leaves out as many records as the test says."""

        num_skipped = 0

    dataset: Any = Holed(batch_size=8, is_training=True)
    recorder = Recorder()
    skipped = SkippedRecords(dataset, "train", recorder)
    assert skipped.scalars() == {}
    for count in (1, 1, 2, 3, 1500):
        Holed.num_skipped = count
        assert skipped.scalars() == {"skipped_records": count}
    assert recorder.messages == [
        "train: 1 record could not be read so far and was left out",
        "train: 2 records could not be read so far and were left out",
        "train: 1,500 records could not be read so far and were left out",
    ]


def test_after_an_evaluation(tiny: SimpleNamespace):
    recorder = Recorder()
    assert report_skipped(tiny.Points(batch_size=8), "dev", recorder) == {}
    assert recorder.messages == []
