"""Runs of wandb in its offline mode, read from its files, and of trackio, from its database."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

from layerkit_runner import UsageError
from layerkit_runner.observers import Histogram
from layerkit_runner.observers.trackers import Tracker, Trackio, WeightsAndBiases


@pytest.mark.parametrize("tracker", [WeightsAndBiases, Trackio])
def test_missing_library_raises(raises: Any, monkeypatch: pytest.MonkeyPatch, tracker: Any):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(UsageError, field=f"--{tracker.library}_project", value="toy"):
        tracker("toy", report=print)


@pytest.mark.parametrize("netrc", ["", "machine api.wandb.ai login user password 0123"])
def test_missing_key_raises_before_the_run(
    raises: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, netrc: str
):
    pytest.importorskip("wandb").teardown()
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text(netrc)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    if netrc:
        WeightsAndBiases("toy", report=print)
        return
    with raises(UsageError, field="--wandb_project", value="toy"):
        WeightsAndBiases("toy", report=print)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it reads its environment once
    monkeypatch.setenv("WANDB_MODE", "offline")


def records(folder: Path) -> list[Any]:
    """Return the records that the only run in this folder would send.

    The file is a LevelDB log: blocks of 32768 bytes with parts of records, each after its checksum
    (4 bytes), length (2) and kind (1: whole, 2: first, 3: middle, 4: last).
    """
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service writes in the background
    (path,) = folder.glob("*.wandb")
    content = path.read_bytes()
    position, parts, result = 7, b"", []
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # no room for a head: the rest of the block is empty
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            result.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return result


def history(result: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for record in result:
        if record.HasField("history"):
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    return rows


def record(board: Tracker, info: Any) -> None:
    """Report one step of a run."""
    step = info.start_step + 1
    board.start(info)
    board.train_metrics(step, {"loss": 2.5})
    board.eval_metrics(step, "held_out", {"loss": 3.0})
    board.eval_metrics(step, "decode/prompts", {"bleu": 0.5})
    spread = Histogram(np.array([0.0, 1.0, 3.0]), np.array([1.0, 2.0]), 5.0, 9.0)
    board.histograms(step, {"vars/w": spread})
    board.text(step, "prompts", "<a>")
    board.images(step, {"map": np.zeros((2, 2, 3), np.uint8)})
    board.close()


CONFIG = {"config": {"task.train.random_seed": 7}}


def test_trackio_continues_the_run_of_a_resumed_job(
    run_info: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at the import
    trackio = pytest.importorskip("trackio")
    job = epath.Path(tmp_path) / "job"
    job.mkdir()
    for start_step, mode in enumerate(("train", "lm_eval")):
        info = run_info(job_log_dir=job, start_step=start_step, mode=mode, config=CONFIG)
        record(Trackio("toy", report=print), info)
    (run,) = trackio.Api().runs("toy")
    assert run.name == f"job-{(job / 'trackio_run_id.txt').read_text().strip()}"
    assert run.config["task.train.random_seed"] == 7 and run.config["num_params"] == 10
    rows = trackio.SQLiteStorage.get_logs("toy", run.name)
    assert [row.pop("step") for row in rows if row.pop("timestamp")] == [1] * 6 + [2] * 6
    for first in (0, 6):
        assert rows[first : first + 3] == [
            {"train/loss": 2.5},
            {"eval/held_out/loss": 3.0},
            {"decode/prompts/bleu": 0.5},
        ]
        spread, page, image = rows[first + 3 : first + 6]
        assert spread["vars/w/norm"] == 3 and spread["vars/w"]["values"] == [1, 2]
        media = tmp_path / "trackio" / "media"
        html = media / page["decode/prompts/sample"]["file_path"]
        assert "<pre>&lt;a&gt;</pre>" in html.read_text()
        assert (media / image["train/map"]["file_path"]).stat().st_size


@pytest.mark.usefixtures("offline")
def test_resumed_job_continues_the_same_run(run_info: Any, tmp_path: Path):
    for start_step, mode in enumerate(("train", "lm_eval")):
        info = run_info(job_log_dir=epath.Path(tmp_path), start_step=start_step, mode=mode)
        board = WeightsAndBiases("toy", report=[].append)
        record(board, dataclasses.replace(info, config=CONFIG))
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb_run_id.txt").read_text().strip()
    starts = []
    for number, folder in enumerate(runs, start=1):
        result = records(folder)
        (run,) = [record.run for record in result if record.HasField("run")]
        starts.append((run.run_id, run.project, run.display_name))
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["task.train.random_seed"] == 7
        rows = history(result)
        assert rows[:3] == [
            {"step": number, "train/loss": 2.5},
            {"step": number, "eval/held_out/loss": 3.0},
            {"step": number, "decode/prompts/bleu": 0.5},
        ]
        assert rows[3]["vars/w/norm"] == 3
        assert rows[3]["vars/w.values"] == [1, 2]
        assert rows[3]["vars/w.bins"] == [0, 1, 3]
        (html,) = folder.glob("files/media/html/decode/prompts/*.html")
        assert "<pre>&lt;a&gt;</pre>" in html.read_text()
    assert starts == [(run_id, "toy", tmp_path.name)] * 2
