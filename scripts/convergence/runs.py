"""The commands of each subject and the figures that are recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import levels
from chain import train_chain
from fields import LAST_WORDS, RUNS
from runner import Runner, check, curve

from layerkit_runner.observers import read_metrics


def sizes(job: Path) -> dict[str, int]:
    """Return the numbers of weights and of training tokens."""
    metrics = read_metrics(job)
    steps = metrics.train[-1]["step"]
    return {
        "num_params": metrics.info["num_params"],
        "tokens": steps * metrics.info["tokens_per_step"],
    }


def train_pile(runner: Runner) -> dict[str, Any]:
    """Train without interruption, train with a kill, and evaluate all held-out text."""
    exp, fields = RUNS["pile"]
    runner.run(runner.words("pile", exp, fields))
    whole = {**fields, "EVAL_NUM_BATCHES": None}
    runner.run(runner.words("pile", exp, whole, "--mode=eval_once"))
    broken, once = runner.folder / "pile_killed", runner.folder / "pile_killed.json"
    words = runner.words("pile_killed", exp, fields)
    runner.note(words, "  # kill -9, then the same again")
    if not once.exists():
        steps = int({**fields, **runner.overrides}["MAX_STEPS"])
        shutil.rmtree(broken, ignore_errors=True)
        killed = runner.run_with_a_kill(words, broken, at_step=steps // 2 + steps // 20)
        once.write_text(json.dumps({"killed_after": killed}))
    resumed = read_metrics(broken)
    unbroken = read_metrics(runner.folder / "pile")
    # A resumed run reports its first step in addition to the summary steps.
    losses = dict(curve(resumed.train))
    differences = [abs(loss - losses[step]) for step, loss in curve(unbroken.train)]
    heldout = read_metrics(runner.folder / "pile" / "metrics_eval_once.jsonl").evals["heldout"]
    return {
        "unit": "nats per byte",
        "train": curve(unbroken.train),
        "heldout": curve(unbroken.evals["heldout"]),
        "all_heldout": curve(heldout)[-1],
        "levels": levels.of_local_text(sizes(runner.folder / "pile")["tokens"]),
        "resumed": {
            **json.loads(once.read_text()),
            "from_step": resumed.info["step"],
            "train": curve(resumed.train),
            "heldout": curve(resumed.evals["heldout"]),
            "largest_difference": max(differences),
        },
    }


def train_c4(runner: Runner) -> dict[str, Any]:
    """Train the recipe of C4 on the passages."""
    exp, fields = RUNS["c4"]
    runner.run(runner.words("c4", exp, fields))
    metrics = read_metrics(runner.folder / "c4")
    return {
        "unit": "nats per token",
        "train": curve(metrics.train),
        "heldout": curve(metrics.evals["heldout"]),
        "levels": levels.of_passages(runner.folder / "data"),
    }


def train_lambada(runner: Runner) -> dict[str, Any]:
    """Train on the passages while a second job evaluates the checkpoints."""
    exp, fields = RUNS["lambada"]
    asked = "lm.pile.Lambada126M"
    source = f"--restore_checkpoint_dir={runner.folder / 'lambada_trained'}"
    words = runner.words("lambada", asked, LAST_WORDS, "--mode=eval", source)
    runner.note(words, " &")
    follow = runner.start(words)
    try:
        runner.run(runner.words("lambada_trained", exp, fields))
        check(follow)
    finally:
        follow.kill()
    trained = read_metrics(runner.folder / "lambada_trained")
    followed = read_metrics(runner.folder / "lambada" / "metrics_eval.jsonl").evals["lambada"]
    # Checkpoints that the second job missed, and the last one in any case.
    saved = [0, *(record["step"] for record in trained.evals["heldout"])]
    missed = sorted({*saved} - {record["step"] for record in followed[:-1]})
    which = f"--restore_checkpoint_step={','.join(map(str, missed))}"
    # A separate folder, so that the last checkpoint is evaluated a second time.
    words = runner.words("lambada_once", asked, LAST_WORDS, "--mode=eval_once", source, which)
    runner.run(words)
    path = runner.folder / "lambada_once" / "metrics_eval_once.jsonl"
    once = read_metrics(path).evals["lambada"]
    accuracies = dict(curve([*once, *followed], "last_word_accuracy"))
    return {
        "unit": "nats per token",
        "train": curve(trained.train),
        "heldout": curve(trained.evals["heldout"]),
        "last_word_accuracy": sorted(map(list, accuracies.items())),
        "followed": [record["step"] for record in followed],
        "eval_once": curve(once, "last_word_accuracy")[-1],
        "levels": levels.of_passages(runner.folder / "data"),
        "guesses": levels.of_last_words(runner.folder / "data"),
    }


SUBJECTS = {
    "pile": train_pile,
    "c4": train_c4,
    "lambada": train_lambada,
    "chain": train_chain,
}
# Training job of each subject.
JOBS = {"pile": "pile", "c4": "c4", "lambada": "lambada_trained", "chain": "facts/base"}
