"""Printing and execution of scripts."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch.request import Script


def test_dry_run_prints_what_is_executed(tmp_path: Path, capfd):
    script = Script(
        f"{tmp_path}/a folder/run.sh", "echo ran\nexit 3\n", "bash", f"{tmp_path}/logs", ["look"]
    )
    assert [*script.lines()] == [
        f"# would write {script.path}",
        script.text,
        "# would run",
        f"bash '{script.path}'",
        "# look",
    ]
    assert list(tmp_path.iterdir()) == []
    assert script.start() == 3
    assert capfd.readouterr().out.splitlines() == [f"+ bash '{script.path}'", "ran"]
    assert (tmp_path / "logs").is_dir()


def test_script_replaces_a_symbolic_link_and_only_its_owner_can_read_it(tmp_path: Path):
    path, other = tmp_path / "run.sh", tmp_path / "other"
    other.write_text("theirs")
    other.chmod(0o777)
    path.symlink_to("other")
    assert Script(f"{path}", "exit 0", "bash").start() == 0
    assert (path.is_symlink(), other.read_text()) == (False, "theirs")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {*tmp_path.iterdir()} == {path, other}


def test_script_that_cannot_be_written_is_an_error(raises, tmp_path: Path):
    (tmp_path / "file").touch()
    with raises(UsageError):
        Script(f"{tmp_path}/file/run.sh", "", "false").start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_the_script_that_replaces_the_launcher(tmp_path: Path, number):
    text = "trap 'echo saved > told; exit 7' TERM INT\ntouch ready\nwhile :; do sleep 0.05; done\n"
    program = (
        "from layerkit_runner.tools.launch.request import Script;"
        f"Script('run.sh', {text!r}, 'bash', replaces_process=True).start()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=60) == 7
    assert (tmp_path / "told").read_text() == "saved\n"
