from __future__ import annotations

import pytest

from layerkit_runner.files.text import size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (1_540_000_000, "1.54 GB"),
        (2_000_000_000_000_000, "2000 TB"),
    ],
)
def test_sizes_are_rounded_to_three_digits(size, text):
    assert size_text(size) == text
