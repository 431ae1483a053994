"""Reports of skipped records: at first, when their number has doubled, and as a metric."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from layerkit_runner.data.host_inputs import SkippedRecords, report_skipped
from layerkit_runner.observers import Observer


class Recorder(Observer):
    """Keeps the reported lines."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_skipped_records_are_reported_when_their_number_doubles(tiny: SimpleNamespace):
    class Holed(tiny.Points):
        """Skips as many records as the test sets."""

        num_skipped = 0

    dataset: Any = Holed(batch_size=8, is_training=True)
    recorder = Recorder()
    skipped = SkippedRecords(dataset, "train", recorder)
    assert skipped.scalars() == {}
    for count in (1, 1, 2, 3, 1500):
        Holed.num_skipped = count
        assert skipped.scalars() == {"skipped_records": count}
    assert recorder.messages == [
        "train: skipped 1 unreadable record so far",
        "train: skipped 2 unreadable records so far",
        "train: skipped 1,500 unreadable records so far",
    ]


def test_evaluation_without_skipped_records_reports_nothing(tiny: SimpleNamespace):
    recorder = Recorder()
    assert report_skipped(tiny.Points(batch_size=8), "dev", recorder) == {}
    assert recorder.messages == []
