"""Output, files and errors of the tool for checkpoints."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file

from layerkit_runner.checkpointing import (
    CheckpointManager,
    CheckpointPolicy,
    StateFormat,
    conversion,
    folders,
    stored_state,
)
from layerkit_runner.checkpointing.policy import read_evaluations
from layerkit_runner.tools import checkpoints

STATE = {
    "params": {
        "embed": np.arange(24, dtype=np.float32).reshape(4, 6),
        "scale": np.arange(6).astype(jnp.bfloat16),
    },
    "opt_state": {"0": {"mu": np.full((4, 6), 0.5, np.float32)}},
    "step": np.int32(20),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job with steps 10 and 20; step 10 is the best."""
    folder = tmp_path_factory.mktemp("job")
    policy = CheckpointPolicy(
        save_interval_steps=10,
        max_to_keep=1,
        keep_interval=datetime.timedelta(hours=12),
        keep_steps=(5,),
        best_metric="heldout/loss",
    )
    with CheckpointManager(folder / "checkpoints", policy=policy) as manager:
        for step, loss in ((10, 1.5), (20, 2.5)):
            result = {"heldout/accuracy": 0.5, "heldout/loss": loss}
            manager.record_evaluation(step, result)
            state = jax.tree.map(jnp.asarray, STATE)
            manager.save(step, state, input_states={"train": {"at": step}}, metadata={"by": "me"})
    return folder


@pytest.fixture
def job(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "job"))


