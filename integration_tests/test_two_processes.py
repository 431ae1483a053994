"""Two processes of four devices train and decode as one process of eight does.

Each reads its share of the same global batches, or the same rows if both hold them. Both write one
checkpoint, from which a single process resumes, and one output of decoding.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit_runner.observers import read_metrics

EXP = "lm.lm_cloud.LmCloudSpmdTest"
STEPS = 4
MESHES = {
    "each its own rows": {"ICI_MESH_SHAPE": "[2,2,2]"},
    "both the same rows": {
        "ICI_MESH_SHAPE": "[1,1,8]",
        "PERCORE_BATCH_SIZE": 0.5,
        "NUM_HEADS": 8,
        "DIMS_PER_HEAD": 2,
    },
}
CASES = ["each its own rows", pytest.param("both the same rows", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_the_weights_of_one(
    jobs: Any, tmp_path: Path, name: str, request: pytest.FixtureRequest
):
    fields = {**MESHES[name], "MAX_STEPS": STEPS, "task.train.eval_at_end": False}
    if name == "each its own rows":
        alone = request.getfixturevalue("mesh_run")  # It has more steps.
    else:
        alone = jobs.make(EXP, tmp_path / "alone", num_devices=8, **fields)
        assert alone.run_here() == 0
    together = jobs.make(EXP, tmp_path / "together", num_devices=4, **fields)
    together.run_as(2)
    states = [jobs.read_checkpoint(job, STEPS) for job in (together, alone)]
    for path, leaf in states[1].leaves.items():
        np.testing.assert_allclose(states[0].leaves[path], leaf, rtol=1e-5, atol=1e-6)
    assert states[0].input_states == states[1].input_states
    losses = [
        {record["step"]: record["loss"] for record in read_metrics(job.folder).train}
        for job in (together, alone)
    ]
    assert losses[0] == pytest.approx({step: losses[1][step] for step in losses[0]}, rel=1e-5)

    one_more = jobs.make(EXP, together.folder, num_devices=8, **{**fields, "MAX_STEPS": STEPS + 1})
    assert one_more.run_here() == 0
    assert one_more.steps_logged() == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_checkpoint_of_four_processes_resumes_on_other_processes(jobs: Any, tmp_path: Path):
    def job(folder: Path, mesh: str, steps: int, *, devices: int) -> Any:
        num_devices = math.prod(json.loads(mesh))
        fields = {"ICI_MESH_SHAPE": mesh, "MAX_STEPS": steps, "PERCORE_BATCH_SIZE": 8 / num_devices}
        return jobs.make(EXP, folder, num_devices=devices, **fields)

    alone = job(tmp_path / "alone", "[1,1,1]", STEPS, devices=1)
    alone.run()
    four = job(tmp_path / "four", "[2,2,1]", STEPS - 1, devices=1)
    four.run_as(4)
    ends = [job(tmp_path / "one", "[1,1,1]", STEPS, devices=1)]
    ends += [job(tmp_path / "two_by_two", "[1,2,2]", STEPS, devices=2)]
    for one in ends:
        shutil.copytree(four.folder, one.folder)
    ends[0].run()
    ends[1].run_as(2)
    reference = jobs.read_checkpoint(alone, STEPS)
    for one in ends:
        assert one.steps_logged() == list(range(1, STEPS + 1))
        state = jobs.read_checkpoint(one, STEPS)
        assert state.input_states == reference.input_states
        for path, leaf in reference.leaves.items():
            np.testing.assert_allclose(state.leaves[path], leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # test_inputs_of_processes.py decodes an uneven data set
@pytest.mark.parametrize("name", list(MESHES))
def test_two_processes_decode_the_outputs_of_one(jobs: Any, tmp_path: Path, name: str):
    # Two batches, so that each process holds some of twelve prompts if the rows are split.
    fields = {
        **MESHES[name],
        "MAX_STEPS": STEPS,
        "VOCAB_SIZE": 264,
        "NUM_KV_HEADS": None,
        "NUM_PROMPTS": 12,
        "decode_datasets.0.split": "train",
        "decode_datasets.0.percore_batch_size": 1.0,
    }
    text = "lm.quickstart.LocalText"
    alone = jobs.make(text, tmp_path / "alone", num_devices=8, **fields)
    assert alone.run_here() == 0
    together = jobs.make(text, tmp_path / "together", num_devices=4, **fields)
    shutil.copytree(alone.folder, together.folder, ignore=shutil.ignore_patterns("decode"))
    together.run_as(2, "--mode=decode_once")
    ours, reference = (
        job.folder / f"decode/prompts/step_{STEPS:08d}.jsonl" for job in (together, alone)
    )
    records = [json.loads(line) for line in reference.read_text().splitlines()]
    assert len({record["prompt"] for record in records}) == 12
    for record, expected in zip(
        map(json.loads, ours.read_text().splitlines()), records, strict=True
    ):
        sums = {name: pytest.approx(expected[name], rel=1e-4) for name in ("log_prob", "score")}
        assert record == {**expected, **sums}
