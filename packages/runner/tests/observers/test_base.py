from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from etils import epath

from layerkit_runner.observers import (
    Goodput,
    GoodputLog,
    MetricsLog,
    Observer,
    Observers,
    Progress,
    TensorBoard,
    base,
)
from layerkit_runner.observers.trackers import WeightsAndBiases


class Recorder(Observer):
    in_background = False

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
    optional = False

    def train_metrics(self, step, scalars):
        raise OSError("bucket not found")


class BrokenOutside(Broken):
    optional = True


class BrokenAtTheEnd(Observer):
    in_background = False

    def close(self):
        raise OSError("disk full")


def line_of(text):
    """Return the number of the first line of this file that contains the text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


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


def test_failed_optional_observer_is_reported_once_closed_and_removed():
    watcher, broken = Recorder(), BrokenOutside()
    observers = Observers([broken, watcher])
    observers.train_metrics(1, {"loss": 2.0})
    observers.train_metrics(2, {"loss": 1.0})
    assert watcher.seen == [
        ("train", 1, {"loss": 2.0}),
        (
            "message",
            "BrokenOutside failed and was removed; the run continues. "
            f"OSError: bucket not found (test_base.py:{line_of('bucket not found')})",
        ),
        ("train", 2, {"loss": 1.0}),
    ]
    assert broken.seen == [("close",)]


@pytest.mark.parametrize(
    "make",
    [
        MetricsLog,
        TensorBoard,
        lambda: GoodputLog(Goodput()),
        pytest.param(
            lambda: WeightsAndBiases("toy", report=print),
            marks=pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed"),
        ),
    ],
    ids=["metrics", "TensorBoard", "goodput", "wandb"],
)
def test_observer_that_cannot_write_is_removed_once(run_info, tmp_path, capsys, make, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "file").write_text("no folder can be made inside a file")
    observers = Observers([Progress(), make()])
    observers.start(run_info(job_log_dir=epath.Path(tmp_path) / "file" / "job"))
    observers.train_metrics(1, {"loss": 1.0})
    observers.close()
    assert capsys.readouterr().out.count("failed and was removed; the run continues") == 1


@pytest.mark.parametrize("make", [MetricsLog, TensorBoard, lambda: GoodputLog(Goodput())])
def test_observer_of_a_run_without_a_folder_writes_nothing(run_info, tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    observer = make()
    observer.start(run_info())
    observer.train_metrics(1, {"loss": 1.0})
    observer.eval_metrics(1, "held_out", {"loss": 1.0})
    observer.text(1, "sample", "x")
    observer.close()
    assert list(tmp_path.iterdir()) == []


def test_failure_of_a_required_observer_is_raised_once_after_all_reports():
    broken, last = Broken(), Recorder()
    observers = Observers([broken, last])
    with pytest.raises(OSError, match="bucket"):
        observers.train_metrics(1, {"loss": 2.0})
    observers.train_metrics(2, {"loss": 2.0})
    observers.close()
    assert broken.seen == [("close",)]
    assert last.seen == [*(("train", step, {"loss": 2.0}) for step in (1, 2)), ("close",)]


def test_close_raises_a_required_failure_after_closing_all():
    watcher, broken = Recorder(), BrokenAtTheEnd()
    broken.optional = False
    with pytest.raises(OSError, match="disk full"):
        Observers([watcher, broken]).close()
    assert watcher.seen == [("close",)]


class Slow(Observer):
    """Records its calls; `progress` waits for the gate."""

    def __init__(self):
        self.calls, self.threads = [], set()
        self.waits, self.gate = threading.Event(), threading.Event()

    def start(self, info):
        self._record("start")

    def progress(self, step):
        self.waits.set()
        self.gate.wait(20)
        self._record(step)

    def train_metrics(self, step, scalars):
        self._record(scalars)

    def message(self, text):
        self._record(text)

    def close(self):
        self._record("close")

    def _record(self, call):
        self.calls.append(call)
        self.threads.add(threading.current_thread())


def test_background_observer_runs_on_one_thread_of_its_own_and_delays_no_report(run_info):
    slow, scalars = Slow(), {"loss": 2.0}
    observers = Observers([slow])
    observers.message("before the start")
    observers.start(run_info())
    observers.progress(1)
    observers.train_metrics(1, scalars)
    scalars["loss"] = 0.0  # the caller may use its dict again
    observers.message("later")
    assert slow.calls in ([], ["start"])
    slow.gate.set()
    observers.close()
    assert slow.calls == ["start", 1, {"loss": 2.0}, "later", "close"]
    assert len(slow.threads) == 1
    assert threading.current_thread() not in slow.threads


def test_background_observer_is_not_closed_if_it_was_not_started():
    slow = Slow()
    Observers([slow]).close()
    assert slow.calls == []


def test_background_observer_with_too_many_pending_reports_is_removed(run_info, monkeypatch):
    monkeypatch.setattr(base, "_MAX_PENDING_REPORTS", 5)
    slow, watcher = Slow(), Recorder()
    observers = Observers([slow, watcher])
    observers.start(run_info())
    observers.progress(1)
    assert slow.waits.wait(20)
    for step in range(2, 10):
        observers.progress(step)
    (told,) = [text for kind, text in watcher.seen if kind == "message"]
    assert told.startswith("Slow failed and was removed; the run continues.")
    assert "5 reports are pending" in told
    (thread,) = [each for each in threading.enumerate() if each in slow.threads]
    slow.gate.set()
    thread.join(20)
    assert slow.calls == ["start", 1, "close"]


@pytest.mark.parametrize("optional", [True, False])
def test_failure_in_the_background_removes_the_observer_or_ends_the_run(run_info, optional):
    class Failing(Slow):
        def progress(self, step):
            raise OSError("no such channel")

    failing, watcher = Failing(), Recorder()
    failing.optional = optional
    observers = Observers([watcher, failing])
    observers.start(run_info())
    observers.progress(1)
    if optional:
        observers.close()
        assert any("OSError: no such channel (test_base.py:" in str(seen) for seen in watcher.seen)
    else:
        with pytest.raises(OSError, match="no such channel"):
            observers.close()
    assert failing.calls == ["start", "close"]


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


class UnprintableError(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (SystemExit(0), "SystemExit: 0"),
        (asyncio.CancelledError(), "CancelledError: "),
        (UnprintableError(), "UnprintableError: UnprintableError whose text raises ValueError"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("hook", ["start", "progress", "close"])
def test_observer_that_raises_anything_is_removed_and_named(
    run_info, hook, in_background, raised, text
):
    def fail(self, *args):
        raise raised

    failing = type("Failing", (Observer,), {hook: fail, "in_background": in_background})()
    watcher = Recorder()
    observers = Observers([watcher, failing])
    observers.start(run_info())
    observers.progress(1)
    observers.close()
    (told,) = [seen[1] for seen in watcher.seen if seen[0] == "message"]
    assert told.startswith(f"Failing failed and was removed; the run continues. {text}")
    assert f"(test_base.py:{fail.__code__.co_firstlineno + 1})" in told


@pytest.mark.parametrize("hook", ["progress", "close"])
def test_blocked_observer_is_removed_and_named_after_the_time_limit(run_info, hook):
    gate, closed = threading.Event(), threading.Event()
    blocks = {hook: lambda *_: gate.wait(60), "close_timeout_secs": 0.2}
    other = type("Other", (Observer,), {"close": lambda self: closed.set()})()
    watcher = Recorder()
    observers = Observers([watcher, other, type("Blocked", (Observer,), blocks)()])
    observers.start(run_info())
    observers.progress(1)
    observers.close()
    (told,) = [seen[1] for seen in watcher.seen if seen[0] == "message"]
    assert told.startswith(
        f"Blocked failed and was removed; the run continues. TimeoutError: {hook} has not returned"
        " 0.2 s after the end (test_base.py:"
    )
    assert closed.is_set()
    gate.set()
