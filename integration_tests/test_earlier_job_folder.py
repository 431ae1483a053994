"""Job folders that version 0.1.0 wrote are resumed; see `job_folders/README.md`.

What is read has to equal what the earlier version wrote bit for bit. What is trained further may
differ in the last bits on another CPU, so it is compared within 1e-6. On the machine that wrote the
folders it was equal bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit_runner.observers import read_metrics

FOLDERS = Path(__file__).parent / "job_folders"
RESULTS = json.loads((FOLDERS / "results.json").read_text())
EXPERIMENTS = {
    "tensorstore": "lm.lm_cloud.LmCloudSpmdTest",
    "msgpack": "lm.lm_cloud.LmCloudTransformerAdamLimitSteps",
}

# The experiments have other values since they equal those of paxml.
FIELDS_THEN = {
    "LEARNING_RATE": 1e-3,
    "FEED_FORWARD_BIAS": False,
    "PER_DIM_SCALE": False,
    "COMBINE_QKV": False,
    "SOFTMAX_BIAS": False,
    "WEIGHT_INIT": "xavier",
}


@pytest.fixture(
    scope="module", params=["tensorstore", pytest.param("msgpack", marks=pytest.mark.slow)]
)
def resumed(request: pytest.FixtureRequest, jobs: Any, tmp_path_factory: Any) -> tuple[str, Any]:
    """Copy an earlier job folder and resume it to step 8 by its own command and fields."""
    name = request.param
    folder = tmp_path_factory.mktemp(name) / "job"
    shutil.copytree(FOLDERS / name, folder)
    recorded = json.loads((folder / "config.json").read_text())["arguments"]
    words = [word for word in recorded if not word.startswith("--jax_compilation_cache")]
    words += [f"--fdl.{field}={value}" for field, value in FIELDS_THEN.items()]
    job = jobs.make(EXPERIMENTS[name], folder)
    folders = [f"--job_log_dir={folder}", f"--jax_compilation_cache={job.cache}"]
    process = job.start_with([*words, *folders])
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "resuming from step 4" in output
    return name, job


def digest(leaves: Mapping[str, np.ndarray]) -> str:
    result = hashlib.sha256()
    for name in sorted(leaves):
        result.update(f"{name} {leaves[name].dtype} {leaves[name].shape}".encode())
        result.update(leaves[name].tobytes())
    return result.hexdigest()


def test_restored_state_equals_what_was_written(resumed: tuple[str, Any], jobs: Any):
    name, job = resumed
    saved = jobs.read_checkpoint(job, 4)
    assert digest(saved.leaves) == RESULTS[name]["sha256_of_step_4"]
    assert saved.input_states == RESULTS[name]["input_states_of_step_4"]


def test_resumed_run_equals_an_uninterrupted_run(resumed: tuple[str, Any], jobs: Any):
    name, job = resumed
    saved = jobs.read_checkpoint(job, 8)
    with np.load(FOLDERS / f"{name}.npz") as expected:
        assert saved.leaves.keys() == set(expected.files)
        for path, leaf in saved.leaves.items():
            assert leaf.dtype == expected[path].dtype
            np.testing.assert_allclose(leaf, expected[path], rtol=0, atol=1e-6, err_msg=path)
    # The experiments have a held-out data set, which they had not then.
    states = RESULTS[name]["input_states_of_step_8"]
    assert {data: saved.input_states[data] for data in states} == states
    losses = {str(record["step"]): record["loss"] for record in read_metrics(job.folder).train}
    assert losses == pytest.approx(RESULTS[name]["losses"], rel=1e-6)
