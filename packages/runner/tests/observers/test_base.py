from __future__ import annotations

import subprocess
import sys

import pytest

from layerkit_runner.observers import Observer, Observers


class Recorder(Observer):
    def __init__(self):
        self.seen = []

    def train_metrics(self, step, scalars):
        self.seen.append(("train", step, dict(scalars)))

    def progress(self, step):
        self.seen.append(("progress", step))

    def eval_metrics(self, step, dataset, scalars):
        self.seen.append(("eval", step, dataset, dict(scalars)))

    def message(self, text):
        self.seen.append(("message", text))

    def close(self):
        self.seen.append(("close",))


class Broken(Recorder):
    def train_metrics(self, step, scalars):
        raise OSError("bucket not found")


class BrokenOutside(Broken):
    optional = True


class BrokenAtTheEnd(Observer):
    optional = True

    def close(self):
        raise OSError("disk full")


def test_reports_reach_every_observer_in_order():
    first, second = Recorder(), Recorder()
    observers = Observers([first, second])
    observers.train_metrics(1, {"loss": 2.0})
    observers.progress(1)
    observers.eval_metrics(1, "held_out", {"loss": 3.0})
    assert first.seen == second.seen
    assert first.seen == [
        ("train", 1, {"loss": 2.0}),
        ("progress", 1),
        ("eval", 1, "held_out", {"loss": 3.0}),
    ]


def test_an_optional_observer_that_fails_is_named_once_closed_and_left_out():
    watcher, broken = Recorder(), BrokenOutside()
    observers = Observers([broken, watcher])
    observers.train_metrics(1, {"loss": 2.0})
    observers.train_metrics(2, {"loss": 1.0})
    assert watcher.seen == [
        ("train", 1, {"loss": 2.0}),
        (
            "message",
            "BrokenOutside failed and is left out from here on; the run continues. "
            "OSError: bucket not found",
        ),
        ("train", 2, {"loss": 1.0}),
    ]
    assert broken.seen == [("close",)]


def test_any_other_failure_is_raised():
    observers = Observers([Recorder(), Broken()])
    with pytest.raises(OSError, match="bucket not found"):
        observers.train_metrics(1, {"loss": 2.0})


def test_closing_closes_all_and_shows_what_failed_optionally():
    watcher, last = Recorder(), Recorder()
    Observers([watcher, BrokenAtTheEnd(), last]).close()
    assert last.seen == [("close",)]
    assert watcher.seen == [
        (
            "message",
            "BrokenAtTheEnd failed and is left out from here on; the run continues. "
            "OSError: disk full",
        ),
        ("close",),
    ]


def test_closing_raises_the_failure_that_counts_after_closing_all():
    class EssentialFailure(Observer):
        def close(self):
            raise RuntimeError("lost")

    watcher = Recorder()
    with pytest.raises(RuntimeError, match="lost"):
        Observers([watcher, EssentialFailure()]).close()
    assert watcher.seen == [("close",)]


def test_importing_the_package_loads_nothing_heavy():
    heavy = ("jax", "flax", "tensorboardX", "matplotlib", "tqdm", "tensorflow", "orbax")
    code = (
        "import sys, layerkit_runner.observers;"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.strip() == "[]"
