"""`--inspect=parameters` as a process of its own, which sees no accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parent.parent / "plan"


def test_the_weights_of_an_experiment(tmp_path: Path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "layerkit_runner.cli", "--exp=small_lm_experiment.SmallLm"),
            *("--mode=inspect", "--inspect=parameters", "--json", "--fdl.MESH=[2,4,2]"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{EXPERIMENTS}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    table = json.loads(done.stdout)
    # The environment of the tests says 8 devices, which must not matter.
    assert (table["num_devices"], table["mesh"]["fsdp"]) == (16, 4)
    weights = {row["path"]: row for row in table["parameters"]}
    [query] = [row for path, row in weights.items() if path.endswith("query/w")]
    assert query["axes"] == ["layers", "embed", "heads", "head_dim"]
    assert query["shape"] == [3, 16, 2, 8]
    assert query["sharding"] == [[], ["fsdp"], ["tensor"], []]
    assert query["bytes_per_device"] == 3 * 16 * 16 * 4 // 8
    assert list(tmp_path.iterdir()) == []
