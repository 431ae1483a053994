"""Two processes resume the optimizer and the weights of Paxml as one process does."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.observers import read_metrics

RECORDED = Path(__file__).parents[1] / "packages/runner/tests/init_from/pax/recorded"
MESHES = {"stacked_zarr": "[1,2,2]", "stacked_ocdbt": "[2,2,1]", "unstacked_flax": "[1,2,2]"}


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_two_processes_continue_from_paxml_as_one_process_does(
    jobs: Any, tmp_path: Path, case: str
):
    with zipfile.ZipFile(RECORDED / f"{case}.zip") as archive:
        archive.extractall(tmp_path / "pax")
    fields = {
        "ICI_MESH_SHAPE": MESHES[case],
        "PAX_FOLDER": tmp_path / "pax",
        "USE_REPEATED_LAYER": case != "unstacked_flax",
    }
    alone = jobs.make("pax_state.Continued", tmp_path / "alone", num_devices=4, **fields)
    alone.run()
    together = jobs.make("pax_state.Continued", tmp_path / "together", num_devices=2, **fields)
    together.run_as(2)
    losses = [
        {record["step"]: record["loss"] for record in read_metrics(job.folder).train}
        for job in (together, alone)
    ]
    assert list(losses[0]) == [7, 8, 9]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
