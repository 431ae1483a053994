"""The reduced form of each named language model trains on this machine: its loss falls.

Run as a user would, `runner --exp=… --reduced --job_log_dir=…`, but within one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from layerkit_experiments.lm import c4, c4_multislice, lm_cloud, pile, quickstart
from layerkit_runner import BaseExperiment, cli
from layerkit_runner.config.experiment import experiment_fields, reduced_values
from layerkit_runner.observers import read_metrics

pytestmark = pytest.mark.experiments

STEPS = 20
MODULES = (c4, c4_multislice, lm_cloud, pile, quickstart)
CLASSES = [
    cls
    for module in MODULES
    for cls in vars(module).values()
    if isinstance(cls, type) and cls.__module__ == module.__name__ and not cls._is_abstract
]
FIELDS = {
    "MAX_STEPS": STEPS,
    "SUMMARY_INTERVAL_STEPS": 1,
    "EVAL_INTERVAL_STEPS": None,
    "CHECKPOINT_EVERY_N_STEPS": STEPS,
    "PERCORE_BATCH_SIZE": 1.0,  # on eight devices, the rows that one has
}


def reduced_form(cls: type[BaseExperiment]) -> str:
    """The abstract bases and the values of the fields, which are those of the run."""
    bases = [base for base in cls.__mro__ if getattr(base, "_is_abstract", True)]
    values = {field: getattr(cls, field, None) for field in experiment_fields(cls)}
    return repr((bases, sorted((values | reduced_values(cls) | FIELDS).items())))


# Classes of two names or with the same reduced form are one; and one only evaluates: see
# test_corpora.
TRAINED = [
    f"{cls.__module__.removeprefix('layerkit_experiments.')}.{cls.__name__}"
    for cls in {reduced_form(cls): cls for cls in reversed(CLASSES)}.values()
    if cls is not pile.Lambada126M
]


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_falls_in_twenty_steps(name: str, tmp_path: Path):
    folder = tmp_path / "run"
    flags = [f"--exp={name}", "--reduced", f"--job_log_dir={folder}", "--noenable_summary_writer"]
    fields = dict(FIELDS)
    if "Pipeline" in name:
        # Two stages on two of the eight devices, the rows of each split over four.
        fields["ICI_MESH_SHAPE"] = [2, 4, 1, 1]
    words = [f"--fdl.{field}={value}" for field, value in fields.items()]
    assert cli.main([*flags, *words]) == 0
    found = {record["step"]: record["loss"] for record in read_metrics(folder).train}
    assert max(found) == STEPS
    first, last = ([found[step] for step in steps] for steps in ((1, 2, 3), (18, 19, 20)))
    assert sum(last) / 3 < sum(first) / 3 - 0.1
