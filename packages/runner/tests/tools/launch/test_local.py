"""The loop that restarts a run, executed by Bash."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from layerkit_runner.tools.launch import local
from layerkit_runner.tools.launch.request import Options

RUN = """\
#!/bin/bash
# Exits with the next line of `codes`, or is killed, and counts its starts.
echo started >> starts
code=$(sed -n "$(wc -l < starts)p" codes)
[ "$code" != killed ] || kill -KILL $$
exit "$code"
"""
WAITS = """\
#!/bin/bash
# Saves at a signal, as a run does.
trap 'echo saved > told; exit 143' TERM
trap 'echo saved > told; exit 130' INT
touch ready
while :; do sleep 0.05; done
"""


def bash(folder: Path, run: str, *, before_start: str = "") -> list[str]:
    (folder / "run.sh").write_text(run)
    loop = local.restart_loop("bash run.sh", max_restarts=3, before_start=before_start)
    loop = loop.replace("sleep 10", "sleep 0")
    (folder / "script.sh").write_text(f"set -u\n{local.FORWARD_SIGNALS}\n{loop}")
    return ["bash", "script.sh"]


@pytest.mark.parametrize(
    ("codes", "starts", "code"),
    [
        ([0], 1, 0),
        ([2], 1, 2),
        ([1], 1, 1),
        ([143], 1, 143),
        ([75, 70, 0], 3, 0),
        (["killed", 1], 2, 1),
        ([75, 75, 75, 75, 0], 4, 75),
    ],
)
def test_loop_restarts_after_some_exit_codes_up_to_the_limit(tmp_path: Path, codes, starts, code):
    (tmp_path / "codes").write_text("".join(f"{number}\n" for number in codes))
    done = subprocess.run(bash(tmp_path, RUN), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "starts").read_text().count("started") == starts
    assert done.stdout.count("from the newest checkpoint") == starts - 1
    assert ("exit code 137; restart 1 of 3" in done.stdout) == (codes[0] == "killed")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_script_forwards_a_signal_to_the_run_and_exits_with_its_code(tmp_path: Path, number, code):
    process = subprocess.Popen(bash(tmp_path, WAITS), cwd=tmp_path)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == code
    assert (tmp_path / "told").read_text() == "saved\n"


def test_signal_before_the_start_reaches_the_run(tmp_path: Path):
    words = bash(tmp_path, WAITS, before_start="kill -TERM $$\n")
    # The signal may come before the run can save.
    assert subprocess.run(words, cwd=tmp_path, timeout=30).returncode == 143


def test_words_and_variables_reach_the_run_unchanged(tmp_path: Path):
    words = ["--fdl.NAMES=['a b', \"c\"]", "it's $HOME `date` \\ !", ""]
    variables = {"A_FLAG": "--one=1 --two='2 $X'"}
    options = Options(env=[*variables.items()], setup=["B=set_up"])
    text = local.environment_lines(options) + local.bash_array("run", words)
    text += '\nprintf "%s\\0" "$A_FLAG" "$B" "${run[@]}"'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [variables["A_FLAG"], "set_up", *words]
