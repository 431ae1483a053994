"""One run on changing devices: the losses are those of a run that never left one device.

Each leg is the same command on other devices, over another mesh, or under the other partitioner,
and resumes from the checkpoint of the leg before. The global batches stay the same. Sums are taken
in another order there, so float32 losses agree to 1e-5 and not to the bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.observers import read_metrics

EXP = "text_anywhere.TextAnywhere"
STEPS = 20
ROWS = 8
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Leg:
    """Part of a run.

    Attributes:
      mesh: data × fsdp × tensor; of pmap, the number of devices.
      last_step: Where it ends; None for a SIGTERM on the way.
    """

    mesh: tuple[int, ...]
    last_step: int | None

    def fields(self) -> dict[str, Any]:
        devices = math.prod(self.mesh)
        place = {"UNDER_PMAP": True} if len(self.mesh) == 1 else {"ICI_MESH_SHAPE": [*self.mesh]}
        return {
            **place,
            "num_devices": devices,
            "PERCORE_BATCH_SIZE": ROWS / devices,
            "task.train.num_train_steps": self.last_step or STEPS,
        }

    def __str__(self) -> str:
        kind = "pmap over " if len(self.mesh) == 1 else ""
        return kind + "×".join(map(str, self.mesh))


PATHS = {
    "8, 4 and 2 devices": [Leg((2, 2, 2), None), Leg((2, 2, 1), 14), Leg((1, 2, 1), STEPS)],
    "1, 2 and 8 devices": [Leg((1, 1, 1), 5), Leg((2, 1, 1), 10), Leg((2, 2, 2), STEPS)],
    "other meshes of 4": [Leg((2, 2, 1), 7), Leg((4, 1, 1), 14), Leg((1, 2, 2), STEPS)],
    "pmap between": [Leg((2, 2, 2), 7), Leg((4,), 14), Leg((1, 1, 2), STEPS)],
    "SPMD between": [Leg((8,), 7), Leg((1, 4, 1), 14), Leg((2,), STEPS)],
}


def make(jobs: Any, folder: Path, leg: Leg, *, dropout: float = 0.0, **more: Any) -> Any:
    """Return the command of a leg; schedules have `STEPS` steps for each end of the leg."""
    fields = {
        "MAX_STEPS": STEPS,
        "DROPOUT_RATE": dropout,
        "EVAL_INTERVAL_STEPS": None,
        "task.train.eval_at_end": False,
        **leg.fields(),
        **more,
    }
    return jobs.make(EXP, folder, **fields)


def losses(job: Any) -> dict[int, float]:
    """By step."""
    return {record["step"]: record["loss"] for record in read_metrics(job.folder).train}


def assert_same_curve(ours: dict[int, float], reference: dict[int, float]) -> float:
    """Every step once, and each loss near; returns the largest relative difference."""
    assert list(ours) == list(reference) == list(range(1, STEPS + 1))
    largest = max(abs(ours[step] / loss - 1) for step, loss in reference.items())
    assert largest <= TOLERANCE, {step: ours[step] / loss - 1 for step, loss in reference.items()}
    return largest


@pytest.fixture(scope="module")
def one_device(jobs: Any, tmp_path_factory: Any) -> Any:
    """Losses of a run that stayed on one device, by rate of dropout."""
    known = {}

    def of(dropout: float) -> dict[int, float]:
        if dropout not in known:
            folder = tmp_path_factory.mktemp("one_device") / "job"
            job = make(jobs, folder, Leg((1, 1, 1), STEPS), dropout=dropout)
            job.run()
            known[dropout] = losses(job)
        return known[dropout]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_a_run_on_changing_devices(
    name: str, jobs: Any, one_device: Any, tmp_path: Path, running: list[Any]
):
    # Dropout is the same on every mesh; under pmap each device draws its own.
    dropout = 0.0 if any(len(leg.mesh) == 1 for leg in PATHS[name]) else 0.1
    begins = [1]
    for leg in PATHS[name]:
        job = make(jobs, tmp_path / "job", leg, dropout=dropout)
        if leg.last_step is None:
            process = job.start()
            running.append(process)
            assert job.wait_for(process, lambda job=job: len(job.steps_logged()) >= 5)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 128 + signal.SIGTERM, output
        else:
            job.run()
        begins.append(job.steps_logged()[-1] + 1)
    assert len(set(begins)) == len(begins), "a leg without steps"
    reference = one_device(dropout)
    largest = assert_same_curve(losses(job), reference)
    print(f"{name}: largest difference {largest:.1e}")
    for leg, (first, after) in zip(PATHS[name], itertools.pairwise(begins), strict=True):
        of_leg = max(abs(losses(job)[s] / reference[s] - 1) for s in range(first, after))
        print(f"  steps {first} to {after - 1} on {leg}: {of_leg:.1e}")
