"""Checkpoints travel between pmap and SPMD, whichever of the two formats they are in.

LmCloudTransformerAdamLimitSteps, made small, trains under pmap over eight devices and writes one
msgpack file, or with --pmap_use_tensorstore one entry per parameter. The same experiment under SPMD
(`Sharded`, below) restores either, and the other way about.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from layerkit_experiments.lm.lm_cloud import LmCloudTransformerAdamLimitSteps
from layerkit_experiments.recipes.training import spmd
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.requests import parse_fields
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.job import Job, start_job
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train

EXP = "lm.lm_cloud.LmCloudTransformerAdamLimitSteps"
STEPS, LAST = 4, 6


class Sharded(LmCloudTransformerAdamLimitSteps):
    """The pmap experiment, its weights split over a mesh of 2 × 2 × 2."""

    ICI_MESH_SHAPE: list[int] | None = [2, 2, 2]

    partitioner = spmd


WRITERS = {
    "pmap, one file": (LmCloudTransformerAdamLimitSteps, ()),
    "pmap, TensorStore": (LmCloudTransformerAdamLimitSteps, ("--pmap_use_tensorstore=True",)),
    "SPMD": (Sharded, ()),
}


@dataclasses.dataclass(frozen=True)
class Written:
    """A finished run and what it was."""

    job: Any
    cls: type
    flags: tuple[str, ...]


def started(cls: type, job: Any, *flags: str, mode: str = "train") -> Job:
    """Return a job of a class, with the fields and folders of the command line of `job`."""
    resolved, options = understood(cls, job, *flags)
    return start_job(mode, resolved, options)


def understood(cls: type, job: Any, *flags: str) -> Any:
    parsed = parse_flags(job.arguments(*flags))
    fields = parse_fields(cls.__name__, experiment_fields(cls), parsed.overrides)
    return resolve(cls(**fields)), parsed.options


def losses(job: Any) -> dict[int, float]:
    """By step."""
    return {record["step"]: record["loss"] for record in read_metrics(job.folder).train}


@pytest.fixture(
    scope="module",
    params=[
        # One writer in the ordinary tests, which the other partitioner restores.
        name if name == "pmap, one file" else pytest.param(name, marks=pytest.mark.slow)
        for name in WRITERS
    ],
)
def written(request: pytest.FixtureRequest, jobs: Any, tmp_path_factory: Any) -> Written:
    cls, flags = WRITERS[request.param]
    job = jobs.make(EXP, tmp_path_factory.mktemp("written") / "job", MAX_STEPS=LAST)
    assert run_train(*understood(cls, job, *flags)) == 0
    return Written(job, cls, flags)


def test_checkpoints_have_the_requested_format(written: Written):
    state = written.job.checkpoints / f"checkpoint_{STEPS:08d}" / "state"
    is_one_file = written.cls is not Sharded and not written.flags
    assert (state / "state.msgpack").exists() == is_one_file
    assert (state / "manifest.ocdbt").exists() != is_one_file


@pytest.mark.parametrize("reader", [LmCloudTransformerAdamLimitSteps, Sharded])
def test_restores_into_pmap_and_into_spmd(
    written: Written, reader: type, jobs: Any, tmp_path: Path
):
    job = started(reader, jobs.make(EXP, tmp_path / "job"))
    with job.checkpoints(read_only=True, directory=str(written.job.folder)) as checkpoints:
        restored = job.restore(checkpoints, STEPS)
    stored = jobs.read_checkpoint(written.job, STEPS)
    leaves = jax.tree.leaves(restored.state)
    # The stored leaves are nested dicts, whose order is that of the names.
    for path, leaf in by_name(restored.state).items():
        np.testing.assert_array_equal(leaf, by_name(stored.leaves)[path])
    assert len(leaves) == len(stored.leaves)
    abstract = jax.tree.leaves(job.abstract_state())
    assert [leaf.sharding for leaf in leaves] == [leaf.sharding for leaf in abstract]
    split = [not leaf.is_fully_replicated for leaf in leaves]
    assert any(split) == (reader is Sharded)


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by the words of their paths, however each tree spells a path."""
    if isinstance(tree, dict):
        pairs = tree.items()
    else:
        pairs = [(jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(tree)]
    table = str.maketrans("[]'.", "    ")
    return {"/".join(path.translate(table).split()): np.asarray(leaf) for path, leaf in pairs}


def test_training_resumes_under_the_other_partitioner(written: Written, jobs: Any, tmp_path: Path):
    reader = LmCloudTransformerAdamLimitSteps if written.cls is Sharded else Sharded
    job = jobs.make(EXP, tmp_path / "job", MAX_STEPS=LAST)
    flags = f"--restore_checkpoint_dir={written.job.folder}", f"--restore_checkpoint_step={STEPS}"
    assert run_train(*understood(reader, job, *flags)) == 0
    whole = losses(written.job)
    expected = {step: whole[step] for step in range(STEPS + 1, LAST + 1)}
    assert losses(job) == pytest.approx(expected, rel=1e-5)
