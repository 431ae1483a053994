"""A folder of small images."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit_inputs.testing.image_files import write_image_folder


@pytest.fixture
def noise():
    random = np.random.default_rng(0)
    return [random.integers(256, size=(9 + n % 3, 10, 3), dtype=np.uint8) for n in range(10)]


@pytest.fixture
def folder(tmp_path, noise):
    """Return a folder of the classes `0`, with six images, and `1`, with four."""
    write_image_folder(tmp_path / "train", noise, [0] * 6 + [1] * 4)
    return tmp_path / "train"
