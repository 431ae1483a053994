"""`runner launch slurm` on a real Slurm: two processes that are requeued and resume.

The tests need Slurm and munge (Debian: `apt-get install slurm-wlm`), and root to start the daemons;
elsewhere they are skipped. The cluster is one node, this machine, with its daemons, keys and state
in a temporary folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
# The PATH of a user may lack the folders of daemons.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
TIMEOUT = 600.0
STEPS = 400
FIELDS = {
    "MAX_STEPS": STEPS,
    "EVAL_INTERVAL_STEPS": STEPS,
    "CHECKPOINT_EVERY_N_STEPS": 50,
    "ICI_MESH_SHAPE": "[2,1,1]",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: apt-get slurm-wlm"),
    pytest.mark.skipif(os.getuid() != 0, reason="Slurm's daemons are started by root"),
]

# Containers offer no cgroups. Credentials are short-lived, since Slurm delays a requeued job until
# those of its last start have expired.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=60
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Slurm cluster of one node."""

    environment: dict[str, str]

    def call(self, *words: str) -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        """Return the state of a job, such as `PENDING`, `RUNNING` or `COMPLETED`."""
        return self._shown(job, "JobState")

    def restarts(self, job: str) -> int:
        """Return how often a job was requeued."""
        return int(self._shown(job, "Restarts"))

    def exit_code(self, job: str) -> int:
        """Return the exit code of the batch script of a job."""
        return int(self._shown(job, "ExitCode").partition(":")[0])

    def _shown(self, job: str, name: str) -> str:
        match = re.search(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", job))
        assert match is not None
        return match[1]


def wait_for(condition: Callable[[], bool], message: Callable[[], str]) -> None:
    """Wait until `condition` holds; fail with `message` after ten minutes."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().partition(".")[0]
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=host, folder=folder, controller_port=free_port(), node_port=free_port()
        )
    )
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(configuration)}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]]
    with contextlib.ExitStack() as running:
        for words in daemons:
            log = running.enter_context(open(folder / f"{words[0]}.out", "w"))
            daemon = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
            running.callback(daemon.wait)
            running.callback(daemon.terminate)
            if words is munge:
                wait_for((folder / "munge.socket").exists, lambda: "munged does not start")
        made = Cluster(environment)

        def is_up() -> bool:
            words = ["sinfo", "--noheader", "--format=%T"]
            done = subprocess.run(words, env=environment, capture_output=True, text=True)
            return done.stdout.strip() == "idle"

        wait_for(is_up, lambda: (folder / "slurmctld.log").read_text()[-3000:])
        yield made


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of two processes, submitted as a job."""

    cluster: Cluster
    job: Any
    number: str

    def output(self) -> str:
        """Return the output of all starts of the job."""
        path = self.job.folder / "launch" / f"slurm-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_steps(self) -> None:
        """Wait until the run has logged 20 steps."""
        wait_for(lambda: max(self.job.steps_logged(), default=0) >= 20, self.output)

    def wait_for_state(self, state: str) -> None:
        """Wait until the job is in a state."""
        wait_for(lambda: self.cluster.state(self.number) == state, self.output)


@pytest.fixture
def submit(cluster: Cluster, jobs, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that submits a small run; cancel the remaining jobs at the end."""
    submitted = []

    def start(*flags: str, **fields: object) -> Run:
        job = jobs.make("lm.quickstart.LocalText", tmp_path / "run", **{**FIELDS, **fields})
        words = ["launch", "slurm", "--nodes=1", "--processes_per_node=2", *flags]
        done = subprocess.run(
            [sys.executable, "-m", "layerkit_runner.cli", *words, *job.arguments()],
            env={**cluster.environment, "XLA_FLAGS": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        match = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert match is not None, done.stdout
        submitted.append(match[1])
        return Run(cluster, job, match[1])

    yield start
    for number in submitted:
        subprocess.run(["scancel", number], env=cluster.environment, capture_output=True)


def test_requeued_job_resumes_and_completes(submit):
    run = submit()
    run.wait_for_steps()
    run.cluster.call("scontrol", "requeue", run.number)
    reached = max(run.job.steps_logged())
    run.wait_for_state("COMPLETED")
    assert run.cluster.restarts(run.number) == 1
    assert run.cluster.exit_code(run.number) == 0
    output = run.output()
    assert output.count("processes    2, found by Slurm") == 2
    assert "SIGTERM: finishing this step, saving, leaving" in output
    steps = run.job.steps_logged()
    assert steps[-1] == STEPS and reached >= 20
    # It saved before the requeue, so no step is repeated.
    assert steps == sorted(set(steps))


def test_job_saves_and_is_requeued_at_its_time_limit(submit):
    """The test sends the signal of the time limit itself, since limits are whole minutes."""
    run = submit("--time=60")
    run.wait_for_steps()
    run.cluster.call("scancel", "--batch", "--signal=USR1", run.number)
    run.wait_for_state("COMPLETED")
    output = run.output()
    assert "launch: time limit reached" in output
    assert run.cluster.restarts(run.number) == 1
    steps = run.job.steps_logged()
    assert steps[-1] == STEPS and steps == sorted(set(steps))


def test_killed_process_is_restarted_in_the_same_job(submit):
    run = submit()
    run.wait_for_steps()
    log = (run.job.folder / "logs" / "process_0001.log").read_text()
    words = ["scontrol", "listpids", run.number]
    processes = [line.split() for line in run.cluster.call(*words).splitlines()[1:]]
    victim = next(int(pid) for pid, _, step, local, *_ in processes if (step, local) == ("0", "1"))
    os.kill(victim, signal.SIGKILL)
    run.wait_for_state("COMPLETED")
    assert run.cluster.restarts(run.number) == 0
    output = run.output()
    assert re.search(r"launch: exit code \d+; restart 1 of 3", output)
    assert " is lost: " in output
    assert run.job.steps_logged()[-1] == STEPS
    assert log


def test_wrong_field_that_only_the_run_detects_ends_the_job(submit):
    run = submit(**{"task.train.save_best_metric": "held_out/loss"})
    run.wait_for_state("FAILED")
    assert run.cluster.exit_code(run.number) == 2
    assert run.job.steps_logged() == []