def run(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Return the output and the errors of the tool."""
    assert checkpoints.main([str(word) for word in words]) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def damage(job: Path, step: int) -> Path:
    """Flip a bit of the largest file of a step; return its path."""
    files = (job / f"checkpoints/checkpoint_{step:08d}/state").rglob("*")
    path = max((file for file in files if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def restored(folder: Path, step: int):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), STATE
    )
    with CheckpointManager(folder / "checkpoints", read_only=True) as manager:
        return manager.restore(step, target)


def assert_is_step(folder: Path, step: int) -> None:
    result = restored(folder, step)
    for ours, expected in zip(jax.tree.leaves(result.state), jax.tree.leaves(STATE), strict=True):
        assert ours.dtype == expected.dtype
        assert np.asarray(ours).tobytes() == expected.tobytes()
    assert result.input_states == {"train": {"at": step}}
    assert result.metadata == {"by": "me"}


@pytest.mark.parametrize("folder", [".", "checkpoints"])
def test_list_prints_the_steps_and_why_they_are_kept(written, capsys, folder):
    lines = run(capsys, "list", written / folder).splitlines()
    heads = ["step", "saved (UTC)", "size", "format", "intact", "metric", "kept as"]
    assert re.split(r" {2,}", lines[0]) == heads
    rows = [re.split(r" {2,}", line) for line in lines[1:3]]
    today = datetime.datetime.now(datetime.UTC)
    for row in rows:
        saved = datetime.datetime.fromisoformat(f"{row[1]}+00:00")
        assert abs(today - saved) < datetime.timedelta(hours=1)
        assert row[2].endswith(" kB")
    assert [[row[0], *row[3:]] for row in rows] == [
        ["10", "tensorstore", "yes", "heldout/loss 1.5", "best heldout/loss, one per 12:00:00"],
        ["20", "tensorstore", "yes", "heldout/loss 2.5", "newest"],
    ]
    assert lines[3] == "intact: by the sizes of the files; --read or verify compares their bytes"


def test_list_detects_altered_bytes_with_read_and_wrong_sizes_always(job, capsys):
    flipped = damage(job, 10)
    (job / "checkpoints" / "checkpoint_00000030.orbax-checkpoint-tmp").mkdir()
    (job / "checkpoints" / "damaged_checkpoint_00000005").mkdir()
    quick = run(capsys, "list", job)
    assert "NO" not in quick
    assert "not a checkpoint: checkpoint_00000030.orbax-checkpoint-tmp\n" in quick
    assert "not a checkpoint: damaged_checkpoint_00000005\n" in quick
    name = flipped.relative_to(job / "checkpoints" / "checkpoint_00000010")
    deep = run(capsys, "list", job, "--read", code=1)
    assert "NO, 1 file(s)" in deep
    assert f"step 10: {name}: altered, expected" in deep
    flipped.write_bytes(flipped.read_bytes()[:-1])
    assert f"step 10: {name}: short, expected" in run(capsys, "list", job, code=1)


@pytest.mark.parametrize("state_format", list(StateFormat))
def test_verify_names_arrays_that_are_not_finite(tmp_path, capsys, monkeypatch, state_format):
    monkeypatch.setattr(conversion, "_READ_BYTES", 16)
    state = {"params": {"a": jnp.ones(4), "b": jnp.array([1.0, jnp.nan])}, "step": jnp.int32(3)}
    with monkeypatch.context() as patch:
        # An earlier version saved any values.
        patch.setattr(stored_state.FiniteCheck, "nonfinite", lambda _: [])
        with CheckpointManager(tmp_path / "checkpoints", state_format=state_format) as manager:
            manager.save(3, state, input_states={}, metadata={}, force=True)
    printed = run(capsys, "verify", tmp_path, code=1)
    assert printed.startswith("step 3: NOT FINITE\n")
    assert "params/b" in printed and "params/a" not in printed


def test_verify_reads_all_steps_or_one(job, capsys):
    assert run(capsys, "verify", job) == "step 10: intact\nstep 20: intact\n"
    damage(job, 10)
    both = run(capsys, "verify", job, code=1)
    assert both.startswith("step 10: DAMAGED\n  state/")
    assert both.endswith("\nstep 20: intact\n")
    assert run(capsys, "verify", job, "--step=20") == "step 20: intact\n"


def test_show_prints_the_arrays_of_the_newest_step(written, capsys):
    lines = run(capsys, "show", written).splitlines()
    assert [re.split(r" {2,}", line) for line in lines[1:-1]] == [
        ["opt_state/0/mu", "4 × 6", "float32", "96"],
        ["params/embed", "4 × 6", "float32", "96"],
        ["params/scale", "6", "bfloat16", "12"],
        ["step", "scalar", "int32", "4"],
    ]
    assert lines[-1] == "step 20: 4 arrays, 208 B (opt_state 96 B, params 108 B, step 4 B)"


def test_folder_that_other_programs_copied_is_intact_and_can_be_resumed(written, tmp_path, capsys):
    new = Path(shutil.copytree(written, tmp_path / "new"))
    assert run(capsys, "verify", new) == "step 10: intact\nstep 20: intact\n"
    assert_is_step(new, 10)
    assert read_evaluations(epath.Path(new / "checkpoints"))[10]["heldout/loss"] == 1.5
    with CheckpointManager(new / "checkpoints") as manager:
        assert manager.newest_sound_step() == 20
        manager.save(21, {"w": jnp.ones(2)}, input_states={}, metadata={}, force=True)
    assert folders.committed_steps(epath.Path(new / "checkpoints")) == [10, 20, 21]


@pytest.mark.parametrize("name", ["_sharding", "_METADATA", "manifest.ocdbt"])
def test_show_of_a_damaged_step_names_the_file(job, capsys, name):
    path = job / "checkpoints" / "checkpoint_00000020" / "state" / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    text = run(capsys, "show", job, code=1)
    assert text.startswith(f"checkpoints: The checkpoint {path.parent.parent} is damaged:\n")
    assert f"  state/{name}: altered, expected" in text
    assert run(capsys, "show", job, "--step=10").endswith("step 4 B)\n")


def test_convert_writes_weights_as_safetensors(written, tmp_path, capsys):
    path = tmp_path / "weights.safetensors"
    assert run(capsys, "convert", written, path, "--to=safetensors") == (
        f"{path}: 2 arrays of step 20\n"
    )
    arrays = load_file(path)
    assert arrays.keys() == {"params/embed", "params/scale"}
    for name, array in arrays.items():
        expected = STATE["params"][name.removeprefix("params/")]
        assert array.dtype == expected.dtype
        assert array.tobytes() == expected.tobytes()
    assert "already exists" in run(capsys, "convert", written, path, "--to=safetensors", code=2)
    other = tmp_path / "other.safetensors"
    words = ("convert", written, other, "--to=safetensors", "--part=optstate")
    assert "'opt_state'" in run(capsys, *words, code=2)


@pytest.mark.parametrize("command", ["list", "verify", "show"])
def test_folder_without_checkpoints_is_an_error(tmp_path, capsys, command):
    assert f"{tmp_path}/checkpoints: " in run(capsys, command, tmp_path, code=2)


def test_list_of_a_later_layout_names_its_version(job, capsys):
    path = job / "checkpoints/checkpoint_00000020/metadata/metadata.json"
    path.write_text(path.read_text().replace('"layout_version": 1', '"layout_version": 9'))
    assert "layout_version=9. Expected at most 1." in run(capsys, "list", job, code=2)


def test_missing_step_is_an_error(written, capsys):
    text = run(capsys, "verify", written, "--step=15", code=2)
    assert "--step=15" in text and "10, 20" in text


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ([], "list, verify, show, convert"),
        (["lst", "job"], "'list'"),
        (["list"], "Expected DIR"),
        (["show", "job", "--step=-1"], "--step='-1'"),
        (["list", "job", "--red"], "'--read'"),
        (["convert", "job", "new"], "--to"),
        (["convert", "job", "--to=safetensors"], "Expected DIR and DEST"),
        (["convert", "job", "new", "--to=zip"], "safetensors"),
    ],
)
def test_wrong_command_line_exits_with_2(capsys, words, fact):
    assert fact in run(capsys, *words, code=2)
