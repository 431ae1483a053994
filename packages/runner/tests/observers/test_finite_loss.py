"""FiniteLoss: one warning, at the first loss that is no finite number."""

from __future__ import annotations

import math

from layerkit_runner.observers import FiniteLoss


def test_the_first_one_is_told_and_no_other():
    messages: list[str] = []
    watch = FiniteLoss("total", report=messages.append)
    watch.train_metrics(1, {"total": 3.0, "loss": math.nan})
    watch.train_metrics(2, {"accuracy": 0.5})
    assert messages == []
    watch.train_metrics(3, {"total": math.inf})
    watch.train_metrics(4, {"total": math.nan})
    assert messages == [
        "WARNING: total is inf at step 3; this run will hardly recover. Usual causes: ids outside"
        " of the vocabulary, a learning rate that is too high, a warmup that is too short. Ctrl-C"
        " stops it."
    ]
