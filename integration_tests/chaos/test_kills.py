"""Fifty kills over one experiment under each partitioner; nothing of the result tells of them.

SIGKILL and SIGTERM at the start, in steps, in saves, in the deletion of old checkpoints, in
evaluations and at the end, of the one process or of one of two. After every kill each committed
step that is to stay is intact, and the same command resumes from the newest; at the end weights,
optimizer state, the place in the data, every logged loss and every evaluation are those of a run
that nobody stopped, to the bit.

The choice is drawn from LAYERKIT_CHAOS_SEED, 0 by default, and printed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner.observers import read_metrics

pytestmark = pytest.mark.chaos

EXP = "text_anywhere.TextAnywhere"
SPMD = {"ICI_MESH_SHAPE": "[2,2,2]"}
PMAP = {"UNDER_PMAP": True}
KILL, TERM = signal.SIGKILL, signal.SIGTERM
# How often each signal comes at each moment.
ALONE = {
    ("start", KILL): 6,
    ("start", TERM): 2,
    ("step", KILL): 6,
    ("step", TERM): 3,
    ("save", KILL): 6,
    ("save", TERM): 3,
    ("deletion", KILL): 2,
    ("evaluation", KILL): 4,
    ("evaluation", TERM): 2,
    ("end", KILL): 4,
}
OF_TWO = {
    ("start", KILL): 2,
    ("step", KILL): 2,
    ("step", TERM): 1,
    ("save", KILL): 2,
    ("save", TERM): 1,
    ("evaluation", KILL): 2,
    ("evaluation", TERM): 1,
    ("end", KILL): 1,
}
CASES = {
    "SPMD": (SPMD, 1, ALONE, 150),
    "pmap": (PMAP, 1, ALONE, 150),
    "SPMD of two processes": (SPMD, 2, OF_TWO, 125),
    "pmap of two processes": (PMAP, 2, OF_TWO, 125),
}


@pytest.mark.parametrize("name", CASES)
def test_run_killed_many_times_equals_an_uninterrupted_run(
    name: str, driver: Any, jobs: Any, tmp_path: Path
):
    fields, count, how_often, num_steps = CASES[name]
    seed = int(os.environ.get("LAYERKIT_CHAOS_SEED", "0"))
    print(f"{name}: LAYERKIT_CHAOS_SEED={seed}")
    fields = {**driver.fields, **fields, "MAX_STEPS": num_steps}
    whole, killed = (
        jobs.make(EXP, tmp_path / folder, num_devices=8 // count, **fields)
        for folder in ("whole", "killed")
    )
    begun = time.monotonic()
    reference = driver.run_reference(whole, count, tmp_path / "said", num_steps)
    chaos = driver.chaos(killed, count, tmp_path / "said", reference)
    for kill in planned(driver, reference, how_often, count, random.Random(seed)):
        while not chaos.turn(kill):  # the run had ended; a finished one has an end again
            assert kill.moment == "end", f"the run ended before {kill}; give it more steps"
            kill = dataclasses.replace(kill, delay=kill.delay / 2)
    chaos.turn(None)
    kills = ", ".join(f"{moment} {s} {n}" for (moment, s), n in sorted(chaos.kills.items()))
    print(
        f"{chaos.kills.total()} kills in {time.monotonic() - begun:.0f} s: {kills}; the others"
        f" noticed within {chaos.slowest_notice:.1f} s"
    )
    assert not list(killed.checkpoints.glob("*orbax-checkpoint-tmp*"))
    assert_same_checkpoints(jobs, killed, whole, num_steps)
    assert_same_metrics(killed, whole, num_steps)
    assert json.loads((killed.folder / "goodput.json").read_text())["num_steps"] == num_steps


def planned(
    driver: Any, reference: Any, how_often: dict, count: int, draw: random.Random
) -> list[Any]:
    """All kills in the order of a run: those at its end come last."""
    kills = []
    for (moment, number), times in how_often.items():
        for _ in range(times):
            longest = {
                "start": reference.seconds_to_first_step,
                "step": 0.1,
                "end": reference.seconds_at_end,
            }
            kills.append(
                driver.kill(
                    moment,
                    number,
                    victim=draw.randrange(count),
                    steps=draw.randint(1, 8),
                    delay=draw.uniform(0, longest.get(moment, 0.0)),
                )
            )
    draw.shuffle(kills)
    return sorted(kills, key=lambda kill: kill.moment == "end")


def assert_same_checkpoints(jobs: Any, ours: Any, reference: Any, num_steps: int) -> None:
    """Those that stay for good are there in both; all that both have are equal."""
    steps = [
        {int(path.name.split("_")[1]) for path in job.checkpoints.glob("checkpoint_*")}
        for job in (ours, reference)
    ]
    both = steps[0] & steps[1]
    assert both >= {*range(25, num_steps + 1, 25), num_steps}
    for step in both:
        jobs.assert_same_bits(
            jobs.read_checkpoint(ours, step), jobs.read_checkpoint(reference, step)
        )


def assert_same_metrics(ours: Any, reference: Any, num_steps: int) -> None:
    """Each step once, and the numbers equal; so are those of steps that were done again."""
    expected = read_metrics(reference.folder)
    result = read_metrics(ours.folder)
    assert [record["step"] for record in result.train] == list(range(1, num_steps + 1))
    evaluated = [record["step"] for record in expected.evals["heldout"]]
    assert [record["step"] for record in result.evals["heldout"]] == evaluated
    by_step = {
        (record["step"], record.get("dataset")): computed(record)
        for record in [*expected.train, *expected.evals["heldout"]]
    }
    lines = (ours.folder / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        if "event" not in record:
            assert computed(record) == by_step[record["step"], record.get("dataset")]


def computed(record: dict[str, Any]) -> dict[str, Any]:
    """Return the values that do not depend on the clock."""
    names = ("loss", "xent", "accuracy", "total_weight")
    return {
        name: value
        for name, value in record.items()
        if name in names or name.startswith("learning/")
    }
