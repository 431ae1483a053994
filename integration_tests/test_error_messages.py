"""The page of error messages holds sections of tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_recorded_messages_belong_to_existing_tests():
    page = (ROOT / "integration_tests/error_messages.md").read_text()
    headings = re.findall(r"^## (\S+?)::(\w+)", page, re.MULTILINE)
    assert headings
    for path, function in headings:
        assert f"def {function}(" in (ROOT / path).read_text(), (path, function)
