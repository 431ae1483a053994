"""The batch script; integration_tests/test_slurm.py runs one on a real Slurm.

Here programs stand in for Slurm's, which only note how they were called.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch import slurm

SRUN = """\
#!/bin/bash
# Ends as the next line of `codes` says; with `wait`, ends with 143 at the signal of scancel, and
# with `wait_CODE`, with CODE.
echo started >> starts
code=$(sed -n "$(wc -l < starts)p" codes)
[[ "$code" = wait* ]] || exit "$code"
code=${code#wait}
trap 'exit ${code#_}' TERM
[ -n "$code" ] || trap 'exit 143' TERM
echo $$ > srun.pid
while :; do sleep 0.05; done
"""
SCANCEL = '#!/bin/bash\necho "scancel $*" >> calls\nkill -TERM "$(cat srun.pid)"\n'
SCONTROL = '#!/bin/bash\necho "scontrol $*" >> calls\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the script runs, with those programs."""
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(folder: Path, script: str, codes: str) -> subprocess.Popen[str]:
    (folder / "codes").write_text(codes.replace(" ", "\n") + "\n")
    script = script.replace("sleep 10", "sleep 0")
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "SLURM_JOB_ID": "47"},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for_srun(folder: Path) -> None:
    """Wait until srun has written its number, which scancel reads."""
    path = folder / "srun.pid"
    while not (path.exists() and path.read_text().endswith("\n")):
        time.sleep(0.01)


def test_the_whole_script(request_of, flags_of, check_bash):
    flags = flags_of(
        "slurm",
        *("--nodes=4", "--gpus_per_node=8", "--processes_per_node=8", "--cpus_per_process=6"),
        *("--time=1-00:00:00", "--partition=gpu", "--account=us", "--sbatch=--qos=high"),
        *("--container_image=image.sqsh", "--container_mounts=/runs:/runs"),
        *("--env=NCCL_DEBUG=INFO", "--setup=module load cuda"),
    )
    recipe = slurm.make_recipe(request_of(mesh=(8, 4)), flags)
    ((path, text),) = recipe.files.items()
    check_bash(text)
    assert path == "/runs/it's here/launch/slurm.sh"
    assert [*recipe.commands] == [["sbatch", path]]
    lines = text.splitlines()
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=myexperiment",
        f"--chdir={os.getcwd()}",
        '--output="/runs/it\'s here/launch/slurm-%j.log"',
        "--open-mode=append",
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=6",
        "--time=1-00:00:00",
        "--partition=gpu",
        "--account=us",
        "--signal=B:USR1@300",
        "--requeue",
        "--qos=high",
    ]
    # Slurm stops to read options at the first line of the script itself.
    assert lines.index("set -u") > lines.index("#SBATCH --qos=high")
    for line in (
        "export NCCL_DEBUG=INFO",
        "module load cuda",
        "  --cpus-per-task=6",
        "  --container-image=image.sqsh",
        "  --container-mounts=/runs:/runs",
        "  runner",
        "  --exp=lm.some.MyExperiment",
        "  --xla_flags_preset=gpu_latency_hiding",
    ):
        assert line in lines


def test_without_gpus_there_are_no_flags_for_them(request_of, flags_of, check_bash):
    ((_, text),) = slurm.make_recipe(request_of(), flags_of("slurm")).files.items()
    check_bash(text)
    assert "gpu" not in text


def test_before_the_time_is_up_the_run_is_told_and_the_job_queues_again(
    folder, request_of, flags_of
):
    process = start(folder, slurm.batch_script(request_of(), flags_of("slurm")), "wait")
    wait_for_srun(folder)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, "the time is up" in output) == (0, True)
    calls = (folder / "calls").read_text().splitlines()
    assert calls == ["scancel --signal=TERM 47", "scontrol requeue 47"]


