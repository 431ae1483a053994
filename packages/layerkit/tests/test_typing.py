"""`SomeClass.HParams.config(…)` has the fields of the class to type checkers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parent / "typing_samples"
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


@pytest.fixture(scope="module")
def mypy_errors():
    """Return the codes of mypy's errors in each sample, by line."""
    pytest.importorskip("mypy")
    options = ["--config-file", str(PYPROJECT), "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, *map(str, SAMPLES.glob("*.py"))]
    output = subprocess.run(command, cwd=PYPROJECT.parent, capture_output=True, text=True).stdout
    errors: dict[str, dict[int, str]] = {"right.py": {}, "wrong.py": {}}
    for file, line, code in re.findall(r"(\w+\.py):(\d+): error: .*(\[[\w-]+\])$", output, re.M):
        errors[file][int(line)] = code
    assert "Found" in output or "Success" in output, output
    return errors


def test_mypy_accepts_right_configs(mypy_errors):
    assert mypy_errors["right.py"] == {}


def test_mypy_reports_unknown_fields_and_values_of_other_types(mypy_errors):
    lines = enumerate((SAMPLES / "wrong.py").read_text().splitlines(), 1)
    expected = {number: line.partition("  # ")[2] for number, line in lines if "  # [" in line}
    assert mypy_errors["wrong.py"] == expected
