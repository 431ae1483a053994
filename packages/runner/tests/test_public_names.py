"""Public names of the package, which are imported when first used."""

from __future__ import annotations

import pytest

import layerkit_runner


@pytest.mark.parametrize("name", layerkit_runner.__all__)
def test_public_name_can_be_imported(name: str):
    assert getattr(layerkit_runner, name).__name__ == name
