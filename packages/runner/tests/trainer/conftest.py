from __future__ import annotations

from typing import Any

import pytest

from layerkit_runner.observers import Observer


class Recorder(Observer):
    """Records what is reported: that of training steps by step, the rest in order."""

    def __init__(self) -> None:
        self.completed: list[int] = []
        self.messages: list[str] = []
        self.evals: list[tuple[int, str, dict[str, float]]] = []
        self.texts: list[tuple[int, str, str]] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.weights: dict[int, dict[str, Any]] = {}
        self.pictures: dict[int, dict[str, Any]] = {}

    def progress(self, step: int) -> None:
        self.completed.append(step)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def eval_metrics(self, step: int, dataset: str, scalars: Any) -> None:
        self.evals.append((step, dataset, dict(scalars)))

    def text(self, step: int, name: str, text: str) -> None:
        self.texts.append((step, name, text))

    def train_metrics(self, step: int, scalars: Any) -> None:
        self.metrics[step] = dict(scalars)

    def histograms(self, step: int, histograms: Any) -> None:
        self.weights[step] = dict(histograms)

    def images(self, step: int, images: Any) -> None:
        self.pictures[step] = dict(images)


@pytest.fixture
def make_recorder() -> type[Recorder]:
    return Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
