"""Training from Python: resumption, interruption, errors and what it leaves behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

import layerkit_runner
from layerkit.errors import UserError
from layerkit_runner import TrainResult


def losses(result: TrainResult) -> dict[int, float]:
    return dict(zip(result.metrics["step"], result.metrics["loss"], strict=True))


def test_run_that_ctrl_c_interrupts_is_saved_and_resumes_to_the_same_metrics(
    run: TrainResult, lines: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")

    def state() -> Any:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        own = [thread.name for thread in threading.enumerate() if "signal" in thread.name]
        return handlers, dict(os.environ), [getattr(jax.config, name) for name in settings], own

    before = state()
    folder = tmp_path / "job"
    with pytest.raises(KeyboardInterrupt, match="the same call resumes"):
        layerkit_runner.train(lines.LinesLm(INTERRUPTED_AFTER=1), job_log_dir=folder)
    assert state() == before
    # Steps are reported after later ones were started.
    (saved,) = [int(path.name[-8:]) for path in (folder / "checkpoints").glob("checkpoint_*")]
    assert 1 <= saved < 4
    assert "step 1" in capsys.readouterr().out
    resumed = layerkit_runner.train(lines.LinesLm, job_log_dir=folder, quiet=True)
    assert capsys.readouterr().out == ""
    assert losses(resumed) == losses(run) and list(losses(run)) == [1, 2, 3, 4]
    evaluated = [each.evaluations["heldout"].last()["xent"] for each in (resumed, run)]
    assert evaluated[0] == evaluated[1]
    assert resumed.model.step == 4


def test_metrics_are_a_table_of_columns(run: TrainResult):
    pandas = pytest.importorskip("pandas")
    frame = run.metrics.to_pandas()
    assert list(frame.index) == run.metrics["step"]
    assert list(frame["loss"]) == run.metrics["loss"]
    assert list(pandas.DataFrame(run.metrics)["step"]) == run.metrics["step"]


def test_num_steps_sets_the_field_of_the_experiment(lines: ModuleType):
    from layerkit_runner.interface.experiments import get_experiment, set_num_steps

    resolved = set_num_steps(get_experiment(lines.LinesLm, {"LEARNING_RATE": 0.5}), 7)
    assert resolved.experiment.overrides == {"LEARNING_RATE": 0.5, "MAX_STEPS": 7}
    edited = get_experiment(lines.LinesLm)
    edited.task.model.lm_tpl.num_layers = 3
    edited = set_num_steps(edited, 7)
    assert edited.task.model.lm_tpl.num_layers == 3
    assert edited.task.train.num_train_steps == 7


def test_wrong_arguments_raise_before_anything_is_written(
    raises: Any, lines: ModuleType, tmp_path: Path
):
    folder = tmp_path / "job"
    for arguments, data in (
        ({"overrides": {"NUM_LAYER": 1}}, {"value": "NUM_LAYER"}),
        ({"experiment": 3}, {"field": "experiment", "value": 3}),
        ({"options": {"prompt": "x"}}, {"field": "options", "value": "prompt"}),
        ({"options": {"study": "x.toml"}}, {"field": "options", "value": "study"}),
        ({"options": {"init_draw": ".*"}}, {"field": "--init_draw"}),
    ):
        with raises(UserError, **data):
            layerkit_runner.train(
                **{"experiment": lines.LinesLm, "job_log_dir": folder, **arguments}
            )
    assert not folder.exists()


def test_options_are_read_as_flags():
    from layerkit_runner.interface.training import _options

    texts = {"enable_summary_writer": "false", "restore_checkpoint_step": 3, "init_from": None}
    actual = _options("job", {**texts, "restore_checkpoint_dir": Path("other")})
    assert actual.enable_summary_writer is False and actual.only_restore_step == 3
    assert (actual.job_log_dir, actual.restore_checkpoint_dir) == ("job", "other")


def test_batches_of_a_data_set_are_those_of_the_experiment(raises: Any, lines: ModuleType):
    batches = list(layerkit_runner.input_batches(lines.LinesLm, "heldout"))
    assert len(batches) == 1 and batches[0].ids.shape == (8, 16)
    with raises(UserError, field="dataset", value="held_out"):
        next(layerkit_runner.input_batches(lines.LinesLm, "held_out"))
