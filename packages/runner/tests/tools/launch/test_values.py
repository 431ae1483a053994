"""Hostile values of flags are errors, or are written as text.

The generated scripts run here, with fakes of the programs that a cluster has.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch.command import KINDS

CONTROL = ["a\ntouch x\n", "a\r\ntouch x", "a\0b", "a\x1b[2J", "a\x85touch x", "a\u2028touch x"]
TEXT = ["$(touch x)", "`touch x`", "a'; touch x; '", 'a"; touch x; "', "a b # \\ %j $HOME !x", "-x"]
# Flags of Slurm's script that accept any text.
FREE_TEXT = ("partition", "account", "container_image", "container_mounts")
RECORD = '#!/bin/bash\nprintf "%s\\0" "$0" "$@" >> "$RECORDED"\n'


@pytest.mark.parametrize("name", ["partition", "account", "sbatch"])
def test_flag_with_control_character_is_an_error(request_of, flags_of, name):
    for value in CONTROL:
        flag = f"--{name}=--qos={value}" if name == "sbatch" else f"--{name}={value}"
        with pytest.raises(UsageError) as error:
            KINDS["slurm"].make_script(request_of(), flags_of("slurm", flag))
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028]", str(error.value))


def test_folder_with_control_character_is_an_error(request_of, flags_of, tmp_path, monkeypatch):
    with pytest.raises(UsageError):
        KINDS["slurm"].make_script(request_of("/runs/a\ntouch x"), flags_of("slurm"))
    (tmp_path / "a\ntouch x").mkdir()
    monkeypatch.chdir(tmp_path / "a\ntouch x")
    with pytest.raises(UsageError) as error:
        KINDS["slurm"].make_script(request_of("gs://b/r"), flags_of("slurm"))
    assert error.value.field == "--chdir"


@pytest.fixture
def run_bash(tmp_path: Path):
    """Return a function that runs a script with fakes of a cluster's programs.

    It returns the arguments of the fakes.
    """
    (tmp_path / "bin").mkdir()
    for name in ("srun", "runner", "scancel", "scontrol"):
        (tmp_path / "bin" / name).write_text(RECORD)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "at").mkdir()

    def run(text: str) -> list[str]:
        recorded = tmp_path / "recorded"
        recorded.write_text("")
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=tmp_path / "at",
            env={"PATH": path, "RECORDED": str(recorded), "HOME": str(tmp_path / "at")},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        assert "not found" not in done.stderr
        assert list((tmp_path / "at").iterdir()) == []  # nothing else was executed
        return recorded.read_text().split("\0")[1:-1]

    return run


@pytest.mark.parametrize("value", TEXT)
@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_script_executes_no_value(run_bash, request_of, flags_of, kind, value):
    flags = [f"--env=NAME={value}"]
    if kind == "slurm":
        flags += [f"--{name}={value}" for name in FREE_TEXT]
    request = request_of(f"gs://b/{value}", names=value)
    text = KINDS[kind].make_script(request, flags_of(kind, *flags)).text
    text = text if kind == "slurm" else text.replace("run=(", "run=(\n  runner", 1)
    words = run_bash(re.sub(r"^cd .*$", "", text, flags=re.MULTILINE))
    assert f"--fdl.NAMES={value}" in words
    assert f"--job_log_dir=gs://b/{value}" in words
    if kind == "slurm":
        assert f"--container-image={value}" in words
        assert f"--container-mounts={value}" in words


@pytest.mark.parametrize("value", TEXT)
def test_sbatch_reads_each_option_as_one_word(request_of, flags_of, value):
    flags = flags_of("slurm", f"--partition={value}", f"--account={value}")
    text = KINDS["slurm"].make_script(request_of(f"/runs/{value}"), flags).text
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    options = [slurm_words(line.removeprefix("#SBATCH")) for line in lines]
    assert all(len(words) == 1 for words in options), lines
    output = f"/runs/{value.replace('%', '%%')}/launch/slurm-%j.log"
    for option in (f"--partition={value}", f"--account={value}", f"--output={output}"):
        assert [option] in options


def slurm_words(line: str) -> list[str]:
    """Return the words of a line as `get_argument` of Slurm's src/sbatch/opt.c splits it."""
    words, word, quote, position = [], None, "", 0
    while position < len(line):
        character = line[position]
        position += 1
        if character == "\\":
            character = line[position]
            position += 1
        elif quote:
            if character == quote:
                quote = ""
                continue
        elif character in "\"'":
            quote = character
            continue
        elif character == "#":
            break
        elif character.isspace():
            if word is not None:
                words.append(word)
            word = None
            continue
        word = (word or "") + character
    assert not quote
    return words if word is None else [*words, word]


