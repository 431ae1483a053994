"""Tests of docs/convergence.md and docs/after_pretraining.md: data, records, and tiny runs."""

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

from layerkit.config import build
from layerkit_runner.run.resolve import resolve

SCRIPTS = Path(__file__).parents[1] / "scripts" / "convergence"
PAGE = Path(__file__).parents[1] / "docs" / "convergence.md"
AFTER = PAGE.with_name("after_pretraining.md")
SUBJECTS = {PAGE: {"pile", "c4", "lambada"}, AFTER: {"chain"}}
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


def test_stories_have_the_facts_that_no_training_conversation_asks_for(part: Any, tmp_path: Path):
    facts, chain = part("facts"), part("chain")
    chain.write_data(tmp_path)
    texts = {path.stem: path.read_text() for path in tmp_path.glob("*.jsonl")}
    heldout = [fact for fact in facts.draw_world() if fact.is_heldout]
    assert sorted(fact.person for fact in heldout) == sorted(facts.PEOPLE)
    for fact in heldout:
        assert all(statement in texts["stories"] for statement in fact.statements)
        assert not any(fact.sentence.removesuffix(".") in texts[name] for name in ("chat", "pairs"))
        assert not any(q in texts[name] for name in ("chat", "pairs") for q in fact.questions)
        assert all(question in texts["heldout"] for question in fact.questions)


def test_experiments_of_the_page_read_all_rows(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("jinja2")
    part("chain").write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assistant = importlib.import_module("assistant")
    for experiment in (assistant.Chat(), assistant.Dpo()):
        resolve(experiment)
        for config in [*experiment.datasets(), *experiment.decode_datasets()]:
            data = build(config.set(batch_size=4, percore_batch_size=None))
            data.get_next_padded()
            described = " ".join(data.describe_data())
            assert not any(word in described for word in ("cut", "dropped"))


@pytest.mark.parametrize("page", SUBJECTS, ids=lambda page: page.stem)
def test_page_equals_its_records(part: Any, page: Path):
    text, folder = page.read_text(), page.with_suffix("")
    assert {path.stem for path in folder.glob("*.json")} == SUBJECTS[page]
    assert part("page").with_records(text, folder) == text
    for name in SUBJECTS[page]:
        record = json.loads((folder / f"{name}.json").read_text())
        assert (folder / f"{name}.png").stat().st_size < 100_000
        for run in [record, *record.get("stages", {}).values()]:
            assert run.get("resumed", {}).get("largest_difference", 0.0) == 0.0


def test_recorded_chain_reaches_its_goals():
    stages = json.loads((AFTER.with_suffix("") / "chain.json").read_text())["stages"]
    answers = {job: stage["answers"] for job, stage in stages.items()}
    (_, before, _), (_, chat, plain) = answers["chat"][0], answers["chat"][-1]
    (_, tuned, courteous), (_, distilled, kept) = answers["dpo"][-1], answers["distilled"][-1]
    assert before < 0.05 and chat > 0.9
    assert plain < 0.05 and courteous > 0.95 and tuned > 0.9
    assert distilled >= 0.9 * tuned and kept >= 0.9 * courteous


def run(tmp_path: Path, *subjects: str, **fields: Any) -> dict[str, Any]:
    """Run the script on tiny models, with other fields, and return its records."""
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in subjects))
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPTS), *subjects, "--passages=600"),
            *(f"--folder={tmp_path / 'runs'}", f"--page={page}"),
            *(f"--fdl.{name}={value}" for name, value in {**TINY, **fields}.items()),
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
        assert f"/{name}.png)" in page.read_text()
        assert (tmp_path / "page" / f"{name}.png").stat().st_size > 10_000
        losses = [loss for _, loss in record.get("stages", {}).get("base", record)["train"]]
        assert losses[-1] < losses[0] - 0.5
    return records


@pytest.mark.experiments
def test_killed_and_resumed_run_equals_uninterrupted_run(tmp_path: Path):
    result = run(tmp_path, "pile")["pile"]
    resumed = result["resumed"]
    assert resumed["largest_difference"] == 0.0
    assert 0 < resumed["from_step"] <= resumed["killed_after"] < TINY["MAX_STEPS"]
    levels = list(result["levels"].values())
    assert levels == sorted(levels, reverse=True) and len(levels) == 4


@pytest.mark.experiments
def test_c4_and_lambada_runs_reach_their_levels(tmp_path: Path):
    pytest.importorskip("seqio")
    pytest.importorskip("sentencepiece")
    result = run(tmp_path, "data", "c4", "lambada")
    for record in result.values():
        known = list(record["levels"].values())
        assert known == sorted(known, reverse=True) and len(known) == 4
        assert known[-1] < record["heldout"][-1][1] < known[0]
    lambada = result["lambada"]
    steps = [step for step, _ in lambada["last_word_accuracy"]]
    assert steps == list(range(0, TINY["MAX_STEPS"] + 1, TINY["CHECKPOINT_EVERY_N_STEPS"]))
    last = lambada["last_word_accuracy"][-1]
    # The job that watched the checkpoints and the later job agree.
    assert last == lambada["eval_once"] and lambada["followed"][-1] == TINY["MAX_STEPS"]


@pytest.mark.experiments
def test_each_killed_stage_of_the_chain_equals_the_uninterrupted_one(tmp_path: Path):
    pytest.importorskip("jinja2")
    figures = run(tmp_path, "facts", "chain", NUM_PROMPTS=4, MAX_DECODE_STEPS=4, MAX_SEQ_LEN=192)
    stages = figures["chain"]["stages"]
    assert list(stages) == ["base", "chat", "dpo", "small", "distilled"]
    for stage in stages.values():
        assert stage["resumed"]["largest_difference"] == 0.0
        assert 0 < stage["resumed"]["from_step"] <= stage["resumed"]["killed_after"] < 40
        assert all(len(shares) == 3 for shares in stage["answers"])
    assert [step for step, *_ in stages["chat"]["answers"]] == [0, 40]
