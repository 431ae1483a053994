"""Steps that are not finite or spikes: skip, stop and rollback, also in runs that are killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from layerkit_runner import UsageError
from layerkit_runner.checkpointing import folders, handlers
from layerkit_runner.errors import NonFiniteError
from layerkit_runner.observers import read_metrics
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run.training_run import run_train
from layerkit_runner.run_options import RunOptions
from layerkit_runner.tools.report.record import read_jobs

NAN = {"ON_NONFINITE": "rollback"}
SPIKE = {"ON_SPIKE": "rollback", "SCALE": 1000.0}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def bad() -> ModuleType:
    """Return the module of the experiment, which other processes import too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import rollback_experiment

        return rollback_experiment


@pytest.fixture
def train(bad: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that trains in a folder of this name and returns what was printed."""

    def run(name: str, *, saves: bool = True, **fields: Any) -> str:
        options = RunOptions(
            job_log_dir=str(tmp_path / name),
            jax_compilation_cache="off",
            enable_checkpoint_saving=saves,
        )
        assert run_train(resolve(bad.Bad(**fields)), options) == 0
        return capsys.readouterr().out

    return run


def computed(folder: Path, first: int = 1) -> dict[int, Any]:
    """Return the computed values of each step from `first` on."""
    names = ("loss", "learning/raw_grad_norm", "learning/var_norm", "learning/is_valid_step")
    records = read_metrics(folder).train
    return {r["step"]: [r[name] for name in names] for r in records if r["step"] >= first}


def stored(folder: Path) -> dict[tuple[str, ...], bytes]:
    """Return the bits of the last checkpoint by leaf."""
    state = folders.step_folder(epath.Path(folder) / "checkpoints", 22) / "state"
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=device)
        for path, spec in handlers.stored_leaves(state).items()
    }
    leaves = handlers.read_state(state, targets)
    return {path: np.asarray(leaf).tobytes() for path, leaf in leaves.items()}


def rollbacks(folder: Path) -> Any:
    about = folders.read_metadata(folders.step_folder(epath.Path(folder) / "checkpoints", 22))
    return about["user"].get("skipped_steps", {}).get("rollbacks")


@pytest.mark.parametrize(
    "under_pmap", [False, pytest.param(True, marks=SLOW)], ids=["SPMD", "pmap"]
)
@pytest.mark.parametrize(
    ("fields", "step", "bad_step"),
    [pytest.param(NAN, 8, 14, marks=SLOW), (SPIKE, 8, 14), pytest.param(NAN, 0, 3, marks=SLOW)],
    ids=["NaN", "spike", "before any save"],
)
def test_run_rolled_back_equals_one_whose_data_lack_the_window(
    train: Any, tmp_path: Path, fields: Any, step: int, bad_step: int, *, under_pmap: bool
):
    fields = {**fields, "BAD": (bad_step,), "UNDER_PMAP": under_pmap}
    if step:
        train("job", **fields, MAX_STEPS=step)
        shutil.copytree(tmp_path / "job", tmp_path / "lacking")
    printed = train("job", **fields)
    assert f"rolled back to step {step}: the data of steps {step + 1} to {bad_step}" in printed
    assert f"rolled back, without the data of steps {step + 1} to {bad_step}\n" in printed
    lacking = {**fields, "LEFT_OUT": (step, bad_step - step)}
    assert "rolled back" not in train("lacking", **lacking)
    ours, reference = tmp_path / "job", tmp_path / "lacking"
    assert computed(ours, step + 1) == computed(reference, step + 1)
    assert list(computed(ours)) == list(range(1, 23))
    assert stored(ours) == stored(reference)
    assert (("spikes", "values") in stored(ours)) == ("ON_SPIKE" in fields)
    assert rollbacks(ours) == [{"step": step, "last_step": bad_step}]
    (event,) = [e for e in read_metrics(ours).events if e["event"] == "rollback"]
    assert (event["step"], event["last_step"]) == (step, bad_step)
    assert f"rolled back to step {step}" in list(read_jobs([ours])[0].notes())
    goodput = json.loads((ours / "goodput.json").read_text())
    assert (goodput["num_steps"], goodput["num_lost_steps"]) == (22, bad_step - step)


@pytest.mark.slow
def test_rollback_over_the_border_of_a_stage_continues_in_the_stage_before_it(
    train: Any, tmp_path: Path
):
    """Steps 9 and 10 have batches of 8 rows, later ones of 16; the 17th 8 rows are bad."""
    fields, stages = {**NAN, "BAD": (17,)}, [{"until_step": 10}, {"until_step": 22, "batch": 16}]
    train("job", **fields, MAX_STEPS=8)
    ours, reference = tmp_path / "job", tmp_path / "lacking"
    shutil.copytree(ours, reference)
    train("job", **fields, STAGES=stages)
    train("lacking", **fields, STAGES=stages, LEFT_OUT=(8, 10))
    assert rollbacks(ours) == [{"step": 8, "last_step": 14}] and rollbacks(reference) is None
    assert computed(ours, 9) == computed(reference, 9)
    assert stored(ours) == stored(reference)


@pytest.mark.parametrize("kind", ["NaN", pytest.param("spike", marks=SLOW)])
def test_bad_step_is_skipped_or_ends_the_run(train: Any, tmp_path: Path, kind: str):
    fields = {"SCALE": 1000.0} if kind == "spike" else {}
    name = "ON_SPIKE" if kind == "spike" else "ON_NONFINITE"
    printed = train("skip", **fields, **{name: "skip"})
    assert "WARNING: step 14: " in printed and "not valid: 1 of 22 steps" in printed
    with pytest.raises(NonFiniteError, match="stopped after step 14.*is 'stop'") as caught:
        train("stop", **fields, **{name: "stop"})
    assert caught.value.exit_code == 65
    train("stop", **fields, **{name: "stop"})
    assert computed(tmp_path / "stop").keys() == computed(tmp_path / "skip").keys()
    np.testing.assert_array_equal(
        [*computed(tmp_path / "stop").values()], [*computed(tmp_path / "skip").values()]
    )


def test_rollback_beyond_the_limit_ends_the_run(train: Any, tmp_path: Path):
    """Check bad batches in step 6, then 7 and then 2 of the attempts from step 0."""
    fields = {**NAN, "BAD": (6, 13, 15), "MAX_ROLLBACKS": 2}
    with pytest.raises(NonFiniteError, match="after step 2.*max_rollbacks=2") as caught:
        train("job", **fields)
    assert caught.value.exit_code == 65
    windows = [{"step": 0, "last_step": 6}, {"step": 0, "last_step": 7}]
    events = [e for e in read_metrics(tmp_path / "job").events if e["event"] == "rollback"]
    assert [{"step": e["step"], "last_step": e["last_step"]} for e in events] == windows
    # The step is skipped, so that the run may be resumed, without another rollback.
    train("job", **fields)
    assert rollbacks(tmp_path / "job") == windows


def test_rollback_without_checkpoints_is_an_error(train: Any, raises: Any, tmp_path: Path):
    with raises(UsageError, field="--enable_checkpoint_saving", value=False):
        train("job", **NAN, saves=False)
    assert not (tmp_path / "job").exists()


@pytest.mark.slow
def test_run_may_begin_and_end_to_look_for_spikes(train: Any, tmp_path: Path):
    for max_steps, action in ((8, None), (16, "skip"), (22, None)):
        train("job", MAX_STEPS=max_steps, ON_SPIKE=action, SCALE=1000.0)
    is_valid = {step: values[-1] for step, values in computed(tmp_path / "job").items()}
    assert [step for step, value in is_valid.items() if not value] == [14]


@pytest.mark.parametrize(
    "moments",
    [
        ["rollback"],
        pytest.param(["bad step", "SIGTERM", "moved", "rollback", "later"], marks=SLOW),
    ],
    ids=len,
)
def test_run_killed_in_a_rollback_equals_an_uninterrupted_one(
    processes: Any, train: Any, tmp_path: Path, moments: list[str]
):
    """The runs that are not killed have no process of their own."""
    exp = {"exp": "rollback_experiment.Bad", **NAN}
    processes.num_devices = jax.device_count()
    train("whole", **NAN)
    for moment in moments:
        code = 143 if moment == "SIGTERM" else -9
        processes.ended(processes.start(**exp, KILLED_AT=moment), code)
    assert "rolled back to step 8" in train(processes.folder.name, **NAN)
    whole = tmp_path / "whole"
    assert computed(processes.folder) == computed(whole)
    assert stored(processes.folder) == stored(whole)
    assert rollbacks(processes.folder) == rollbacks(whole)
    aside = [path.name for path in (processes.folder / "checkpoints").glob("abandoned_*")]
    assert len(aside) == ("moved" in moments)


@SLOW
@pytest.mark.parametrize("under_pmap", [False, True], ids=["SPMD", "pmap"])
@pytest.mark.parametrize("kind", [NAN, SPIKE], ids=["NaN", "spike"])
def test_two_processes_roll_back_like_one(
    processes: Any, train: Any, tmp_path: Path, kind: Any, *, under_pmap: bool
):
    """The last process has the bad rows; process 0 is killed once, after the rollback."""
    exp = {"exp": "rollback_experiment.Bad", **kind, "UNDER_PMAP": under_pmap}
    first, second = processes.start_two(**exp, KILLED_AT="rollback")
    processes.ended(first, -9)
    assert second.wait(60) != 0
    for process in processes.start_two(**exp):
        output = processes.ended(process)
        assert "rolled back to step 8" in output or process.args[-1] != "--process_id=0"
    train("alone", **kind, BATCH_SIZE=16, UNDER_PMAP=under_pmap)
    ours, alone = computed(processes.folder), computed(tmp_path / "alone")
    assert ours.keys() == alone.keys()
    np.testing.assert_allclose([*ours.values()], [*alone.values()], rtol=1e-4)
    assert rollbacks(processes.folder) == rollbacks(tmp_path / "alone")