@pytest.mark.parametrize("code", [0, 1, 2, 65])
def test_job_is_not_queued_again_when_its_run_ended_for_good_as_the_time_was_up(
    folder, request_of, flags_of, code
):
    script = slurm.batch_script(request_of(), flags_of("slurm"))
    process = start(folder, script, f"wait_{code}")
    wait_for_srun(folder)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert (folder / "calls").read_text().splitlines() == ["scancel --signal=TERM 47"]


@pytest.mark.parametrize(
    ("codes", "code", "starts"), [("0", 0, 1), ("2", 2, 1), ("75 137 0", 0, 3), ("143", 143, 1)]
)
def test_ends_that_are_not_of_time(folder, request_of, flags_of, codes, code, starts):
    process = start(folder, slurm.batch_script(request_of(), flags_of("slurm")), codes)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert (folder / "starts").read_text().count("started") == starts
    assert not (folder / "calls").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--gpus_per_node=8", "--processes_per_node=3"],
            "--gpus_per_node=8 cannot be split evenly over --processes_per_node=3.",
        ),
        (
            ["--nodes=2", "--gpus_per_node=8"],
            "--nodes=2 --gpus_per_node=8 make 16 devices, and the mesh of lm.some.MyExperiment has"
            " 32; set --fdl.partitioner.ici_mesh_shape and"
            " --fdl.partitioner.dcn_mesh_shape, or the devices.",
        ),
        (
            ["--time=tomorrow"],
            "--time=tomorrow: expected a time as Slurm writes it, such as 90, 12:00:00 or 2-00:00.",
        ),
        (
            ["--time=5"],
            "--time=5 is 300 s, and --save_before_end=300 would stop the run as soon as it"
            " started.",
        ),
        (["--sbatch=qos"], "--sbatch='qos'. Expected an option, as in --sbatch=--qos=high."),
        (
            ["--container_mounts=/a:/b"],
            "--container_mounts is for a container; give --container_image too.",
        ),
        (
            ["--nodes=2", "--processes_per_node=2"],
            "--nodes=2 --processes_per_node=2 without GPUs or TPUs make 4 device(s), and the mesh"
            " of lm.some.MyExperiment has 32; give --gpus_per_node, or set"
            " --fdl.partitioner.ici_mesh_shape and --fdl.partitioner.dcn_mesh_shape.",
        ),
    ],
)
def test_flags_that_do_not_fit(request_of, flags_of, monkeypatch, flags, message):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # that of the tests makes devices of the CPU
    with pytest.raises(UsageError) as error:
        slurm.make_recipe(request_of(mesh=(8, 4)), flags_of("slurm", *flags))
    assert str(error.value) == message


@pytest.mark.parametrize(
    "flags",
    [
        ["--nodes=8", "--processes_per_node=4"],  # a device of CPU each
        ["--sbatch=--gres=gpu:8", "--nodes=4"],
        ["--sbatch=--exclusive", "--nodes=4"],
        ["--env=XLA_FLAGS=--xla_force_host_platform_device_count=32"],
    ],
)
def test_a_mesh_without_gpus_per_node(request_of, flags_of, monkeypatch, flags):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert slurm.make_recipe(request_of(mesh=(8, 4)), flags_of("slurm", *flags)).files


MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * MINUTE),
        ("90:30", 90 * MINUTE + 30),
        ("12:00:00", 12 * HOUR),
        ("2-0", 2 * DAY),
        ("2-12", 2 * DAY + 12 * HOUR),
        ("2-12:30", 2 * DAY + 12 * HOUR + 30 * MINUTE),
        ("2-12:30:15", 2 * DAY + 12 * HOUR + 30 * MINUTE + 15),
        ("0", 0),
    ],
)
def test_times_as_slurm_reads_them(text, seconds):
    assert slurm.slurm_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1:2:3:4", "-5", "1 hour", "2-"])
def test_what_is_no_time(text):
    with pytest.raises(UsageError, match=f"^--time={text}: expected a time as Slurm writes it"):
        slurm.slurm_seconds(text)
