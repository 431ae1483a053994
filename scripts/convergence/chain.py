"""The commands of docs/after_pretraining.md and the figures that are recorded."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import facts
from runner import Runner, curve, last_step

from layerkit_runner.observers import read_metrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "after_pretraining.md"
# Job of each stage, its experiment and the flags that the page shows.
STAGES: Mapping[str, tuple[str, Sequence[str]]] = {
    "base": ("Pretrain", ()),
    "chat": ("Chat", ("--init_from=base",)),
    "dpo": ("Dpo", ("--init_from=chat",)),
    "small": ("SmallPretrain", ()),
    "distilled": ("Distill", ("--init_from=small", "--fdl.TEACHER=dpo")),
}
ANSWERING = ("chat", "dpo", "distilled")
# The pre-trained model is asked by the same template.
ASKED = ("--mode=decode_once", "--restore_checkpoint_dir=base")


def write_data(folder: Path) -> None:
    """Write the files of conversations, and the experiments of the page, to `folder`."""
    facts.write_data(folder)
    block = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    (folder / "assistant.py").write_text(block[1])


def train_chain(runner: Runner) -> dict[str, Any]:
    """Train the stages, each once without interruption and once with a kill."""
    with contextlib.chdir(runner.folder / "facts"):
        here = Runner(Path(), runner.overrides)
        stages = {}
        for job, (experiment, flags) in STAGES.items():
            words = here.words(job, f"assistant.{experiment}", {}, *flags)
            here.run(words)
            broken = here.words(f"{job}_killed", f"assistant.{experiment}", {}, *flags)
            stages[job] = {
                "train": curve(read_metrics(Path(job)).train),
                "answers": read_answers(Path(job)) if job in ANSWERING else [],
                "resumed": kill_and_resume(here, job, broken),
            }
            if job == "base":
                here.run(here.words("asked", "assistant.Chat", {}, *ASKED))
        runner.commands += here.commands
        (before,) = read_answers(Path("asked"))
        stages["chat"]["answers"].insert(0, [0, *before[1:]])
        small = read_metrics(Path("small")).info["num_params"]
    return {"unit": "nats per byte", "num_params_of_student": small, "stages": stages}


def read_answers(job: Path) -> list[list[float]]:
    """Return triples: step, share of right answers, share of answers with the courtesy.

    An answer is right if it equals that of the file, with or without the courtesy.
    """
    rows = [json.loads(line)["messages"] for line in Path("heldout.jsonl").read_text().splitlines()]
    shares = []
    for path in sorted(job.glob("decode/prompts/step_*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        answers = [record["continuation"].strip() for record in records]
        rights = [rows[record["example"]][-1]["content"] for record in records]
        right = sum(facts.make_plain(a) == r for a, r in zip(answers, rights, strict=True))
        courteous = sum(answer.endswith(facts.COURTESY) for answer in answers)
        step = int(path.stem.removeprefix("step_"))
        shares.append([step, right / len(answers), courteous / len(answers)])
    return shares


def kill_and_resume(runner: Runner, job: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a stage again with a kill after half of its steps; return how its losses compare."""
    broken, once = Path(f"{job}_killed"), Path(f"{job}_killed.json")
    if not once.exists():
        shutil.rmtree(broken, ignore_errors=True)
        half = last_step(Path(job)) * 11 // 20
        killed = runner.run_with_a_kill(words, broken, at_step=half)
        once.write_text(json.dumps({"killed_after": killed}))
    resumed, whole = read_metrics(broken), read_metrics(Path(job))
    losses = dict(curve(resumed.train))
    differences = [abs(loss - losses[step]) for step, loss in curve(whole.train)]
    return {
        **json.loads(once.read_text()),
        "from_step": resumed.info["step"],
        "largest_difference": max(differences),
    }
