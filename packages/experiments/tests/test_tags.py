"""Tags tell the truth: each is held against what the experiment turned out to be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import layerkit_experiments
from layerkit_runner.config.registry import ExperimentEntry, list_experiments, load_experiment

GOLDENS = Path(__file__).parent / "goldens"
PREFIX = f"{layerkit_experiments.__name__}."
# Without second names of a class.
ENTRIES = [
    entry
    for entry in list_experiments()
    if entry.module.startswith(PREFIX) and not entry.line.summary.startswith("The same as ")
]


def mesh(entry: ExperimentEntry) -> str:
    return entry.line.mesh or ""


def golden(name: str) -> str:
    """The whole configuration, of which most goldens hold the differences from another."""
    text = (GOLDENS / f"{name}.txt").read_text()
    head, _, differences = text.partition("\n")
    if not head.startswith("differs from "):
        return text
    lines = golden(head.removeprefix("differs from ")).splitlines()
    changed = {line.removeprefix("- ").partition(" = ")[0] for line in differences.splitlines()}
    kept = [line for line in lines if line.partition(" = ")[0] not in changed]
    return "\n".join([*kept, differences])


IS_SO: dict[str, Callable[[ExperimentEntry], bool]] = {
    "distillation": lambda entry: (
        "\ntask.model = DistillationModel\n" in golden(entry.dotted.removeprefix(PREFIX))
    ),
    "eval_only": lambda entry: load_experiment(entry).trained_by is not None,
    # BoolQ is for trained weights, which a field names.
    "fine_tune": lambda entry: (
        entry.name.startswith("lm.boolq.")
        or not re.search(
            # Where missing weights are random, the sources are those of a teacher.
            r"\ntask\.initial_weights( = None|\.missing = 'draw')\n",
            golden(entry.dotted.removeprefix(PREFIX)),
        )
    ),
    "lm": lambda entry: entry.name.startswith("lm."),
    "lora": lambda entry: " = LoraDot\n" in golden(entry.dotted.removeprefix(PREFIX)),
    "masked_lm": lambda entry: (
        "\ntask.model = BertModel\n" in golden(entry.dotted.removeprefix(PREFIX))
    ),
    "moe": lambda entry: (
        "feed_forward_tpl = MoeFeedForward\n" in golden(entry.dotted.removeprefix(PREFIX))
    ),
    "multislice": lambda entry: mesh(entry).endswith(" across"),
    "pipeline": lambda entry: "stage " in mesh(entry),
    "pmap": lambda entry: mesh(entry) == "pmap",
    "speed_test": lambda entry: "LimitSteps" in entry.name or "Proxy" in entry.name,
    "speech": lambda entry: entry.name.startswith("speech."),
    "time_series": lambda entry: (
        "\ntask.model = PatchedDecoder\n" in golden(entry.dotted.removeprefix(PREFIX))
    ),
    "translation": lambda entry: (
        "\ntask.model = SequenceModel\n" in golden(entry.dotted.removeprefix(PREFIX))
    ),
    "vision": lambda entry: entry.name.startswith("vision."),
}


@pytest.mark.parametrize("tag", IS_SO)
def test_a_tag_is_on_all_that_it_is_true_of(tag: str):
    tagged = {entry.name for entry in ENTRIES if tag in entry.line.tags}
    assert tagged == {entry.name for entry in ENTRIES if IS_SO[tag](entry)}
    assert tagged


def test_every_tag_is_checked_here():
    assert {tag for entry in ENTRIES for tag in entry.line.tags} == set(IS_SO)
