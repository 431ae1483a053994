"""A disk that is full, then read-only, then as it should be: said in a line each, and no step lost.

The disk is real: a small file system in memory, mounted where only this test's commands see it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.chaos

EXP = "text_anywhere.TextAnywhere"
STEPS = 40
# All checkpoints stay: with a MiB each, the disk is full before the run is done.
FIELDS = {
    "MODEL_DIMS": 64,
    "HIDDEN_DIMS": 256,
    "MAX_STEPS": STEPS,
    "EVAL_INTERVAL_STEPS": None,
    "CHECKPOINT_EVERY_N_STEPS": 5,
    "CHECKPOINT_MAX_TO_KEEP": None,
}
# $1 is the disk, $2 where to keep what was said, the rest the command.
SCRIPT = """
disk=$1 said=$2; shift 2
mount -t tmpfs -o size=4m tmpfs "$disk"
"$@" > "$said/full" 2>&1; echo $? >> "$said/codes"
"$1" -m layerkit_runner.tools.checkpoints verify "$disk/job" > "$said/verified"
mount -o remount,ro "$disk"
"$@" > "$said/read_only" 2>&1; echo $? >> "$said/codes"
mount -o remount,rw,size=64m "$disk"
"$@" > "$said/rest" 2>&1; echo $? >> "$said/codes"
cp -r "$disk/job" "$said/job"
"""


def has_own_mounts() -> bool:
    command = ["unshare", "--map-root-user", "--mount", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not has_own_mounts(), reason="this user may not mount a file system of its own")
def test_a_full_and_a_read_only_disk(jobs: Any, tmp_path: Path):
    whole = jobs.make(EXP, tmp_path / "whole", **FIELDS)
    whole.run()
    disk, said = tmp_path / "disk", tmp_path / "said"
    disk.mkdir()
    said.mkdir()
    job = jobs.make(EXP, disk / "job", **FIELDS)
    command = [sys.executable, "-m", "layerkit_runner.cli", *job.arguments()]
    subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh", disk, said, *command],
        cwd=Path(__file__).parents[1],
        env=job.environment(),
        check=True,
        timeout=600,
    )
    output = {name: (said / name).read_text() for name in ("full", "verified", "read_only", "rest")}
    assert (said / "codes").read_text().split() == ["1", "2", "0"], output
    full = re.fullmatch(
        rf"runner: The checkpoint of step (\d+) could not be written to {job.checkpoints}: .*No"
        r" space left on device.*\. The newest checkpoint there: step (\d+)\.",
        output["full"].splitlines()[-1],
    )
    assert full, output["full"]
    # TensorStore prints this error where a write ends after Orbax has given up the save.
    late = output["full"].count("RuntimeError: Event loop is closed")
    assert output["full"].count("Traceback") == late, output["full"]
    newest = int(full[2])
    assert 0 < newest == int(full[1]) - 5
    assert output["verified"].splitlines() == [
        f"step {step}: intact" for step in range(5, newest + 1, 5)
    ]
    assert output["read_only"].startswith("runner: cannot write to the folder: ")
    assert len(output["read_only"].splitlines()) == 1
    assert f"resuming from step {newest} of {job.checkpoints}" in output["rest"]
    ended = jobs.make(EXP, said / "job", **FIELDS)
    jobs.assert_same_bits(jobs.read_checkpoint(ended, STEPS), jobs.read_checkpoint(whole, STEPS))