@pytest.mark.parametrize("runner", ["it's", " "])
def test_runner_that_is_no_command_is_an_error(raises, request_of, flags_of, runner):
    with raises(UsageError, field="--runner", value=runner):
        KINDS["slurm"].make_script(request_of(), flags_of("slurm", f"--runner={runner}"))


@pytest.mark.parametrize(
    "variable",
    [
        *(f"{name}=hunter2" for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")),
        *(
            f"{name}=hunter2"
            for name in ("PGPASSWORD", "my_secret", "API_KEYS", "TOKENS", "PGPASS")
        ),
        *(f"{name}=hunter2" for name in ("GITHUB_PAT", "MYSQL_PWD", "API_KEY_2", "DB_CREDENTIALS")),
        *(f"{name}=hunter2" for name in ("REDIS_PASS", "apiKey", "SENTRY_DSN", "NETRC_PASSWORDS")),
        "DATABASE_URL=postgres://me:hunter2@db.example.com:5432/runs",
        "HTTPS_PROXY=http://me:hunter2@proxy:3128",
        "STORE=https://a.blob.core.windows.net/runs?sv=2024&sig=hunter2",
        "CONNECTION=Server=db;User=me;Password=hunter2;",
        "HEADER=Authorization: Bearer hunter2hunter2",
        "REMOTE=https://ghp_hunter2hunter2hunter2@github.com/me/runs",
        "LOGIN=hf_hunter2hunter2hunter2hunter2",
        "CERTIFICATE=-----BEGIN RSA PRIVATE KEY-----hunter2",
    ],
)
def test_value_of_a_secret_is_an_error_that_does_not_repeat_it(raises, flags_of, variable):
    name = variable.partition("=")[0]
    with raises(UsageError, field="--env", value=name) as error:
        flags_of("slurm", f"--env={variable}")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    "line", ["export API_KEYS=hunter2", "git clone https://me:hunter2@git.example.com/runs"]
)
def test_secret_in_a_command_of_setup_is_an_error(raises, flags_of, line):
    with raises(UsageError, field="--setup") as error:
        flags_of("slurm", f"--setup={line}")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "4096"),
        ("PWD", "/home/me"),
        ("PATH", "/usr/bin:/bin"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/account.json"),
        ("GIT_AUTHOR_NAME", "me"),
        ("KEYBOARD", "us"),
        ("PAGES", "https://docs.example.com:8443/simple?page=2"),
        ("REMOTE", "ssh://git@github.com/me/runs"),
        ("XLA_FLAGS", "--xla_gpu_graph_level=0 --xla_dump_to=/tmp/x"),
        ("COMMIT", "9fceb02d0ae598e95dc970b74767f19372d61af8"),
    ],
)
def test_variable_with_a_name_similar_to_a_secret_is_accepted(flags_of, name, value):
    assert flags_of("slurm", f"--env={name}={value}").env == [(name, value)]


def test_setup_may_read_a_secret(flags_of):
    line = "export WANDB_API_KEY=$(gcloud secrets versions access latest --secret=SECRET)"
    assert flags_of("slurm", f"--setup={line}").setup


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_referenced_variable_is_not_written_and_reaches_the_run(
    raises, request_of, flags_of, kind, monkeypatch, tmp_path
):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    show = "bash -c 'echo $WANDB_API_KEY'"
    options = flags_of(kind, "--env=WANDB_API_KEY", f"--runner={show}")
    text = KINDS[kind].make_script(request_of(), options).text
    assert "hunter2" not in text
    (tmp_path / "srun").write_text('#!/bin/bash\nexec "${@:3}"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = ["bash", "-c", re.sub(r"^cd .*$", "", text, flags=re.MULTILINE)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "hunter2\n"), done.stderr
    del environment["WANDB_API_KEY"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and "WANDB_API_KEY" in done.stderr and done.stdout == ""
    monkeypatch.delenv("WANDB_API_KEY")
    with raises(UsageError, field="--env", value="WANDB_API_KEY"):
        KINDS[kind].make_script(request_of(), options)
