"""The loop that starts a run, run by Bash."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from layerkit_runner.tools.launch import local
from layerkit_runner.tools.launch.values import Options

RUN = """\
#!/bin/bash
# Ends as the next line of `codes` says, and counts.
echo started >> starts
code=$(sed -n "$(wc -l < starts)p" codes)
exit "$code"
"""
WAITS = """\
#!/bin/bash
# As a run that is told to stop: it saves first.
trap 'echo saved > told; exit 143' TERM
trap 'echo saved > told; exit 130' INT
touch ready
while :; do sleep 0.05; done
"""


def bash(folder: Path, run: str, *, before_start: str = "") -> list[str]:
    (folder / "run.sh").write_text(run)
    loop = local.start_and_wait("bash run.sh", max_restarts=3, before_start=before_start, pause=0)
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
        ([137, 1], 2, 1),
        ([75, 75, 75, 75, 0], 4, 75),  # started again three times, and no more
    ],
)
def test_which_ends_are_followed_by_another_start(tmp_path: Path, codes, starts, code):
    (tmp_path / "codes").write_text("".join(f"{number}\n" for number in codes))
    done = subprocess.run(bash(tmp_path, RUN), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "starts").read_text().count("started") == starts
    assert done.stdout.count("from the newest checkpoint") == starts - 1


def test_a_run_that_is_killed_is_started_again(tmp_path: Path):
    (tmp_path / "codes").write_text("0\n0\n")
    run = RUN + "\n"
    run = run.replace("code=$(", '[ "$(wc -l < starts)" -gt 1 ] || kill -KILL $$\ncode=$(')
    done = subprocess.run(bash(tmp_path, run), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "exit code 137; start 1 of 3 more" in done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_script_reaches_the_run_which_ends_it(tmp_path: Path, number, code):
    process = subprocess.Popen(bash(tmp_path, WAITS), cwd=tmp_path)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, number)
    assert process.wait(timeout=30) == code
    assert (tmp_path / "told").read_text() == "saved\n"


def test_a_signal_before_the_run_is_there_is_kept_for_it(tmp_path: Path):
    words = bash(tmp_path, WAITS, before_start="kill -TERM $$\n")
    # The run is told as soon as it is started, perhaps before it can save.
    assert subprocess.run(words, cwd=tmp_path, timeout=30).returncode == 143


def test_words_and_variables_reach_the_run_as_they_are(tmp_path: Path):
    words = ["--fdl.NAMES=['a b', \"c\"]", "it's $HOME `date` \\ !", ""]
    variables = {"A_FLAG": "--one=1 --two='2 $X'"}
    options = Options(env=[*variables.items()], setup=["B=set_up"])
    text = local.environment_lines(options) + local.words_array("run", words)
    text += '\nprintf "%s\\0" "$A_FLAG" "$B" "${run[@]}"'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [variables["A_FLAG"], "set_up", *words]
