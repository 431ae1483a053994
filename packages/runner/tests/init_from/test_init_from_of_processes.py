"""Two real processes begin from one checkpoint, each with its own part of the values."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAM = """
import json, sys
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
import conftest
import numpy as np
from layerkit_runner.init_from import plan_first_state
begin = conftest.init_from({"folder": sys.argv[4], "opt_state_rules": [(".*", r"\\g<0>")]})
partitioner, task = conftest.bound(conftest.Deep.HParams.config(), [1, 4, 1], begin=begin)
first = plan_first_state(partitioner, task)()
for path, leaf in conftest.named_leaves(first.state).items():
    for shard in leaf.addressable_shards:
        index = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape)]
        print(json.dumps(["/".join(path), index, np.asarray(shard.data).tolist()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("one_file", [False, True], ids=["tensorstore", "msgpack"])
def test_each_process_holds_its_part(begin: Any, tmp_path: Path, one_file: bool):
    state = begin.filled_state(begin.model())
    begin.save(tmp_path, state, one_file=one_file)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "32"}
    here = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(i), here, str(tmp_path)],
            env={**os.environ, **devices},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        told = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], told
    expected, held = begin.leaves(state), {}
    for number, (out, _) in enumerate(told):
        for line in out.splitlines():
            if line.startswith('["'):  # Gloo writes lines of its own
                name, index, values = json.loads(line)
                held[number, name, str(index)] = values
                required = expected[name][tuple(slice(*bounds) for bounds in index)]
                if name != "step":  # which is not loaded
                    np.testing.assert_array_equal(np.array(values, required.dtype), required)
    matrix = {
        (number, index) for number, name, index in held if name == "params/stack/sub/linear/w"
    }
    rows = {0: ([0, 2], [2, 4]), 1: ([4, 6], [6, 8])}
    assert matrix == {(n, str([[0, 2], part, [0, 8]])) for n in rows for part in rows[n]}
