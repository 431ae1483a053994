"""Input states by process; two real processes that save, and one that restores."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from layerkit_runner.checkpointing import CheckpointManager, ProcessCountError, folders


def written_by_two(folder, states) -> epath.Path:
    directory = epath.Path(folder)
    (directory / "input_states").mkdir()
    for index, state in enumerate(states):
        path = directory / f"input_states/process_{index:05d}_of_00002.json"
        path.write_text(json.dumps(state))
    return directory


def test_global_input_state_is_restored_by_another_number_of_processes(tmp_path):
    states = [{"train": {"scope": "global", "position": 8}, "eval": {"scope": "global"}}] * 2
    directory = written_by_two(tmp_path, states)
    restored = folders.read_input_states(directory)
    assert restored == states[0]


def test_local_input_state_is_an_error_for_another_number_of_processes(raises, tmp_path):
    state = {"eval": {"scope": "global"}, "train": {"position": 8}, "extra": [1]}
    directory = written_by_two(tmp_path, [state, state])
    with raises(ProcessCountError, value=1):
        folders.read_input_states(directory)


TWO_PROCESSES = """
import json, os, sys
index, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(f"localhost:{port}", 2, index)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy, integrity
from layerkit_runner.errors import NonFiniteError

hashed, hash_file = [], integrity._hash_file
integrity._hash_file = lambda path, *name: hashed.append(str(path)) or hash_file(path, *name)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec("data"))
rows = np.arange(32, dtype=np.float32).reshape(8, 4)
policy = CheckpointPolicy(save_interval_steps=1)
lines = []
with CheckpointManager(directory, policy=policy, report=lines.append) as manager:
    state = {"w": jax.make_array_from_callback(rows.shape, split, lambda at: rows[at])}
    for step in (1, 2):
        own = {"scope": "global", "process": index}
        inputs = {"train": {"scope": "global", "position": step}, "own": own}
        manager.save(step, state, input_states=inputs, metadata={})
    manager.wait_until_finished()
    saved, hashed[:] = sorted(hashed), []
    if index == 0:
        folder = f"{directory}/checkpoint_00000002/state/ocdbt.process_1/d"
        os.remove(os.path.join(folder, os.listdir(folder)[0]))
    target = {"w": jax.ShapeDtypeStruct(rows.shape, jnp.float32, sharding=split)}
    restored = manager.restore_newest(target)
    mine = [np.asarray(shard.data).tolist() for shard in restored.state["w"].addressable_shards]
    rows[-1, -1] = np.nan  # held by process 1
    bad = {"w": jax.make_array_from_callback(rows.shape, split, lambda at: rows[at])}
    manager.save(3, bad, input_states={}, metadata={})
    try:
        manager.should_save(4)
        nonfinite = ""
    except NonFiniteError as error:
        nonfinite = str(error)
    answer = {"step": restored.step, "mine": mine, "inputs": restored.input_states, "lines": lines}
    answer["nonfinite"] = nonfinite
    print(json.dumps({**answer, "saved": saved, "verified": hashed}))
"""


def check_who_hashed(answers, directory):
    """Each process hashed what it wrote, and verified what no other process verified."""
    assert answers[1]["saved"]
    assert all("/ocdbt.process_1/" in path for path in answers[1]["saved"])
    assert not any("/ocdbt.process_1/" in path for path in answers[0]["saved"])
    assert len({*answers[0]["saved"]}) == len(answers[0]["saved"])
    verified = [set(answer["verified"]) for answer in answers]
    assert not verified[0] & verified[1]
    for step in ("checkpoint_00000001", "damaged_checkpoint_00000002"):
        manifest = json.loads((directory / step / "integrity/manifest.json").read_text())
        names = manifest["manifest"]["files"]
        assert any("/ocdbt.process_1/" in name for name in names)
        assert any("/ocdbt.process_0/" in name for name in names)
        where = directory / step.removeprefix("damaged_")
        assert {str(where / name) for name in names} <= verified[0] | verified[1]
        for each in verified:
            assert 0 < len({str(where / name) for name in names} & each) < len(names)


def test_two_processes_save_together_agree_on_the_sound_step_and_one_takes_over(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(index), port, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    answers = [json.loads(output.splitlines()[-1]) for output in outputs]
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    for index, answer in enumerate(answers):
        assert answer["step"] == 1  # step 2 lost a file of process 1
        assert answer["inputs"]["train"]["position"] == 1
        assert answer["inputs"]["own"]["process"] == index  # each its own
        np.testing.assert_array_equal(
            np.concatenate(answer["mine"]), rows[4 * index : 4 * index + 4]
        )
    assert [len(answer["lines"]) for answer in answers] == [1, 0]
    assert "state/ocdbt.process_1/d/" in answers[0]["lines"][0]
    check_who_hashed(answers, tmp_path)
    assert "step 3" in answers[0]["nonfinite"]
    assert answers[0]["nonfinite"] == answers[1]["nonfinite"]
    assert not (tmp_path / "checkpoint_00000003").exists()

    target = {
        "w": jax.ShapeDtypeStruct(
            (8, 4), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
    }
    with CheckpointManager(tmp_path) as manager:
        restored = manager.restore(manager.newest_sound_step(), target)
    np.testing.assert_array_equal(restored.state["w"], rows)
    assert restored.input_states["own"]["process"] == 0
