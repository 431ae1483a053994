from __future__ import annotations

import collections
import math
import struct

from etils import epath

from layerkit_runner.observers import Observers, Progress, TensorBoard


def events(folder):
    """Reads event files by their record format: u64 length, u32 crc, payload, u32 crc."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        position = 0
        while position < len(content):
            (length,) = struct.unpack_from("<Q", content, position)
            found.append(
                event_pb2.Event.FromString(content[position + 12 : position + 12 + length])
            )
            position += 12 + length + 4
    return found


def scalars(folder):
    series = collections.defaultdict(list)
    for event in events(folder):
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                series[value.tag].append((event.step, value.simple_value))
    return dict(series)


def test_scalars_go_to_the_folder_of_their_kind(run_info, tmp_path):
    board = TensorBoard()
    board.start(run_info(job_log_dir=epath.Path(tmp_path)))
    board.train_metrics(1, {"loss": 2.5, "learning/lr": 0.25})
    board.train_metrics(2, {"loss": math.inf, "learning/lr": 0.5})
    board.eval_metrics(2, "train", {"loss": 3.0})
    board.eval_metrics(2, "c4/en", {"loss": 4.0})
    board.close()
    summaries = tmp_path / "summaries"
    assert scalars(summaries / "train") == {
        "loss": [(1, 2.5), (2, math.inf)],
        "learning/lr": [(1, 0.25), (2, 0.5)],
    }
    assert scalars(summaries / "eval_train") == {"loss": [(2, 3.0)]}
    assert scalars(summaries / "eval_test_c4_en") == {"loss": [(2, 4.0)]}
    assert len(list(summaries.iterdir())) == 3


def test_texts_are_kept_as_they_are(run_info, tmp_path):
    board = TensorBoard()
    board.start(run_info(job_log_dir=epath.Path(tmp_path)))
    board.text(5, "sample", "def f():\n    return *x*")
    board.close()
    (value,) = [
        value for event in events(tmp_path / "summaries" / "train") for value in event.summary.value
    ]
    assert value.metadata.plugin_data.plugin_name == "text"
    assert value.tensor.string_val[0].decode() == "    def f():\n        return *x*"


def test_a_resumed_run_hides_the_steps_it_does_anew(run_info, tmp_path):
    board = TensorBoard()
    board.start(run_info(job_log_dir=epath.Path(tmp_path), start_step=40))
    board.train_metrics(41, {"loss": 1.0})
    board.close()
    session_starts = [
        event.step
        for event in events(tmp_path / "summaries" / "train")
        if event.WhichOneof("what") == "session_log"
    ]
    assert session_starts == [41]  # TensorBoard drops events of this step and later ones


def test_without_a_folder_nothing_is_written(run_info, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    board = TensorBoard()
    board.start(run_info())
    board.train_metrics(1, {"loss": 1.0})
    board.text(1, "sample", "x")
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_refuses_is_told_once_and_the_run_goes_on(run_info, tmp_path, capsys):
    (tmp_path / "summaries").write_text("a file where a folder should be")
    observers = Observers([Progress(), TensorBoard()])
    observers.start(run_info(job_log_dir=epath.Path(tmp_path)))
    observers.train_metrics(1, {"loss": 1.0})
    observers.close()
    told = [line for line in capsys.readouterr().out.splitlines() if "TensorBoard failed" in line]
    assert len(told) == 1
    assert "NotADirectoryError" in told[0]
