"""Hostile values of every flag of every kind are errors, or are written as text.

The generated scripts run here, with fakes of the programs that a cluster has.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from layerkit.errors import UserError
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.launch.command import _COMMON, KINDS, make_recipe, parse_options
from layerkit_runner.tools.launch.request import Options, Recipe, Request

CONTROL = ["a\ntouch x\n", "a\r\ntouch x", "a\0b", "a\x1b[2J", "a\x85touch x", "a\u2028touch x"]
TEXT = ["$(touch x)", "`touch x`", "a'; touch x; '", 'a"; touch x; "', "a b # \\ %j $HOME !x", "&x"]
DASHES = ["-x", "--wrap=touch x"]

REQUIRED = {
    "local": [],
    "slurm": [],
    "tpu_vm": ["--name=n", "--zone=z", "--accelerator_type=v4-8"],
    "queued_resources": ["--name=n", "--zone=z", "--accelerator_type=v4-8"],
    "kubernetes": ["--image=i"],
}
# Flags that another flag needs.
WITH = {
    "container_mounts": ["--container_image=image"],
    "tpu_topology": ["--tpu=v4"],
    "tpu": ["--tpu_topology=2x2x1"],
    "script": [],
}
# Flags that accept any text.
FREE_TEXT = {"env", "script", "partition", "account", "container_image", "container_mounts"}
FREE_TEXT |= {"zone", "project", "image", "namespace", "service_account", "env_secret", "volume"}
# Flags whose text is executed.
COMMANDS = ("setup", "runner", "install_command", "sbatch")
RECORD = '#!/bin/bash\nprintf "%s\\0" "$0" "$@" >> "$RECORDED"\n'


def text_flags() -> Iterator[tuple[str, str]]:
    """Yield kind and name of every flag with a value."""
    for kind in KINDS:
        for row in (*KINDS[kind].flags, *_COMMON):
            if not row.is_switch:
                yield kind, row.name


def request_with(word: str, folder: str) -> Request:
    words = ("--exp=lm.some.MyExperiment", f"--fdl.NAMES={word}", f"--job_log_dir={folder}")
    return Request(words, RunOptions(job_log_dir=folder), "train", "lm.some.MyExperiment")


def recipe_of(kind: str, *flags: str, word: str = "a", folder: str = "gs://b/r") -> Recipe:
    return make_recipe(request_with(word, folder), options_of(kind, *flags))


def options_of(kind: str, *flags: str) -> Options:
    given = {flag.partition("=")[0] for flag in flags}
    required = [flag for flag in REQUIRED[kind] if flag.partition("=")[0] not in given]
    options, others = parse_options(kind, [*required, *flags])
    assert others == []
    return options


def flags_with(name: str, value: str) -> list[str]:
    value = f"NAME={value}" if name == "env" else value
    value = f"claim:/{value}" if name == "volume" and not value.startswith("-") else value
    return [f"--{name}={value}", *WITH.get(name, [])]


@pytest.mark.parametrize(("kind", "name"), [*text_flags()])
def test_flag_with_control_character_is_an_error(kind, name):
    for value in CONTROL:
        with pytest.raises(UsageError) as error:
            recipe_of(kind, *flags_with(name, value))
        assert f"--{name}" in str(error.value)
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028]", str(error.value))


@pytest.mark.parametrize(("kind", "name"), [*text_flags()])
def test_flag_that_begins_with_dash_is_an_error(kind, name):
    for value in DASHES:
        if name in ("sbatch", "env"):
            recipe_of(kind, *flags_with(name, value))
            continue
        with pytest.raises(UsageError) as error:
            recipe_of(kind, *flags_with(name, value))
        assert f"--{name}" in str(error.value)


@pytest.mark.parametrize("value", CONTROL)
def test_word_or_folder_with_control_character_is_an_error(raises, value):
    with raises(UsageError, field="--fdl.NAMES", value=value):
        recipe_of("slurm", word=value)
    with raises(UsageError, field="--job_log_dir", value=f"gs://b/{value}"):
        recipe_of("slurm", folder=f"gs://b/{value}")


def test_working_directory_with_control_character_is_an_error(tmp_path: Path, monkeypatch):
    (tmp_path / "a\ntouch x").mkdir()
    monkeypatch.chdir(tmp_path / "a\ntouch x")
    with pytest.raises(UsageError) as error:
        recipe_of("slurm")
    assert error.value.field == "working directory"


def accepted(kind: str, value: str) -> Iterator[tuple[str, Recipe]]:
    """Yield name and recipe of each flag that accepts a value, and of the words of the run."""
    refused = set()
    for other, name in text_flags():
        if other != kind or name in COMMANDS:
            continue
        try:
            yield name, recipe_of(kind, *flags_with(name, value))
        except UserError:  # a number, a time, a name
            refused.add(name)
    assert not refused & FREE_TEXT
    yield "fdl", recipe_of(kind, word=value)
    yield "job_log_dir", recipe_of(kind, folder=f"gs://b/{value}")


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


def without_cd(script: str) -> str:
    return re.sub(r"^cd .*$", "", script, flags=re.MULTILINE)


@pytest.mark.parametrize("value", TEXT)
@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_script_executes_no_value(run_bash, kind, value):
    for name, recipe in accepted(kind, value):
        (text,) = recipe.files.values()
        text = text if kind == "slurm" else text.replace("run=(", "run=(\n  runner", 1)
        words = run_bash(without_cd(text))
        expected = {"fdl": f"--fdl.NAMES={value}", "job_log_dir": f"--job_log_dir=gs://b/{value}"}
        if name in expected:
            assert expected[name] in words
        if name in ("container_image", "container_mounts"):
            assert f"--{name.replace('_', '-')}={value}" in words


@pytest.mark.parametrize("value", TEXT)
def test_sbatch_reads_each_option_as_one_word(value):
    for name, recipe in accepted("slurm", value):
        (text,) = recipe.files.values()
        lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
        options = [slurm_words(line.removeprefix("#SBATCH")) for line in lines]
        assert all(len(words) == 1 for words in options), lines
        if name in ("partition", "account"):
            assert [f"--{name}={value}"] in options
    recipe = recipe_of("slurm", folder=f"/runs/{value}")
    (text,) = recipe.files.values()
    (line,) = (line for line in text.splitlines() if line.startswith("#SBATCH --output"))
    (option,) = slurm_words(line.removeprefix("#SBATCH"))
    assert option == f"--output=/runs/{value.replace('%', '%%')}/launch/slurm-%j.log"


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


@pytest.mark.parametrize("value", TEXT)
@pytest.mark.parametrize("kind", ["tpu_vm", "queued_resources"])
def test_tpu_host_executes_no_value(run_bash, kind, value):
    for name, recipe in accepted(kind, value):
        for command in recipe.commands:
            assert all(isinstance(word, str) for word in command)
            line = command[-1].removeprefix("--command=")
            script = shlex.split(line)[2]
            words = run_bash(script.replace('"$HOME/layerkit/bin/runner"', "runner"))
            if name == "fdl":
                assert f"--fdl.NAMES={value}" in words


@pytest.mark.parametrize("value", TEXT)
def test_kubernetes_manifest_has_a_value_as_text(run_bash, value):
    for name, recipe in accepted("kubernetes", value):
        (text,) = recipe.files.values()
        found = yaml.safe_load(text)
        pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        variables = {each["name"]: each["value"] for each in container["env"]}
        words = run_bash(kubernetes_expand(container["command"][2], variables))
        places: dict[str, Any] = {
            "image": container["image"],
            "namespace": found["metadata"].get("namespace"),
            "service_account": pod.get("serviceAccountName"),
            "env": kubernetes_expand(variables.get("NAME", ""), variables),
        }
        assert places.get(name, value) == value
        if name == "fdl":
            assert f"--fdl.NAMES={value}" in words


@pytest.mark.parametrize("value", ["$(NAME)", "$$(NAME)", "$$", "$", "$$$(NAME)", "$NAME", "a$("])
def test_kubernetes_expands_no_reference_in_a_value(value):
    recipe = recipe_of("kubernetes", "--env=NAME=secret", f"--env=OTHER={value}", word=value)
    (text,) = recipe.files.values()
    pod = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert kubernetes_expand(variables["OTHER"], variables) == value
    command = kubernetes_expand(container["command"][2], variables)
    assert f"--fdl.NAMES={value}" in shlex.split(command)


def kubernetes_expand(text: str, variables: dict[str, str]) -> str:
    """Expand references as third_party/forked/golang/expansion of Kubernetes does."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


