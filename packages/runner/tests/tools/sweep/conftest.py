"""The fixture of a study file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from layerkit_runner.tools.sweep.study_file import StudyFile, read_study_file


@pytest.fixture
def study_file(tmp_path: Path) -> Callable[..., StudyFile]:
    """Return a function that writes and reads a study file, by default of the field RATE."""

    def make(**document: Any) -> StudyFile:
        path = tmp_path / "study.json"
        space = {"RATE": {"low": 0.1, "high": 1.0}}
        path.write_text(json.dumps({"metric": "heldout/loss", "space": space, **document}))
        return read_study_file(str(path))

    return make
