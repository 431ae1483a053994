"""Runs of wandb in its offline mode, read from its files."""

from __future__ import annotations

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
from layerkit_runner.observers.weights_and_biases import WeightsAndBiases


def test_missing_wandb_raises(raises: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(UsageError, field="--wandb_project", value="toy"):
        WeightsAndBiases("toy", config={}, report=print)


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
        WeightsAndBiases("toy", config={}, report=print)
        return
    with raises(UsageError, field="--wandb_project", value="toy"):
        WeightsAndBiases("toy", config={}, report=print)


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
    position, parts, found = 7, b"", []
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # no room for a head: the rest of the block is empty
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def history(found: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for record in found:
        if record.HasField("history"):
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    return rows


@pytest.mark.usefixtures("offline")
def test_resumed_job_continues_the_same_run(run_info: Any, tmp_path: Path):
    for start_step, mode in enumerate(("train", "lm_eval")):
        config = {"task.train.random_seed": 7}
        board = WeightsAndBiases("toy", config=config, report=[].append)
        board.start(run_info(job_log_dir=epath.Path(tmp_path), start_step=start_step, mode=mode))
        board.train_metrics(start_step + 1, {"loss": 2.5})
        board.eval_metrics(start_step + 1, "held_out", {"loss": 3.0})
        board.eval_metrics(start_step + 1, "decode/prompts", {"bleu": 0.5})
        spread = Histogram(np.array([0.0, 1.0, 3.0]), np.array([1.0, 2.0]), 5.0, 9.0)
        board.histograms(start_step + 1, {"vars/w": spread})
        board.text(start_step + 1, "prompts", "<a>")
        board.close()
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb_run_id.txt").read_text().strip()
    starts = []
    for number, folder in enumerate(runs, start=1):
        found = records(folder)
        (run,) = [record.run for record in found if record.HasField("run")]
        starts.append((run.run_id, run.project, run.display_name))
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["task.train.random_seed"] == 7
        rows = history(found)
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
