"""Tests of docs/convergence.md: its reference levels, its records, and its runs at tiny size."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts" / "convergence"
PAGE = Path(__file__).parents[1] / "docs" / "convergence.md"
SUBJECTS = ("pile", "c4", "lambada")
TINY = {
    "NUM_LAYERS": 1,
    "MODEL_DIMS": 16,
    "HIDDEN_DIMS": 32,
    "NUM_HEADS": 2,
    "DIMS_PER_HEAD": 8,
    "MAX_STEPS": 40,
    "WARMUP_STEPS": 4,
    "DECAY_START": 5,
    "DECAY_END": 40,
    "SUMMARY_INTERVAL_STEPS": 1,
    "EVAL_INTERVAL_STEPS": 10,
    "CHECKPOINT_EVERY_N_STEPS": 10,
    "LEARNING_RATE": 0.01,
}


@pytest.fixture(scope="module")
def part() -> Any:
    """Import a module of the script."""
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module
    sys.path.remove(str(SCRIPTS))


def test_probabilities_of_all_passages_sum_to_one(part: Any):
    passages: ModuleType = part("passages")
    grammar = passages.Grammar(
        names=("Anna",),
        kinds=("red", "old"),
        things=("anchor", "basket", "bottle"),
        beginnings=("finds",),
        times=("Then", "Later"),
        returns=("remembers",),
        introduced=(1, 2),
        returned=(1, 2),
    )
    drawn = passages.draw_passages(20_000, seed=0, grammar=grammar)
    # 6 beginnings with one thing have 2 or 4 endings; 12 beginnings with two have 4 or 16.
    assert len({p.text for p in drawn}) == 6 * (2 + 4) + 12 * (4 + 16)
    probabilities = {passage.text: math.exp(-passage.nats) for passage in drawn}
    assert sum(probabilities.values()) == pytest.approx(1)
    # A forgetful reader also gives probability to passages that the grammar excludes.
    assert all(passage.nats < passage.forgetful_nats for passage in drawn)
    assert all(passage.nats <= passage.unsorted_nats for passage in drawn)


def test_last_word_is_one_of_the_things_that_the_passage_names(part: Any):
    passages: ModuleType = part("passages")
    things = passages.Grammar().things
    for passage in passages.draw_passages(200, seed=3):
        *before, last = passage.question.split()
        assert last == passage.last_word and last in things
        named = {word.rstrip(".") for word in before} & set(things)
        assert last in named and len(named) == passage.candidates


def test_page_equals_its_records(part: Any):
    page = PAGE.read_text()
    folder = PAGE.with_suffix("")
    assert {path.stem for path in folder.glob("*.json")} == set(SUBJECTS)
    assert part("page").with_records(page, folder) == page
    for name in SUBJECTS:
        assert (folder / f"{name}.png").stat().st_size < 100_000
    assert json.loads((folder / "pile.json").read_text())["resumed"]["largest_difference"] == 0.0


def run(tmp_path: Path, *subjects: str) -> dict[str, Any]:
    """Run the script on tiny models and return its records."""
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in subjects))
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPTS), *subjects, "--passages=600"),
            *(f"--folder={tmp_path / 'runs'}", f"--page={page}"),
            *(f"--fdl.{name}={value}" for name, value in TINY.items()),
        ],
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("page/*.json")}
    for name, record in records.items():
        assert f"](convergence/{name}.png)" in page.read_text()
        assert (tmp_path / "page" / f"{name}.png").stat().st_size > 10_000
        losses = [loss for _, loss in record["train"]]
        assert losses[-1] < losses[0] - 0.5
    return records


@pytest.mark.experiments
def test_killed_and_resumed_run_equals_uninterrupted_run(tmp_path: Path):
    found = run(tmp_path, "pile")["pile"]
    resumed = found["resumed"]
    assert resumed["largest_difference"] == 0.0
    assert 0 < resumed["from_step"] <= resumed["killed_after"] < TINY["MAX_STEPS"]
    levels = list(found["levels"].values())
    assert levels == sorted(levels, reverse=True) and len(levels) == 4


@pytest.mark.experiments
def test_c4_and_lambada_runs_reach_their_levels(tmp_path: Path):
    pytest.importorskip("seqio")
    pytest.importorskip("sentencepiece")
    found = run(tmp_path, "data", "c4", "lambada")
    for record in found.values():
        known = list(record["levels"].values())
        assert known == sorted(known, reverse=True) and len(known) == 4
        assert known[-1] < record["heldout"][-1][1] < known[0]
    lambada = found["lambada"]
    steps = [step for step, _ in lambada["last_word_accuracy"]]
    assert steps == list(range(0, TINY["MAX_STEPS"] + 1, TINY["CHECKPOINT_EVERY_N_STEPS"]))
    last = lambada["last_word_accuracy"][-1]
    # The job that watched the checkpoints and the later job agree.
    assert last == lambada["eval_once"] and lambada["followed"][-1] == TINY["MAX_STEPS"]
