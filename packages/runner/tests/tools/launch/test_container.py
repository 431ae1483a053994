"""The container recipe names files and extras that exist; Docker is not needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]
RECIPE = ROOT / "docs/launch/Dockerfile"

pytestmark = pytest.mark.skipif(not RECIPE.exists(), reason="needs the whole repository")


def test_copied_files_and_built_packages_exist():
    text = RECIPE.read_text()
    copied = re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE)
    built = re.findall(r"\./(packages/\w+)", text)
    assert copied == ["packages", "constraints.txt"]
    assert {ROOT / folder for folder in built} == {
        path.parent for path in ROOT.glob("packages/*/pyproject.toml")
    }
    allowed = (RECIPE.parent / "Dockerfile.dockerignore").read_text()
    assert all(f"!{source}\n" in allowed for source in copied)


def test_extras_are_those_of_the_packages():
    extras = {
        name: set(tomllib.loads(path.read_text())["project"].get("optional-dependencies", {}))
        for name in ("runner", "inputs")
        for path in [ROOT / f"packages/{name}/pyproject.toml"]
    }
    page = (RECIPE.parent / "container.md").read_text()
    devices = re.search(r"\| `DEVICES` \| `(\w+)`, `(\w+)` or `cpu`", page)
    inputs = re.search(r"^ARG INPUTS=(\S+)$", RECIPE.read_text(), re.MULTILINE)
    assert devices is not None and set(devices.groups()) <= extras["runner"]
    assert inputs is not None and set(inputs[1].split(",")) <= extras["inputs"]


def test_base_images_name_no_registry():
    images = re.findall(r"^FROM (\S+)", RECIPE.read_text(), re.MULTILINE)
    assert images == ["python:3.12-slim", "python:3.12-slim"]
