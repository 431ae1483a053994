"""Bytes that processes read in a restore, and replicated arrays that only one of them reads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

# Arguments: index, number of processes, port, folder, format. Each has two devices of its own.
PROCESS = """
import glob, json, os, sys
index, count, port, directory, form = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, index)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from layerkit_runner.checkpointing import CheckpointManager, CheckpointPolicy, StateFormat

form = StateFormat(form)
# With msgpack, as under pmap, a process holds two replicas.
shape = (count, 2) if form is StateFormat.TENSORSTORE else (2 * count, 1)
mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
specs = {"whole": P(), "split": P("fsdp"), "half": P(None, "fsdp"), "bits": P(), "own": P("data")}
if form is StateFormat.MSGPACK:
    specs = dict.fromkeys(specs, P())
draw = np.random.default_rng(0)
values = {name: draw.standard_normal((256, 1024)).astype(np.float32) for name in specs}
values["half"] = values["half"].astype(jnp.bfloat16)
values["bits"] = values["bits"].view(np.uint32)
values["whole"][:2] = [[-0.0], [np.inf]]

def place(name, value):
    sharding = NamedSharding(mesh, specs[name])
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

def is_restored(restored):
    shards = [(name, shard) for name, x in restored.items() for shard in x.addressable_shards]
    return all(
        x.sharding == NamedSharding(mesh, specs[name]) for name, x in restored.items()
    ) and all(
        np.asarray(shard.data).tobytes() == values[name][shard.index].tobytes()
        for name, shard in shards
    )

def read_bytes():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])

# Infinities are saved in this part alone.
state = {"non_trainable": {name: place(name, value) for name, value in values.items()}}
policy = CheckpointPolicy(save_interval_steps=1)
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
with CheckpointManager(directory, policy=policy, state_format=form, report=print) as manager:
    for step in (1, 2):
        manager.save(step, state, input_states={}, metadata={})
    manager.wait_until_finished()
    first = manager.restore(1, like).state["non_trainable"]  # verified; the second one is not
    before = read_bytes()
    second = manager.restore(1, like).state["non_trainable"]
    read = read_bytes() - before
    if index == 0:
        damaged = glob.glob(f"{directory}/checkpoint_00000002/state/**", recursive=True)
        os.remove(max(filter(os.path.isfile, damaged), key=os.path.getsize))
    newest = manager.restore_newest(like)
restored = [first, second, newest.state["non_trainable"]]
print(json.dumps([read, newest.step, [is_restored(one) for one in restored]]))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs Linux's counts of reads")
@pytest.mark.parametrize(
    ("count", "state_format"),
    [
        pytest.param(1, "tensorstore", marks=pytest.mark.slow),
        (2, "tensorstore"),
        pytest.param(2, "msgpack", marks=pytest.mark.slow),
    ],
)
def test_all_processes_together_read_each_byte_once(count: int, state_format: str, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", PROCESS]
    rest = [str(count), port, str(tmp_path), state_format]
    processes = [
        subprocess.Popen([*command, str(index), *rest], stdout=subprocess.PIPE, text=True)
        for index in range(count)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    answers = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert [answer[1:] for answer in answers] == [[1, [True] * 3]] * count
    state = tmp_path / "checkpoint_00000001" / "state"
    stored = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
    read = [answer[0] for answer in answers]
    # Each process also reads the head of a msgpack file, up to a MiB.
    assert 0.9 * stored < sum(read) < 1.1 * stored + count * 2**20
    if (count, state_format) == (2, "tensorstore"):
        assert max(read) < 0.7 * stored  # the replicas take turns
