"""Every recorded error message belongs to a test that still exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDS = sorted(ROOT.glob("packages/*/tests/error_messages.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parents[1].name)
def test_recorded_messages_belong_to_existing_tests(record: Path):
    for key in json.loads(record.read_text()):
        path, _, name = key.partition("::")
        function = name.split("[")[0].split(" #")[0]
        source = record.parent / path
        assert source.is_file(), key
        assert f"def {function}(" in source.read_text(), key
