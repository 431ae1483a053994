"""The record of evaluations."""

from __future__ import annotations

import math

import pytest
from etils import epath

from layerkit.errors import ConfigError
from layerkit_runner.checkpointing import CheckpointManager
from layerkit_runner.checkpointing.policy import read_evaluations, write_evaluations


def test_evaluations_are_read_as_written_without_nan(tmp_path):
    directory = epath.Path(tmp_path)
    assert read_evaluations(directory) == {}
    write_evaluations(directory, {20: {"a/loss": 0.1, "a/score": math.nan}, 3: {"a/loss": 1e300}})
    assert read_evaluations(directory) == {3: {"a/loss": 1e300}, 20: {"a/loss": 0.1}}
    write_evaluations(directory, {4: {"b c/loss": -math.inf}})
    assert read_evaluations(directory) == {4: {"b c/loss": -math.inf}}


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 1, "evaluations": {"a": {}}}', '{"version": 2}', "[]"]
)
def test_malformed_evaluations_are_an_error_unless_read_only(raises, tmp_path, text):
    (tmp_path / "evaluations.json").write_text(text)
    with raises(ConfigError, owner=str(tmp_path / "evaluations.json")):
        CheckpointManager(tmp_path)
    CheckpointManager(tmp_path, read_only=True)
