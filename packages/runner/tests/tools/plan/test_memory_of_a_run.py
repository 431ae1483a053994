from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SIZES = (
    "task.model.lm_tpl.vocab_size=8192",
    "task.model.lm_tpl.hidden_dims=2048",
    "task.model.lm_tpl.num_heads=8",
    "datasets.0.vocab_size=8192",
    "datasets.0.seq_length=128",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "remat"), [(2, "full"), (8, "full"), (8, "none")], ids=["state", "both", "activations"]
)
def test_peak_memory_of_a_run_matches_its_plan(experiment_folder, rows, remat):
    result = subprocess.run(
        [
            sys.executable,
            str(experiment_folder / "memory_of_a_run.py"),
            *SIZES,
            f"task.model.lm_tpl.stack_tpl.remat={remat}",
            f"datasets.0.percore_batch_size={rows}",
        ],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            # Memory that is freed goes back at once, and is not counted when it is taken again.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    actual = json.loads(result.stdout.splitlines()[-1])
    assert actual["weights"] > 90e6
    assert actual["grown"] == pytest.approx(actual["predicted"], rel=0.15)
