"""The commands of gcloud, and the lines that run on hosts."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from layerkit.errors import UserError
from layerkit_runner.distributed.devices import PRESETS
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch import tpu
from layerkit_runner.tools.launch.tpu import parse_accelerator_type

PLACE = ("--name=mine", "--zone=us-central2-b")
STORE = "gs://bucket/run"
ROOT = Path(__file__).resolve().parents[5]


def commands(request_of, flags_of, kind: str, *flags: str, mesh=None) -> list[list[str]]:
    recipe = tpu.make_recipe(request_of(STORE, mesh=mesh), flags_of(kind, *PLACE, *flags))
    assert not recipe.files
    return [list(words) for words in recipe.commands]


def test_commands_of_a_queued_resource_with_two_slices(request_of, flags_of, check_bash):
    create, make_folder, copy, install, start, stop, delete = commands(
        request_of,
        flags_of,
        "queued_resources",
        *("--accelerator_type=v4-128", "--num_slices=2", "--project=ours", "--spot"),
        *("--valid_until_duration=6h", "--actions=delete,create,start,stop,install"),
        mesh=(64, 2),
    )
    gcloud = ["gcloud", "compute", "tpus", "queued-resources"]
    place = ["mine", "--zone=us-central2-b", "--project=ours"]
    assert create == [
        *(*gcloud, "create", *place, "--accelerator-type=v4-128", "--spot"),
        *("--runtime-version=tpu-ubuntu2204-base", "--node-count=2", "--node-prefix=mine"),
        "--valid-until-duration=6h",
    ]
    on_all = [*gcloud, "ssh", *place, "--node=all", "--worker=all"]
    for command in (make_folder, install, start, stop):
        assert command[:-1] == on_all
        check_bash(command[-1].removeprefix("--command="))
    assert copy == [
        *(*gcloud, "scp", "layerkit/packages", "layerkit/constraints.txt", "mine:layerkit-source"),
        *(*place[1:], "--recurse", "--node=all", "--worker=all"),
    ]
    assert delete == [*gcloud, "delete", *place, "--quiet", "--force"]
    script = shlex.split(start[-1].removeprefix("--command="))[2]
    check_bash(script)
    assert "  '--fdl.NAMES=['\"'\"'a b'\"'\"', '\"'\"'c'\"'\"']'\n" in script
    assert "  --xla_flags_preset=tpu_multislice\n" in script


def test_commands_of_a_tpu_vm(request_of, flags_of):
    create, start, delete = commands(
        request_of,
        flags_of,
        "tpu_vm",
        *("--accelerator_type=v5e-16", "--actions=create,start,delete"),
        mesh=(16, 1),
    )
    assert create == [
        *("gcloud", "compute", "tpus", "tpu-vm", "create", *("mine", "--zone=us-central2-b")),
        *("--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite"),
    ]
    assert "--node=all" not in start and "tpu_v5e_collective_fusion" in start[-1]
    assert delete[-1] == "--quiet"


def test_start_line_returns_and_the_run_writes_its_log(request_of, flags_of, tmp_path):
    flags = flags_of("tpu_vm", *PLACE, "--accelerator_type=v4-8", "--runner=echo the run:")
    line = tpu._start_line(request_of(STORE), flags)
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, timeout=30)
    number = int((tmp_path / "myexperiment.pid").read_text())
    subprocess.run(["tail", f"--pid={number}", "-f", "/dev/null"], timeout=30, check=True)
    log = (tmp_path / "myexperiment.log").read_text()
    assert log.startswith("the run: --exp=lm.some.MyExperiment --fdl.NAMES=['a b', 'c'] --job_log")


RUN = """\
#!/bin/bash
# Takes a second to save at a signal.
trap 'sleep 1; echo saved >> told; exit 143' TERM
trap '' HUP
echo $$ > run.pid
while :; do sleep 0.05; done
"""


@pytest.fixture
def host(request_of, flags_of, tmp_path):
    """Yield a folder in which a run was started as on a host; kill the run at the end."""
    (tmp_path / "run.sh").write_text(RUN)
    flags = flags_of("tpu_vm", *PLACE, "--accelerator_type=v4-8", "--runner=bash run.sh")
    line = tpu._start_line(request_of(STORE), flags)
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, timeout=30)
    path = tmp_path / "run.pid"
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    yield tmp_path
    for name in ("myexperiment.pid", "run.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)


def is_running(path: Path) -> bool:
    """Return whether the process of a number exists and is no zombie."""
    status = Path("/proc", path.read_text().strip(), "cmdline")
    return status.exists() and status.read_bytes() != b""


def stop(request_of, host: Path) -> subprocess.CompletedProcess[str]:
    line = tpu._stop_line(request_of(STORE))
    words = ["bash", "-c", line]
    return subprocess.run(words, cwd=host, timeout=60, capture_output=True, text=True)


def test_stop_waits_until_the_run_has_saved_and_exited(host, request_of):
    assert is_running(host / "myexperiment.pid") and is_running(host / "run.pid")
    done = stop(request_of, host)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "launch: myexperiment has exited\n"
    assert not is_running(host / "myexperiment.pid") and not is_running(host / "run.pid")
    assert (host / "told").read_text() == "saved\n"
    # A second `stop` succeeds, so that `delete` can follow.
    done = stop(request_of, host)
    assert (done.returncode, done.stdout) == (
        0,
        "launch: myexperiment is not running on this host\n",
    )


def test_stop_fails_if_the_run_does_not_exit_in_time(host, request_of, monkeypatch):
    monkeypatch.setattr(tpu, "_SECONDS_TO_SAVE", 1)
    (host / "run.sh").write_text("")
    os.kill(int((host / "run.pid").read_text()), signal.SIGSTOP)
    done = stop(request_of, host)
    assert done.returncode == 1  # so that `delete` does not follow
    assert "is still running 1 s after SIGTERM" in done.stderr


def test_stop_sends_no_signal_to_another_program_of_the_process_number(request_of, tmp_path):
    other = subprocess.Popen(["sleep", "60"])
    (tmp_path / "myexperiment.pid").write_text(f"{other.pid}\n")
    done = stop(request_of, tmp_path)
    assert (done.returncode, other.poll()) == (0, None)
    other.kill()
    other.wait()


def test_install_copies_a_clone_with_the_extras_that_c4_needs(request_of, flags_of):
    flags = ("--accelerator_type=v4-8", "--actions=install", "--source=~/a clone/")
    _, copy, install = commands(request_of, flags_of, "tpu_vm", *flags)
    clone = os.path.expanduser("~/a clone")
    assert copy[5:7] == [f"{clone}/packages", f"{clone}/constraints.txt"]
    words = shlex.split(install[-1].removeprefix("--command="))
    for package in re.findall(r"\./(packages/\w+)", " ".join(words)):
        assert not (ROOT / "packages").exists() or (ROOT / package / "pyproject.toml").exists()
    assert "./packages/inputs[grain,hf,text,seqio]" in words
    assert not any(word.startswith("layerkit") for word in words)
    (own,) = commands(request_of, flags_of, "tpu_vm", *flags, "--install_command=./mine.sh")
    assert own[-1] == "--command=./mine.sh"


@pytest.mark.parametrize(
    ("name", "chips"), [("v4-128", 64), ("v5p-8", 4), ("v5e-16", 16), ("v6e-256", 256)]
)
def test_chips_of_an_accelerator_type(name, chips):
    assert parse_accelerator_type(name).num_chips == chips


@pytest.mark.parametrize(
    ("name", "device_kind"),
    [("v5litepod-16", "TPU v5 lite"), ("v6e-256", "TPU v6 lite"), ("v4-8", "TPU v4")],
)
@pytest.mark.parametrize("num_slices", [1, 2])
def test_recommended_preset_is_for_the_device_kind(name, device_kind, num_slices):
    preset = parse_accelerator_type(name).preset(num_slices)
    if preset is not None:
        assert re.fullmatch(PRESETS[preset].device_kind, device_kind)
    else:
        assert (name, num_slices) == ("v4-8", 1)


@pytest.mark.parametrize(
    ("accelerator_type", "field", "value"),
    [
        ("v4-127", "--accelerator_type", "v4-127"),
        ("v4", "--accelerator_type", "v4"),
        ("v5pod-8", "TPU generation", "v5pod"),
        ("v4-128", "devices of the mesh", 128),
        ("v4-256", "slices of the mesh", 2),
    ],
)
def test_accelerator_type_that_is_unknown_or_contradicts_the_mesh_is_an_error(
    raises, request_of, flags_of, accelerator_type, field, value
):
    with raises(UserError, field=field, value=value):
        commands(
            request_of,
            flags_of,
            "tpu_vm",
            f"--accelerator_type={accelerator_type}",
            mesh=(64, 2),
        )


def test_folder_on_the_hosts_is_an_error(raises, request_of, flags_of):
    flags = flags_of("tpu_vm", *PLACE, "--accelerator_type=v4-8")
    with raises(UsageError, field="--job_log_dir", value="/home/me/run"):
        tpu.make_recipe(request_of("/home/me/run"), flags)
