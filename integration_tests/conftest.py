"""Fixtures that run small jobs by the command `runner` and read their folders.

All processes of a test session share a compilation cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from layerkit_runner import cli
from layerkit_runner.checkpointing import CheckpointManager
from layerkit_runner.checkpointing.handlers import stored_leaves

TIMEOUT = 300.0
SIZES = {
    "NUM_LAYERS": 1,
    "MODEL_DIMS": 16,
    "HIDDEN_DIMS": 32,
    "NUM_HEADS": 2,
    "DIMS_PER_HEAD": 8,
    "MAX_SEQ_LEN": 16,
    "PERCORE_BATCH_SIZE": 1.0,
    "SUMMARY_INTERVAL_STEPS": 1,
}
# Fields that make an experiment small; dropout makes the random numbers part of the result.
SMALL: dict[str, dict[str, Any]] = {
    "lm.quickstart.LocalText": {
        **SIZES,
        "DROPOUT_RATE": 0.1,
        "MAX_STEPS": 8,
        "WARMUP_STEPS": 2,
        "EVAL_INTERVAL_STEPS": 4,
        "CHECKPOINT_EVERY_N_STEPS": 3,
        "MAX_DECODE_STEPS": 4,
        "NUM_PROMPTS": 2,
        "PROMPT_LENGTH": 8,
    },
    "lm.lm_cloud.LmCloudSpmdTest": {
        **SIZES,
        "VOCAB_SIZE": 64,
        "DROPOUT_RATE": 0.1,
        "FPROP_DTYPE": "float32",
        "CHECKPOINT_EVERY_N_STEPS": 2,
        "MAX_STEPS": 16,
        "WARMUP_STEPS": 4,
        "DECAY_START": 8,
        "DECAY_END": 12,
    },
    "thirteen_examples.Thirteen": {
        **SIZES,
        "MAX_SEQ_LEN": 8,
        "VOCAB_SIZE": 32,
        "FPROP_DTYPE": "float32",
        "MAX_DECODE_STEPS": 2,
        "MAX_STEPS": 3,
        "WARMUP_STEPS": 1,
        "DECAY_START": 2,
        "DECAY_END": 3,
    },
    "lm.lm_cloud.LmCloudTransformerAdamLimitSteps": {
        **SIZES,
        "VOCAB_SIZE": 64,
        "CHECKPOINT_EVERY_N_STEPS": 2,
        "MAX_STEPS": 4,
        "WARMUP_STEPS": 2,
        "DECAY_START": 3,
        "DECAY_END": 10,
    },
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A command line, its folder and its devices.

    Attributes:
      exp: Name of the experiment.
      folder: Job folder, `--job_log_dir`.
      cache: Folder of the compilation cache.
      num_devices: Number of simulated devices.
      fields: Overrides in addition to those that make the experiment small.
      flags: Other arguments of the command.
    """

    exp: str
    folder: Path
    cache: Path
    num_devices: int = 1
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()

    def arguments(self, *more: str) -> list[str]:
        """Return the arguments of `runner`."""
        fields = {**SMALL.get(self.exp, {}), **self.fields}
        words = [f"--fdl.{name}={value}" for name, value in fields.items()]
        folders = [f"--job_log_dir={self.folder}", f"--jax_compilation_cache={self.cache}"]
        return [f"--exp={self.exp}", *words, *folders, *self.flags, *more]

    def start(self, *more: str) -> subprocess.Popen[str]:
        """Start the command as a new process."""
        return self.start_with(self.arguments(*more))

    def environment(self) -> dict[str, str]:
        """Return the environment of the tests with this job's number of devices."""
        devices = f"--xla_force_host_platform_device_count={self.num_devices}"
        return {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}"}

    def start_with(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command with these arguments and this job's devices."""
        return subprocess.Popen(
            [sys.executable, "-m", "layerkit_runner.cli", *arguments],
            cwd=Path(__file__).parent,  # where experiments of these tests are found
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @contextlib.contextmanager
    def started_as(self, count: int, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
        """Start the command as `count` processes of one job; kill them at the end of the block."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        meeting = [f"--coordinator_address={address}", f"--num_processes={count}"]
        processes = [self.start(*meeting, f"--process_id={index}", *more) for index in range(count)]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()

    def run_as(self, count: int, *more: str, code: int = 0) -> list[str]:
        """Run the command as `count` processes to the end; return the output of each."""
        with self.started_as(count, *more) as processes:
            outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        # A process may end because of another one, so all outputs are shown.
        codes = [process.returncode for process in processes]
        assert codes == [code] * count, "\n\n".join(outputs)
        return outputs

    def run(self, *more: str, code: int = 0) -> str:
        """Run the command to its end and return its output."""
        process = self.start(*more)
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == code, output
        return output

    def run_here(self, *more: str) -> int:
        """Run the command in this process, on all its devices; return the exit code."""
        return cli.main(self.arguments(*more))

    def output_here(self, *more: str) -> str:
        """Run the command in this process, on all its devices, to its end; return its output."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = self.run_here(*more)
        assert code == 0, output.getvalue()
        return output.getvalue()

    @property
    def checkpoints(self) -> Path:
        """Return the folder of its checkpoints."""
        return self.folder / "checkpoints"

    def steps_logged(self) -> list[int]:
        """Return the steps in metrics.jsonl in order of writing, including repeated ones."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [r["step"] for r in records if "event" not in r and "dataset" not in r]

    def steps_saved(self) -> list[int]:
        """Return the steps of the finished checkpoints."""
        names = (path.name for path in self.checkpoints.glob("checkpoint_????????"))
        return sorted(int(name.split("_")[1]) for name in names)

    def wait_for(self, process: subprocess.Popen[str], condition: Callable[[], Any]) -> bool:
        """Wait until `condition` holds; return False if the process ended before."""
        deadline = time.monotonic() + TIMEOUT
        while process.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(process.communicate()[0])
            time.sleep(0.002)
        return False


@dataclasses.dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint as NumPy arrays and plain values.

    Attributes:
      leaves: Arrays of the train state by path.
      input_states: States of the inputs.
    """

    leaves: dict[str, np.ndarray]
    input_states: dict[str, Any]


def read_checkpoint(job: Job, step: int) -> Saved:
    """Read a checkpoint without its experiment."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target: dict[str, Any] = {}
    folder = job.checkpoints / f"checkpoint_{step:08d}"
    for path, spec in stored_leaves(folder / "state").items():
        leaf = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=device)
        place = target
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = leaf
    with CheckpointManager(job.checkpoints, read_only=True) as manager:
        restored = manager.restore(step, target)
    leaves = jax.tree_util.tree_leaves_with_path(restored.state)
    return Saved(
        {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
        dict(restored.input_states),
    )


def assert_same_bits(ours: Saved, reference: Saved) -> None:
    """Assert that two checkpoints have bitwise equal train states and input states."""
    assert ours.leaves.keys() == reference.leaves.keys()
    for name, leaf in reference.leaves.items():
        assert ours.leaves[name].dtype == leaf.dtype
        assert ours.leaves[name].tobytes() == leaf.tobytes(), name
    assert ours.input_states == reference.input_states


def unfinished(job: Job) -> list[Path]:
    """Return the folders of unfinished saves."""
    return list(job.checkpoints.glob("*orbax-checkpoint-tmp*"))


def kill_inside_a_save(job: Job, process: subprocess.Popen[str]) -> None:
    """Kill the process while a checkpoint is half written."""
    while job.wait_for(process, lambda: unfinished(job)):
        process.send_signal(signal.SIGSTOP)
        # A stopped process cannot finish the save between this check and the kill.
        if unfinished(job):
            process.kill()
            process.communicate()
            assert unfinished(job)
            return
        process.send_signal(signal.SIGCONT)
    raise AssertionError(f"no save was seen: {process.communicate()[0]}")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compilation cache of this session."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of small texts for LocalText."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    words = ["the", "a", "cat", "dog", "tree", "river", "sees", "finds", "under", "over", "and"]
    words += ["quickly", "slowly"]
    for number in range(100):
        text = " ".join(draw.choice(words) for _ in range(60))
        (folder / f"text_{number:03d}.txt").write_text(text + "\n")
    return folder


@dataclasses.dataclass(frozen=True)
class Jobs:
    """A factory of jobs, with the functions of this file, which tests cannot import."""

    cache: Path
    text_files: Path
    read_checkpoint: Callable[[Job, int], Saved] = read_checkpoint
    assert_same_bits: Callable[[Saved, Saved], None] = assert_same_bits
    kill_inside_a_save: Callable[[Job, subprocess.Popen[str]], None] = kill_inside_a_save
    unfinished: Callable[[Job], list[Path]] = unfinished

    def make(self, exp: str, folder: Path, *flags: str, num_devices: int = 1, **fields: Any) -> Job:
        """Return a small job in `folder`."""
        if exp in ("lm.quickstart.LocalText", "text_anywhere.TextAnywhere"):
            fields = {"TEXT_FILES": f"['{self.text_files}']", **fields}
        return Job(exp, folder, self.cache, num_devices, fields, flags)


@pytest.fixture(scope="session")
def jobs(cache: Path, text_files: Path) -> Jobs:
    return Jobs(cache, text_files)


@pytest.fixture(scope="session")
def mesh_run(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a finished run of 16 steps on a mesh of 2 x 2 x 2, with every second checkpoint."""
    fields = {"ICI_MESH_SHAPE": "[2,2,2]", "task.train.eval_at_end": False}
    folder = tmp_path_factory.mktemp("mesh_run") / "job"
    job = jobs.make("lm.lm_cloud.LmCloudSpmdTest", folder, num_devices=8, **fields)
    assert job.run_here() == 0
    return job


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[str]]]:
    """Return a list for processes that are killed when the test ends."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()
