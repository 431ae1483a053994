"""Which step is new to a follower: folders come, go and are written anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from etils import epath

from layerkit_runner.run.checkpoint_watcher import CheckpointWatcher


def save(folder: Path, step: int, digest: str = "first") -> None:
    """What tells a step from others: its name, and the digest in its manifest."""
    integrity = folder / f"checkpoint_{step:08d}" / "integrity"
    integrity.mkdir(parents=True)
    (integrity / "manifest.json").write_text(json.dumps({"digest": digest, "manifest": {}}))


def test_each_newest_step_is_reported_once(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    watcher = CheckpointWatcher(epath.Path(folder))
    assert watcher.poll_newest() is None  # there is not even a folder
    save(folder, 100)
    assert watcher.poll_newest() == (100, [])
    assert watcher.poll_newest() is None
    (folder / "checkpoint_00000200.orbax-checkpoint-tmp").mkdir()
    assert watcher.poll_newest() is None
    save(folder, 200)
    save(folder, 300)
    shutil.rmtree(folder / "checkpoint_00000100")
    save(folder, 400)
    assert watcher.poll_newest() == (400, [200, 300])
    shutil.rmtree(folder / "checkpoint_00000200")
    assert watcher.poll_newest() is None


def test_a_step_that_was_saved_anew_is_another(tmp_path: Path):
    save(tmp_path, 100)
    save(tmp_path, 200)
    watcher = CheckpointWatcher(epath.Path(tmp_path))
    assert watcher.poll_newest() == (200, [100])
    shutil.rmtree(tmp_path / "checkpoint_00000200")
    save(tmp_path, 200, digest="second")
    assert watcher.poll_newest() == (200, [])
    shutil.rmtree(tmp_path / "checkpoint_00000200")
    assert watcher.poll_newest() == (100, [])
    save(tmp_path, 150)
    assert watcher.poll_newest() == (150, [])
