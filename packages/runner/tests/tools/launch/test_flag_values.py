from __future__ import annotations

import pytest

from layerkit_runner.tools.launch.flag_values import slurm_seconds

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * MINUTE),
        ("90:30", 90 * MINUTE + 30),
        ("12:00:00", 12 * HOUR),
        ("2-0", 2 * DAY),
        ("2-12", 2 * DAY + 12 * HOUR),
        ("2-12:30", 2 * DAY + 12 * HOUR + 30 * MINUTE),
        ("2-12:30:15", 2 * DAY + 12 * HOUR + 30 * MINUTE + 15),
        ("0", 0),
    ],
)
def test_times_as_slurm_reads_them(text, seconds):
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1:2:3:4", "-5", "1 hour", "2-"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match="is no time as Slurm writes it"):
        slurm_seconds(text)
