"""Fields and flags of checkpoints, over several runs of a job."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from layerkit.config import Config, Partial
from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.checkpointing import folders, integrity
from layerkit_runner.run.job import start_job
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Tiny(BaseExperiment):
        MAX_STEPS: int = 6
        DTYPE: str = "float32"

        def task(self) -> Config:
            train = {
                "num_train_steps": self.MAX_STEPS,
                "save_interval_steps": 2,
                "eval_interval_steps": 2,
                "save_max_to_keep": 1,
                "save_keep_steps": (3,),
                "save_step_zero": True,
                "save_keep_interval_steps": 100,
            }
            return tiny.task_config(
                learner={"optimizer": Partial(optax.adam), "learning_rate": 0.01},
                train=train,
                dtype=jnp.dtype(self.DTYPE),
            )

        def datasets(self) -> list[Config]:
            points = tiny.Points.HParams
            return [
                points.config(name="train", is_training=True, percore_batch_size=1.0),
                points.config(name="heldout", percore_batch_size=1.0),
            ]

    return Tiny


@pytest.fixture(scope="module")
def trained(experiment: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    assert run_train(resolve(experiment()), options(folder)) == 0
    return folder


def options(folder: Path, **more: Any) -> RunOptions:
    return RunOptions(job_log_dir=str(folder), jax_compilation_cache="off", **more)


def steps(folder: Path) -> list[int]:
    return folders.committed_steps(epath.Path(folder / "checkpoints"))


def test_fields_decide_which_steps_are_saved_and_kept(trained: Path):
    # Step 0 is a multiple of all, step 3 is named, step 6 is the newest.
    assert steps(trained) == [0, 3, 6]


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the trained job, for damage."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def truncate_all(checkpoints: Path) -> None:
    for manifest in checkpoints.glob("*/integrity/manifest.json"):
        manifest.write_text("")


@pytest.mark.parametrize(
    "lose", [shutil.rmtree, pytest.param(truncate_all, marks=pytest.mark.slow)]
)
def test_job_that_lost_its_checkpoints_restarts_only_when_allowed(
    experiment: Any, copy: Path, lose: Callable[[Path], None]
):
    lose(copy / "checkpoints")
    before = (copy / "metrics.jsonl").read_bytes()
    for _ in range(2):
        with pytest.raises(UsageError):
            run_train(resolve(experiment()), options(copy))
    assert (copy / "metrics.jsonl").read_bytes() == before
    assert run_train(resolve(experiment()), options(copy, allow_restart_from_scratch=True)) == 0
    assert steps(copy) == [0, 3, 6]


def test_state_of_another_step_is_an_error_without_a_number_in_the_manifest(
    experiment: Any, copy: Path
):
    """As a copy of a step that an earlier version wrote, under another number."""
    checkpoints = copy / "checkpoints"
    step = (checkpoints / "checkpoint_00000006").rename(checkpoints / "checkpoint_00000007")
    integrity.write(epath.Path(step))
    path = step / "integrity/manifest.json"
    body = json.loads(path.read_text())["manifest"]
    del body["step"]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"digest": digest, "manifest": body}))
    job = start_job("eval", resolve(experiment()), options(copy))
    wrong = pytest.raises(UsageError, match="checkpoint_00000007")
    with job.checkpoints(read_only=True) as checkpoints, wrong:
        job.restore(checkpoints, 7)


def test_checkpoints_that_are_a_file_are_an_error(raises: Any, experiment: Any, tmp_path: Path):
    (tmp_path / "checkpoints").write_text("")
    with raises(UsageError, owner=str(tmp_path / "checkpoints")):
        run_train(resolve(experiment()), options(tmp_path))


def test_evaluation_reads_no_state_of_the_optimizer(experiment: Any, trained: Path):
    job = start_job("eval", resolve(experiment()), options(trained))
    with job.checkpoints(read_only=True) as checkpoints:
        whole = job.restore(checkpoints, 6)
        weights = job.restore(checkpoints, 6, for_training=False)
    assert jax.tree.leaves(weights.state.opt_state) == [] != jax.tree.leaves(whole.state.opt_state)
    assert weights.input_states == {} != whole.input_states
    jax.tree.map(np.testing.assert_array_equal, weights.state.params, whole.state.params)
