"""The record of evaluations: what is written comes back, and a damaged one is named."""

from __future__ import annotations

import math

import pytest
from etils import epath

from layerkit_runner.checkpointing import CheckpointManager, documents


def test_numbers_come_back_and_what_is_no_number_does_not(tmp_path):
    directory = epath.Path(tmp_path)
    assert documents.read_evaluations(directory) == {}
    documents.write_evaluations(
        directory, {20: {"a/loss": 0.1, "a/score": math.nan}, 3: {"a/loss": 1e300}}
    )
    assert documents.read_evaluations(directory) == {3: {"a/loss": 1e300}, 20: {"a/loss": 0.1}}
    documents.write_evaluations(directory, {4: {"b c/loss": -math.inf}})
    assert documents.read_evaluations(directory) == {4: {"b c/loss": -math.inf}}


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 1, "evaluations": {"a": {}}}', '{"version": 2}', "[]"]
)
def test_a_damaged_record_is_named_by_those_who_would_delete_by_it(tmp_path, text):
    (tmp_path / "evaluations.json").write_text(text)
    with pytest.raises(ValueError, match=r"evaluations\.json cannot be read .* Delete it to go on"):
        CheckpointManager(tmp_path)
    CheckpointManager(tmp_path, read_only=True)
