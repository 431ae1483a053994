"""Fixture that hides the data folders of this machine from the tests of experiments."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VOCAB_PATH", "TFDS_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
