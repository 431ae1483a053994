"""A process is killed with SIGKILL inside a save; the next one finds the checkpoints in order.

The moment is not a guess at a time but something seen on disk: the parent watches the folder and
kills when the save has got so far.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy, StateFormat

SLOW = pytest.mark.slow
SAVER = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy, StateFormat

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
spec = PartitionSpec("data") if sys.argv[2] == "tensorstore" else PartitionSpec()
manager = CheckpointManager(
    sys.argv[1],
    policy=CheckpointPolicy(save_interval_steps=1),
    state_format=StateFormat(sys.argv[2]),
)
for step in range(1, 100):
    noise = np.random.default_rng(step)  # so that compression does not make the save short
    state = {str(i): noise.standard_normal((8, 2**17), np.float32) for i in range(4)}  # 16 MiB
    state = jax.device_put(state, NamedSharding(mesh, spec))
    manager.save(step, state, input_states={"train": {"step": step}}, metadata={})
"""


def state_at(step: int) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(step)
    return {str(i): noise.standard_normal((8, 2**17), np.float32) for i in range(4)}


def unfinished(directory: Path) -> list[Path]:
    return list(directory.glob("checkpoint_*.orbax-checkpoint-tmp*"))


def data_is_written(folder: Path) -> bool:
    files = (path for path in folder.glob("state*/**/*") if path.is_file())
    return any(path.stat().st_size > 2**16 for path in files)


# Whether the save in an unfinished folder has reached a moment.
MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the folder has been made": lambda folder: True,
    "arrays are being written": data_is_written,
    "the manifest is being written": lambda folder: (folder / "state/commit_success.txt").exists(),
}


def kill_at(directory: Path, state_format: StateFormat, is_reached: Callable[[Path], bool]) -> None:
    """Lets a process save step after step, and kills it at the moment, but not before step 2."""

    def holds() -> bool:
        try:
            return any(map(is_reached, unfinished(directory)))
        except FileNotFoundError:  # renamed while we looked
            return False

    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(directory), state_format.value])
    deadline = time.monotonic() + 60
    try:
        while True:
            assert saver.poll() is None and time.monotonic() < deadline
            if not ((directory / "checkpoint_00000001").exists() and holds()):
                continue
            # The save may have moved on meanwhile: look again while it stands still.
            saver.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, saver.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if holds():
                return
            saver.send_signal(signal.SIGCONT)
    finally:
        saver.kill()
        saver.wait()


@pytest.mark.parametrize(
    ("state_format", "moment"),
    [
        pytest.param(StateFormat.TENSORSTORE, "the folder has been made", marks=SLOW),
        (StateFormat.TENSORSTORE, "arrays are being written"),
        pytest.param(StateFormat.TENSORSTORE, "the manifest is being written", marks=SLOW),
        pytest.param(StateFormat.MSGPACK, "arrays are being written", marks=SLOW),
        pytest.param(StateFormat.MSGPACK, "the manifest is being written", marks=SLOW),
    ],
)
def test_a_killed_save_costs_no_committed_step_and_is_cleaned_up(tmp_path, state_format, moment):
    directory = tmp_path / "checkpoints"
    kill_at(directory, state_format, MOMENTS[moment])
    [left_over] = unfinished(directory)

    lines: list[str] = []
    policy = CheckpointPolicy(save_interval_steps=1)
    with CheckpointManager(directory, policy=policy, report=lines.append) as manager:
        assert not unfinished(directory)
        assert lines == [f"Deleted the unfinished checkpoint {left_over} of a killed save."]
        step = manager.newest_sound_step()
        assert step is not None and step == manager.latest_step()
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        leaf = jax.ShapeDtypeStruct((8, 2**17), jnp.float32, sharding=one)
        expected = state_at(step)
        restored = manager.restore(step, dict.fromkeys(expected, leaf))
        jax.tree.map(np.testing.assert_array_equal, restored.state, expected)
        assert restored.input_states == {"train": {"step": step}}
        # The step that was lost is saved anew.
        assert manager.save(step + 1, restored.state, input_states={}, metadata={})
        manager.wait_until_finished()
        assert manager.newest_sound_step() == step + 1
    assert len(lines) == 1


KILLED_AFTER_THE_CHECK = """
import os, signal, sys
import jax.numpy as jnp
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy, stored_state

finish = stored_state.FiniteCheck.nonfinite

def finish_and_die(check):
    result = finish(check)
    os.kill(os.getpid(), signal.SIGKILL) if step == 2 else None
    return result

stored_state.FiniteCheck.nonfinite = finish_and_die
manager = CheckpointManager(sys.argv[1], policy=CheckpointPolicy(save_interval_steps=1))
for step in (1, 2):
    manager.save(step, {"w": jnp.full(4, step)}, input_states={}, metadata={})
    manager.wait_until_finished()
"""


@pytest.mark.slow  # one kill is above
def test_kill_between_finite_check_and_commit_loses_no_committed_step(tmp_path):
    saver = subprocess.run([sys.executable, "-c", KILLED_AFTER_THE_CHECK, str(tmp_path)])
    assert saver.returncode == -signal.SIGKILL
    [left_over] = unfinished(tmp_path)
    assert left_over.name.startswith("checkpoint_00000002")
    with CheckpointManager(tmp_path, report=lambda line: None) as manager:
        assert manager.newest_sound_step() == 1
    assert not unfinished(tmp_path)
