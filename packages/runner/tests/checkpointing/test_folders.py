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
    directory = epath.Path(tmp_path)
    for name in (
        "checkpoint_00000020",
        "checkpoint_00000003",
        "checkpoint_00000030.orbax-checkpoint-tmp",
        "checkpoint_00000031.orbax-checkpoint-tmp-1700000000",
        "damaged_checkpoint_00000025",
        "checkpoint_7",
        "notes",
    ):
        (directory / name).mkdir()
    assert folders.committed_steps(directory) == [3, 20]
    assert [path.name for path in folders.unfinished(directory)] == [
        "checkpoint_00000030.orbax-checkpoint-tmp",
        "checkpoint_00000031.orbax-checkpoint-tmp-1700000000",
    ]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    directory = epath.Path(tmp_path) / "none"
    assert folders.committed_steps(directory) == []
    assert folders.unfinished(directory) == []


def test_moving_aside_never_overwrites(tmp_path):
    names = []
    for content in ("first", "second", "third"):
        folder = folders.step_folder(epath.Path(tmp_path), 42)
        folder.mkdir()
        (folder / "file").write_text(content)
        names.append(folders.move_aside(folder).name)
    assert names == [
        "damaged_checkpoint_00000042",
        "damaged_checkpoint_00000042_2",
        "damaged_checkpoint_00000042_3",
    ]
    assert [(tmp_path / name / "file").read_text() for name in names] == [
        "first",
        "second",
        "third",
    ]
