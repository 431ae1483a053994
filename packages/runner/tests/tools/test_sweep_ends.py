"""When a sweep ends: after all trials, or because the first three failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from layerkit_runner.tools.sweep import read_study_file

SPACE = {"RATE": {"choices": [0.1, 0.2, 0.3, 0.4, 0.5]}, "LAYERS": {"choices": [1, 2, 3, 4, 5]}}


@pytest.mark.parametrize(
    ("in_file", "in_command", "number"),
    [(None, None, 25), (20, None, 20), (None, 3, 3), (20, 24, 24), (99, None, 25)],
)
def test_grid_has_every_combination_unless_a_number_is_set(
    tmp_path: Path, in_file: int | None, in_command: int | None, number: int
):
    document = {"metric": "heldout/loss", "sampler": "grid", "space": SPACE}
    if in_file is not None:
        document["num_trials"] = in_file
    path = tmp_path / "study.json"
    path.write_text(json.dumps(document))
    assert read_study_file(str(path), num_trials=in_command).num_trials == number
