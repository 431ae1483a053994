"""Files whose content cannot be used, though the manifest matches, and pipes in their place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy, StateFormat
from layerkit_runner.checkpointing.errors import DamagedCheckpointError
from layerkit_runner.checkpointing.integrity import _digest, write

EVERY_STEP = CheckpointPolicy(save_interval_steps=1, max_to_keep=None, keep_interval=None)
METADATA = "metadata/metadata.json"
INPUTS = "input_states/process_00000_of_00001.json"


@pytest.fixture(scope="module", params=list(StateFormat), ids=lambda f: f.value)
def original(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.value)
    with CheckpointManager(folder, policy=EVERY_STEP, state_format=request.param) as manager:
        for step in (1, 2):
            states = {"train": {"scope": "global", "position": step}}
            manager.save(step, {"w": jnp.ones(8)}, input_states=states, metadata={"note": 1})
    return folder


def restore(folder: Path, lines: list[str]) -> int:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}
    with CheckpointManager(folder, policy=EVERY_STEP, report=lines.append) as manager:
        result = manager.restore_newest(target)
    assert result is not None
    return result.step


def files_of(step: Path) -> list[str]:
    return sorted(str(p.relative_to(step)) for p in step.rglob("*") if p.is_file())


def test_pipe_in_place_of_any_file_is_damage_of_the_step(original: Path, tmp_path: Path):
    for name in files_of(original / "checkpoint_00000002"):
        folder = shutil.copytree(original, tmp_path / name.replace("/", "_"))
        step = folder / "checkpoint_00000002"
        (step / name).unlink()
        os.mkfifo(step / name)
        lines: list[str] = []
        assert restore(folder, lines) == 1
        assert f"{name}: unreadable, it is a named pipe, expected a regular file" in lines[0]


def test_pipe_in_an_older_step_does_not_block_the_next_save(original: Path, tmp_path: Path):
    folder = shutil.copytree(original, tmp_path / "job")
    (folder / "checkpoint_00000001/_CHECKPOINT_METADATA").unlink()
    os.mkfifo(folder / "checkpoint_00000001/_CHECKPOINT_METADATA")
    lines: list[str] = []
    with CheckpointManager(folder, policy=EVERY_STEP, report=lines.append) as manager:
        assert manager.newest_sound_step() == 2
        assert manager.save(3, {"w": jnp.ones(8)}, input_states={}, metadata={})
    assert "_CHECKPOINT_METADATA: unreadable, it is a named pipe" in lines[0]
    assert sorted(path.name for path in folder.iterdir()) == [
        *("checkpoint_00000002", "checkpoint_00000003", "damaged_checkpoint_00000001")
    ]


def contents_of(path: Path) -> list[bytes]:
    return [b"", path.read_bytes()[:20], b"\x00\xff" * 40, b"[]", b'{"a": 1}', b"null", b"3"]


def test_content_that_cannot_be_used_is_an_error_that_names_the_file(
    original: Path, tmp_path: Path
):
    manifest = (original / "checkpoint_00000002/state/manifest.ocdbt").exists()
    of_state = ["state/_METADATA", "state/manifest.ocdbt"] if manifest else ["state/state.msgpack"]
    for name in (METADATA, INPUTS, *of_state):
        contents = contents_of(original / "checkpoint_00000002" / name)
        for content in contents if name == METADATA else contents[:3]:
            folder = shutil.copytree(original, tmp_path / "job", dirs_exist_ok=True)
            step = folder / "checkpoint_00000002"
            (step / name).write_bytes(content)
            write(epath.Path(step))
            with pytest.raises(DamagedCheckpointError) as caught:
                restore(folder, [])
            # TensorStore's text names its file.
            expected = "state" if name == "state/manifest.ocdbt" else name
            assert caught.value.owner == str(step / expected)
            shutil.rmtree(folder)


@pytest.mark.parametrize("value", [None, "1", {"a": {}}, {"a": {"size": "1"}}])
def test_manifest_of_another_structure_is_damage(original: Path, tmp_path: Path, value: Any):
    folder = shutil.copytree(original, tmp_path / "job")
    path = folder / "checkpoint_00000002/integrity/manifest.json"
    body = {"version": 2, "step": 2, "files": value}
    path.write_text(json.dumps({"digest": _digest(body), "manifest": body}))
    lines: list[str] = []
    assert restore(folder, lines) == 1
    assert "integrity/manifest.json: altered" in lines[0]
