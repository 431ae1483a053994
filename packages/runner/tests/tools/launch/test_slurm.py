"""The batch script, with fakes of Slurm's programs that record their arguments.

integration_tests/test_slurm.py submits one to a real Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from layerkit.errors import MISSING, UserError
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch import slurm

SRUN = """\
#!/bin/bash
# Exits with the next line of `codes`; for `wait`, with 143 at the signal of scancel, and for
# `wait_CODE`, with CODE.
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
    """Return a folder with the fake programs."""
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
    """Wait until srun has written its process number, which scancel reads."""
    path = folder / "srun.pid"
    while not (path.exists() and path.read_text().endswith("\n")):
        time.sleep(0.01)


def test_script_has_the_options_of_all_flags(request_of, flags_of, check_bash):
    flags = flags_of(
        "slurm",
        *("--nodes=4", "--gpus_per_node=8", "--processes_per_node=8", "--cpus_per_process=6"),
        *("--time=1-00:00:00", "--partition=gpu", "--account=us", "--sbatch=--qos=high"),
        *("--container_image=image.sqsh", "--container_mounts=/runs:/runs"),
        *("--env=NCCL_DEBUG=INFO", "--setup=module load cuda"),
    )
    script = slurm.make_script(request_of(has_mesh=True), flags)
    check_bash(script.text)
    assert (script.program, script.path) == ("sbatch", "/runs/it's here/launch/slurm.sh")
    lines = script.text.splitlines()
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=lmcloudspmdtest",
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
    # Slurm reads no options after the first command.
    assert lines.index("set -u") > lines.index("#SBATCH --qos=high")
    for line in (
        "export NCCL_DEBUG=INFO",
        "module load cuda",
        "  --cpus-per-task=6",
        "  --container-image=image.sqsh",
        "  --container-mounts=/runs:/runs",
        "  runner",
        "  --exp=lm.some.MyExperiment",
    ):
        assert line in lines


def test_script_without_gpus_has_no_flags_of_gpus(request_of, flags_of, check_bash):
    script = slurm.make_script(request_of(), flags_of("slurm"))
    check_bash(script.text)
    assert "gpu" not in script.text


@pytest.mark.parametrize(
    ("flags", "subjects"),
    [
        ([], ["mesh", "CPU cores"]),
        (["--gpus_per_node=8"], ["CPU cores"]),
        (["--cpus_per_process=8"], ["mesh"]),
        (["--gpus_per_node=8", "--cpus_per_process=8"], []),
    ],
    ids=" ".join,
)
def test_launcher_reports_what_it_leaves_to_the_cluster(request_of, flags_of, flags, subjects):
    lines = slurm.make_script(request_of(), flags_of("slurm", *flags)).next_steps
    assert [line.partition(":")[0] for line in lines[2:]] == subjects


@pytest.mark.parametrize("final", [None, 0, 1, 2, 65])
def test_job_without_a_final_exit_code_is_requeued_at_its_time_limit(
    folder, request_of, flags_of, final
):
    script = slurm.batch_script(request_of(), flags_of("slurm"))
    process = start(folder, script, "wait" if final is None else f"wait_{final}")
    wait_for_srun(folder)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == (final or 0)
    assert ("time limit reached" in output) == (final is None)
    requeued = ["scontrol requeue 47"] if final is None else []
    calls = (folder / "calls").read_text().splitlines()
    assert calls == ["scancel --signal=TERM 47", *requeued]


@pytest.mark.parametrize(
    ("codes", "code", "starts"), [("0", 0, 1), ("2", 2, 1), ("75 137 0", 0, 3), ("143", 143, 1)]
)
def test_script_exits_with_the_code_of_the_run(folder, request_of, flags_of, codes, code, starts):
    process = start(folder, slurm.batch_script(request_of(), flags_of("slurm")), codes)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert (folder / "starts").read_text().count("started") == starts
    assert not (folder / "calls").exists()


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--gpus_per_node=8", "--processes_per_node=3"], "--gpus_per_node", 8),
        (["--nodes=2", "--gpus_per_node=8"], "devices of the mesh", 32),
        (["--time=5"], "--time", "5"),
        (["--sbatch=qos"], "--sbatch", "qos"),
        (["--container_mounts=/a:/b"], "--container_mounts", MISSING),
    ],
)
def test_flags_that_contradict_each_other_or_the_mesh_are_an_error(
    raises, request_of, flags_of, flags, field, value
):
    with raises(UserError, field=field, value=value):
        slurm.make_script(request_of(has_mesh=True), flags_of("slurm", *flags))


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
def test_slurm_seconds_reads_all_forms_of_a_time(text, seconds):
    assert slurm.slurm_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1:2:3:4", "-5", "1 hour", "2-"])
def test_wrong_time_is_an_error(raises, text):
    with raises(UsageError, field="--time", value=text):
        slurm.slurm_seconds(text)
