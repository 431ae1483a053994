"""Printing and execution of recipes."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch.request import Recipe, execute, recipe_lines


def test_dry_run_prints_the_files_and_commands_that_are_executed(tmp_path: Path, capfd):
    script = f"{tmp_path}/a folder/run.sh"
    recipe = Recipe(
        files={script: "echo ran with $1\nexit $1\n", f"{tmp_path}/values.yaml": "a: 1\n"},
        folders=[f"{tmp_path}/logs"],
        commands=[["bash", script, "0"], ["bash", script, "3"], ["bash", script, "4"]],
        next_steps=["look there"],
    )
    assert list(recipe_lines(recipe)) == [
        f"# would write {script}",
        "echo ran with $1\nexit $1",
        "",
        f"# would write {tmp_path}/values.yaml",
        "a: 1",
        "",
        f"# would make {tmp_path}/logs",
        "# would run",
        f"bash '{script}' 0",
        f"bash '{script}' 3",
        f"bash '{script}' 4",
        "# look there",
    ]
    assert list(tmp_path.iterdir()) == []
    assert execute(recipe) == 3  # the first that fails is the last
    assert [line for line in capfd.readouterr().out.splitlines() if line[0] != "+"] == [
        "ran with 0",
        "ran with 3",
    ]
    assert (tmp_path / "logs").is_dir()


def test_only_the_owner_can_read_the_files(tmp_path: Path):
    script, manifest = tmp_path / "run.sh", tmp_path / "values.yaml"
    for path in (script, manifest):
        path.write_text("before")
        path.chmod(0o777)
    assert execute(Recipe(files={f"{script}": "exit 0", f"{manifest}": "a: 1"}, commands=[])) == 0
    assert [stat.S_IMODE(path.stat().st_mode) for path in (script, manifest)] == [0o700, 0o600]
    assert {path.name for path in tmp_path.iterdir()} == {"run.sh", "values.yaml"}


def test_symbolic_link_at_the_path_of_a_file_is_replaced(tmp_path: Path):
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "run.sh").symlink_to("other")
    execute(Recipe(files={f"{tmp_path}/run.sh": "exit 0"}, commands=[]))
    assert (tmp_path / "other").read_text() == "theirs"
    assert not (tmp_path / "run.sh").is_symlink()


def test_file_that_cannot_be_written_is_an_error(raises, tmp_path: Path):
    (tmp_path / "file").touch()
    with raises(UsageError):
        execute(Recipe(files={f"{tmp_path}/file/run.sh": ""}, commands=[["false"]]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_a_command_that_replaces_the_launcher(tmp_path: Path, number):
    (tmp_path / "run.sh").write_text(
        "trap 'echo saved > told; exit 7' TERM INT\ntouch ready\nwhile :; do sleep 0.05; done\n"
    )
    program = (
        "from layerkit_runner.tools.launch.request import Recipe, execute;"
        "execute(Recipe(commands=[['bash', 'run.sh']], replaces_process=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=60) == 7
    assert (tmp_path / "told").read_text() == "saved\n"
