"""What counts as a checkpoint, from names alone."""

from __future__ import annotations

import pytest
from etils import epath

from layerkit_runner.checkpointing import folders


@pytest.mark.parametrize(
    ("step", "name"), [(0, "00000000"), (42, "00000042"), (10**9, "10" + 8 * "0")]
)
def test_folder_of_a_step_is_found(tmp_path, step, name):
    folder = folders.step_folder(epath.Path(tmp_path), step)
    assert folder.name == f"checkpoint_{name}"
    folder.mkdir()
    assert folders.committed_steps(epath.Path(tmp_path)) == [step]


def test_steps_and_leftovers_are_distinguished(tmp_path):
    directory = epath.Path(tmp_path) / "checkpoints"
    assert folders.committed_steps(directory) == folders.unfinished(directory) == []
    for name in (
        "checkpoint_00000020",
        "checkpoint_00000003",
        "checkpoint_00000030.orbax-checkpoint-tmp",
        "checkpoint_00000031.orbax-checkpoint-tmp-1700000000",
        "damaged_checkpoint_00000025",
        "checkpoint_7",
        "notes",
    ):
        (directory / name).mkdir(parents=True)
    assert folders.committed_steps(directory) == [3, 20]
    assert [path.name for path in folders.unfinished(directory)] == [
        "checkpoint_00000030.orbax-checkpoint-tmp",
        "checkpoint_00000031.orbax-checkpoint-tmp-1700000000",
    ]


@pytest.mark.parametrize("job", ["job", "checkpoints"])
def test_checkpoints_are_found_by_their_folder_and_by_that_of_their_job(tmp_path, job):
    place = epath.Path(tmp_path) / job / "checkpoints"
    assert folders.checkpoints_folder(place) == place  # not made yet
    (place / "checkpoint_00000020").mkdir(parents=True)
    assert folders.checkpoints_folder(place) == folders.checkpoints_folder(place.parent) == place


def test_moving_aside_never_overwrites(tmp_path):
    for suffix in ("", "_2", "_3"):
        folder = folders.step_folder(epath.Path(tmp_path), 42)
        folder.mkdir()
        (folder / "file").write_text(suffix)
        assert folders.move_aside(folder).name == f"damaged_checkpoint_00000042{suffix}"
    for suffix in ("", "_2", "_3"):
        assert (tmp_path / f"damaged_checkpoint_00000042{suffix}/file").read_text() == suffix
