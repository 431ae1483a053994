"""Steps that the job folder records and that are gone, as in a partial copy of the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy
from layerkit_runner.run.job_folder import record_checkpoint

EVERY_STEP = CheckpointPolicy(save_interval_steps=1, max_to_keep=None, keep_interval=None)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = tmp_path_factory.mktemp("original")
    with CheckpointManager(
        job / "checkpoints", policy=EVERY_STEP, on_commit=lambda step: record_checkpoint(job, step)
    ) as manager:
        for step in (2, 4, 6):
            manager.save(step, {"w": jnp.ones(8)}, input_states={}, metadata={})
    return job


def newest(job: Path, *, read_only: bool) -> tuple[int | None, list[str]]:
    lines: list[str] = []
    folder = job / "checkpoints"
    with CheckpointManager(folder, read_only=read_only, report=lines.append) as manager:
        return manager.newest_sound_step(), lines


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(("removed", "used", "lost"), [((), 6, 0), ((6,), 4, 2), ((4, 6), 2, 4)])
def test_missing_newest_step_is_named_with_the_step_used_instead(
    original: Path, tmp_path: Path, removed: tuple[int, ...], used: int, lost: int, read_only: bool
):
    job = shutil.copytree(original, tmp_path / "job")
    for step in removed:
        shutil.rmtree(job / "checkpoints" / f"checkpoint_{step:08d}")
    step, lines = newest(job, read_only=read_only)
    assert step == used
    if not removed:
        assert lines == []
        return
    (line,) = lines
    assert line == (
        f"CHECKPOINT MISSING: {job}/last_checkpoint.json records step 6, but there is no"
        f" {job}/checkpoints/checkpoint_00000006.\n"
        f"  Step {used} is used instead; work lost: {lost} steps."
    )


@pytest.mark.parametrize("record", [{"step": 2}, {"step": "6"}, {}])
def test_record_that_is_older_or_damaged_is_no_loss(original: Path, tmp_path: Path, record: dict):
    job = shutil.copytree(original, tmp_path / "job")
    (job / "last_checkpoint.json").write_text(json.dumps(record))
    assert newest(job, read_only=True) == (6, [])
