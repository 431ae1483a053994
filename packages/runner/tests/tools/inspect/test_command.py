"""`--inspect=parameters` as a process that sees no accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parent.parent / "plan"


def inspected(folder: Path) -> dict[str, Any]:
    """Return the JSON output of the command, and check that it writes no file."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "layerkit_runner.cli", "--exp=small_lm_experiment.SmallLm"),
            *("--mode=inspect", "--inspect=parameters", "--json", "--fdl.MESH=[2,4,2]"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{EXPERIMENTS}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


def test_table_of_weights_has_axes_shapes_and_sharding(tmp_path: Path):
    table = inspected(tmp_path)
    # The number of devices is independent of the 8 in the environment of the tests.
    assert (table["num_devices"], table["mesh"]["fsdp"]) == (16, 4)
    assert table["totals"]["weights"]["count"] == sum(row["count"] for row in table["parameters"])
    [query] = [row for row in table["parameters"] if row["path"].endswith("query/w")]
    assert query["axes"] == ["layers", "embed", "heads", "head_dim"]
    assert query["shape"] == [3, 16, 2, 8]
    assert query["sharding"] == [[], ["fsdp"], ["tensor"], []]
    assert query["bytes_per_device"] == 3 * 16 * 16 * 4 // 8
