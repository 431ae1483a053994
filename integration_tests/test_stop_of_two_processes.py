"""A signal to one of two processes stops both, at the same step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROCESS = """
import sys
import jax
from layerkit_runner import cli

address, index, *arguments = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index))
code = cli.main(arguments)
jax.distributed.shutdown()
sys.exit(code)
"""


def test_a_signal_to_one_stops_both(jobs: Any, tmp_path: Path):
    job = jobs.make(
        "lm.lm_cloud.LmCloudSpmdTest",
        tmp_path / "job",
        num_devices=1,
        ICI_MESH_SHAPE="[2,1,1]",
        MAX_STEPS=100_000,
        SUMMARY_INTERVAL_STEPS=1,
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(index), *job.arguments()],
            env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        wait_for_a_step(job.folder / "metrics.jsonl")
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [128 + signal.SIGTERM] * 2, "\n".join(outputs)
    assert list((job.folder / "checkpoints").glob("checkpoint_*"))


def wait_for_a_step(log: Path) -> None:
    deadline = time.monotonic() + 120
    while not (log.exists() and '"loss"' in log.read_text()):
        assert time.monotonic() < deadline, "no step was logged"
        time.sleep(0.1)
