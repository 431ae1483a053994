"""Commands that take the experiment from the folder of a job."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from layerkit_runner import cli
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.recorded import (
    DamagedRecordError,
    add_recorded_experiment,
    read_recorded_config,
)
from layerkit_runner.errors import UsageError
from layerkit_runner.run_options import RunOptions

MODULE = '''
    import dataclasses

    from layerkit.config import Config
    from layerkit_runner import BaseExperiment


    @dataclasses.dataclass
    class Task:
        num_layers: int
        rate: float = 1e-3


    class Small(BaseExperiment):
        """A model for tests."""

        NUM_LAYERS: int = 2
        NAMES: list[str] = ["a"]

        def task(self):
            return Config(Task, num_layers=self.NUM_LAYERS)

        def datasets(self):
            return []

        def partitioner(self):
            return Config(Task, num_layers=0)
'''
RECORD: dict[str, Any] = {
    "experiment": "recorded_lm.Small",
    "overrides": {"NUM_LAYERS": "7", "NAMES": "['b c', \"d\"]", "task.rate": "0.5"},
    "arguments": [],
    "fields": {},
    "config": {},
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job, whose experiment can be imported."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "recorded_lm.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.delitem(sys.modules, "recorded_lm", raising=False)
    (tmp_path / "job").mkdir()
    write(tmp_path / "job", RECORD)
    return tmp_path / "job"


def write(folder: Path, record: Any) -> None:
    (folder / "config.json").write_text(json.dumps(record))


def inspect(folder: Path, *words: str) -> list[str]:
    return ["--mode=inspect", f"--job_log_dir={folder}", *words]


def test_inspect_takes_experiment_and_overrides_from_the_folder(job: Path, capsys):
    assert cli.main(inspect(job)) == 0
    out, err = capsys.readouterr()
    for line in (
        "experiment = recorded_lm.Small",
        "experiment.NUM_LAYERS = 7",
        "experiment.NAMES = ['b c', 'd']",
        "task.num_layers = 7",
        "task.rate = 0.5",
    ):
        assert line in out.splitlines()
    (said,) = err.splitlines()
    assert f"{job}/config.json" in said
    assert "--exp=recorded_lm.Small --fdl.NUM_LAYERS=7" in said
    assert cli.main(inspect(job, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["overrides"]["NUM_LAYERS"] == "7"


def test_override_of_the_command_line_replaces_the_recorded_one(job: Path, capsys):
    assert cli.main(inspect(job, "--fdl.NUM_LAYERS=3")) == 0
    out, err = capsys.readouterr()
    assert "task.num_layers = 3" in out and "task.rate = 0.5" in out
    assert "NUM_LAYERS" not in err


def test_training_takes_the_flags_of_the_first_start_which_other_modes_lack(job: Path):
    first = ["--exp=recorded_lm.Small", "--init_from=base", "--init_draw=head", "--wandb_project=p"]
    write(job, {**RECORD, "arguments": first})
    for words, expected in (
        ((), {"init_from": "base", "init_draw": "head"}),
        (("--restore_checkpoint_dir=D",), {"restore_checkpoint_dir": "D"}),
        (("--mode=eval",), {}),
    ):
        said: list[str] = []
        flags = parse_flags([f"--job_log_dir={job}", *words])
        flags = add_recorded_experiment(flags, said.append)
        assert flags.options == RunOptions(job_log_dir=str(job), **expected)
        assert expected.items() <= flags.values.items()
        assert ("--init_from=base --init_draw=head" in said[0]) == (not words)


def test_named_experiment_takes_nothing_from_the_folder(job: Path, capsys):
    assert cli.main(inspect(job, "--exp=recorded_lm.Small")) == 0
    out, err = capsys.readouterr()
    assert "task.num_layers = 2" in out and err == ""


@pytest.mark.parametrize(
    "word",
    [
        *(f"--mode={mode}" for mode in ("eval", "eval_once", "decode", "decode_once", "export")),
        *("--mode=plan", "--mode=inspect", "--mode=train", "--print_config"),
    ],
)
def test_command_that_reads_a_job_needs_no_experiment(job: Path, word):
    flags = add_recorded_experiment(parse_flags([word, f"--job_log_dir={job}"]), lambda line: None)
    assert flags.exp == "recorded_lm.Small"
    assert {override.path: override.text for override in flags.overrides} == RECORD["overrides"]


def test_recorded_function_that_is_no_part_of_a_model_is_not_called(job: Path, capsys):
    made = job / "made"
    overrides = {"task": "subprocess.getoutput", "task.cmd": f"'touch {made}'"}
    write(job, {**RECORD, "overrides": overrides})
    assert cli.main(inspect(job)) != 0
    assert "--fdl.task" in capsys.readouterr().err and not made.exists()


def test_command_without_a_folder_requires_an_experiment(raises):
    for words in ([], ["--mode=eval"], ["--fdl.NUM_LAYERS=3"]):
        with raises(UsageError, field="--exp"):
            add_recorded_experiment(parse_flags(words), lambda line: None)


@pytest.mark.parametrize("mode", ["inspect", "train"])
def test_folder_without_a_record_raises(raises, tmp_path: Path, mode: str):
    folder = f"{tmp_path}/job"
    flags = parse_flags([f"--mode={mode}", f"--job_log_dir={folder}"])
    with raises(UsageError, field="--job_log_dir", value=folder):
        add_recorded_experiment(flags, lambda line: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"experiment": "x"}',
        "[" * 100_000,
        json.dumps({**RECORD, "overrides": {"NUM_LAYERS": 3}}),
        json.dumps({**RECORD, "overrides": []}),
        json.dumps({**RECORD, "experiment": 3}),
        json.dumps({**RECORD, "arguments": [1]}),
    ],
)
def test_damaged_record_is_an_error_of_one_line(raises, job: Path, capsys, text):
    (job / "config.json").write_text(text)
    with raises(DamagedRecordError, owner=str(job / "config.json")):
        read_recorded_config(str(job))
    assert cli.main(inspect(job)) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "config.json is damaged" in err


@pytest.mark.parametrize("name", ["recorded_lm", "/tmp/x.py", "..x.Y", "recorded_lm.Small()"])
def test_record_of_an_invalid_class_name_is_an_error(raises, job: Path, name: str):
    write(job, {**RECORD, "experiment": name})
    with raises(UsageError, value=name, expected="the full name of a class"):
        add_recorded_experiment(parse_flags(inspect(job)), lambda line: None)


@pytest.mark.parametrize("is_package", [False, True])
def test_module_in_the_folder_itself_is_not_imported(job: Path, monkeypatch, capsys, is_package):
    path = job / "hostile" / "__init__.py" if is_package else job / "hostile.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"open({str(job / 'ran')!r}, 'w')\n{textwrap.dedent(MODULE)}")
    write(job, {**RECORD, "experiment": "hostile.Small"})
    monkeypatch.chdir(job)
    assert cli.main(["--mode=inspect", "--job_log_dir=."]) == 2
    assert "--exp=hostile.Small" in capsys.readouterr().err
    assert not (job / "ran").exists() and "hostile" not in sys.modules


def test_control_characters_of_a_record_do_not_reach_the_terminal(job: Path, capsys):
    write(job, {**RECORD, "overrides": {"NAMES": "['\x1b[2J\n']"}})
    cli.main(inspect(job))
    err = capsys.readouterr().err
    assert "\x1b" not in err and r"\x1b" in err


def test_launch_writes_the_recorded_experiment_into_the_command(job: Path, capsys):
    words = ["launch", "slurm", "--mode=eval", f"--job_log_dir={job}", "--dry_run"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "  --exp=recorded_lm.Small\n" in out and "  --fdl.NUM_LAYERS=7\n" in out