@pytest.mark.parametrize("runner", ["it's", " "])
def test_runner_that_is_no_command_is_an_error(raises, runner):
    with raises(UsageError, field="--runner", value=runner):
        recipe_of("slurm", f"--runner={runner}")


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "my_secret"]
)
def test_value_of_a_secret_is_an_error_that_does_not_repeat_it(raises, name):
    with raises(UsageError, field="--env", value=name) as error:
        options_of("slurm", f"--env={name}=hunter2")
    assert "hunter2" not in str(error.value)


def test_variable_with_a_name_similar_to_a_secret_is_accepted():
    options = options_of("slurm", "--env=TOKENIZERS_PARALLELISM=false")
    assert options.env == [("TOKENIZERS_PARALLELISM", "false")]


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_referenced_variable_is_not_written_and_reaches_the_run(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    show = "bash -c 'echo $WANDB_API_KEY'"
    ((_, text),) = recipe_of(kind, "--env=WANDB_API_KEY", f"--runner={show}").files.items()
    assert "hunter2" not in text
    (tmp_path / "srun").write_text('#!/bin/bash\nexec "${@:3}"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = ["bash", "-c", without_cd(text)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "hunter2\n"), done.stderr
    del environment["WANDB_API_KEY"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and "WANDB_API_KEY" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_referenced_variable_that_is_not_set_is_an_error(raises, kind, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with raises(UsageError, field="--env", value="WANDB_API_KEY"):
        recipe_of(kind, "--env=WANDB_API_KEY")


def test_referenced_variable_is_read_from_a_secret_of_kubernetes(raises, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    with raises(UsageError, field="--env", value="HF_TOKEN"):
        recipe_of("kubernetes", "--env=HF_TOKEN")
    recipe = recipe_of("kubernetes", "--env=HF_TOKEN", "--env_secret=ours")
    (text,) = recipe.files.values()
    assert "hunter2" not in text
    pod = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["env"][-1] == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "ours", "key": "HF_TOKEN"}},
    }


@pytest.mark.parametrize("kind", ["tpu_vm", "queued_resources"])
def test_referenced_variable_is_an_error_on_tpu_hosts(raises, kind):
    with raises(UsageError, field="--env", value="HF_TOKEN"):
        recipe_of(kind, "--env=HF_TOKEN")
