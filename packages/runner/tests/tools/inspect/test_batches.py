from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from layerkit_runner import cli
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.tools.inspect.batch_forms import text_lines
from layerkit_runner.tools.inspect.batches import read_input, simulated_hosts


def lines_of(config: Any, *, num_hosts: int, kind: str = "eval", num_batches: int = 3) -> list[str]:
    """Return the lines of an input on eight devices, without the times."""
    partitioner = SpmdPartitioner(ici_mesh_shape=[8, 1, 1])
    partitioner.start()
    hosts = simulated_hosts(jax.devices(), num_hosts)
    lines = text_lines(read_input(config, kind, partitioner, hosts, num_batches))
    return [re.sub(r"in [\d.]+ s", "in … s", line) for line in lines]


def test_lines_of_each_host_until_the_data_end(tiny):
    config = tiny.Points.HParams.config(name="points", num_rows=11, percore_batch_size=1.0)
    lines = lines_of(config, num_hosts=2)
    assert lines[:5] == [
        "eval points (Points)",
        "  8 rows a batch, 4 on each host that feeds some; one epoch each time",
        "  host 0: rows 0 to 3 of each batch",
        "  host 1: rows 4 to 7 of each batch",
        "  batch 1, read in … s: 4 of 4 rows hold data",
    ]
    assert "    host 1: 4 of 4 rows hold data" in lines
    assert "  batch 2, read in … s: 3 of 4 rows hold data" in lines
    assert "    host 1: 0 of 4 rows hold data" in lines
    assert lines[-2] == "  the data end after 2 batch(es)"
    assert re.fullmatch(r"  state: \d+ bytes, scope global", lines[-1])
    assert not any("WARNING" in line for line in lines)


def test_hosts_that_read_the_same_rows_are_reported(tiny):
    class Unsplit(tiny.Points):
        """An input that gives all hosts the same rows."""

        def _read_rows(self, rows: np.ndarray) -> Any:
            return super()._read_rows(rows % self.local_batch_size)

    config = Unsplit.HParams.config(is_training=True, shuffle=False, percore_batch_size=1.0)
    config.num_rows = 64
    lines = lines_of(config, num_hosts=4, kind="train", num_batches=1)
    for host in (1, 2, 3):
        assert f"    WARNING: hosts 0 and {host} read the same rows" in lines


def test_devices_that_cannot_be_split_over_hosts_raise(raises):
    with raises(UsageError, field="--num_hosts", value=3):
        simulated_hosts(jax.devices(), 3)


def test_command_shows_every_input_and_writes_nothing(tmp_path, capsys):
    pytest.importorskip("layerkit_experiments")
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("one two three. " * (10 + number))
    before = sorted(tmp_path.iterdir())
    command = [
        *("--exp=lm.quickstart.LocalText", "--mode=inspect", "--inspect=batches"),
        *("--num_batches=1", "--num_hosts=2", "--fdl.PERCORE_BATCH_SIZE=1.0"),
        f"--fdl.TEXT_FILES=['{tmp_path}']",
    ]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    heads = [line for line in printed.out.splitlines() if line and line[0] != " "]
    assert heads == [
        "2 host(s) of 1 device(s) each are simulated; labels of weight 0 are in ⟦brackets⟧,"
        " special ids in ⟪these⟫",
        "train train (LocalText)",
        "eval heldout (LocalText)",
        "decode prompts (LocalTextPrompts)",
    ]
    assert "one two three. one two" in printed.out
    assert sorted(tmp_path.iterdir()) == before

    stages = "[{'until_step': 2, 'batch': 2, 'length': 64}, {'until_step': 3, 'batch': 4}]"
    three = [*command[:3], "--num_batches=3", *command[4:], f"--fdl.STAGES={stages}"]
    assert cli.main(three) == 0
    lines = capsys.readouterr().out.splitlines()
    for number, steps, rows in ((1, "1 → 2", 2), (2, "3 → 3", 4)):
        index = lines.index(f"train, stage {number} of 2, steps {steps}: train (LocalText)")
        size = f"  {rows} rows a batch, {rows // 2} on each host that feeds some; endless"
        assert lines[index + 1] == size
        assert f"[{rows // 2}, 64]" in "".join(lines[index : index + 8])
    # A stage shows no batches of the next one: steps 1 and 2, step 3, then three of `heldout`.
    shown = re.findall(r"^ *batch (\d), read in", "\n".join(lines), re.MULTILINE)
    assert [int(number) for number in shown[:6]] == [1, 2, 1, 1, 2, 3]

    page = tmp_path / "pages" / "batches.html"
    assert cli.main([*command, f"--html={page}"]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert "decode prompts (LocalTextPrompts)" in page.read_text()
    assert cli.main([*command[:2], "--inspect=layers", f"--html={page}"]) == 2
    assert "--html" in capsys.readouterr().err

    assert cli.main([*command[:-1], "--fdl.TEXT_FILES=['/nowhere/at/all']"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("runner: ")
    assert "/nowhere/at/all" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "exit_code", "error"),
    [
        (["--list"], 0, ""),
        pytest.param(
            ["--exp=lm.quickstart.LocalText", "--mode=inspect", "--inspect=batches"],
            1,
            "runner: standard output was closed by its reader; stopped.\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--exp=lm.quickstart.LocalText", "--reduced", "--job_log_dir=job"],
            1,
            "runner: standard output was closed by its reader; stopped.\n",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_command_with_closed_standard_output_ends_without_a_traceback(
    tmp_path, words, exit_code, error
):
    pytest.importorskip("layerkit_experiments")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "layerkit_runner.cli", *words],
        cwd=tmp_path,
        env=os.environ,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=180,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (exit_code, error)


RECORDS = ['{"text": "one two", "id": 1}', '{"text": "three", "id": 2}']
INPUTS = ("datasets.0", "datasets.1", "decode_datasets.0")


@pytest.mark.parametrize(
    ("lines", "fields", "name", "flags"),
    [
        (RECORDS * 9, [], "text_field=None", ["--fdl.TEXT_FIELD=text"]),
        (RECORDS * 9, ["--fdl.TEXT_FIELD=txt"], "'txt'", ["--fdl.TEXT_FIELD=text"]),
        (
            [*RECORDS, '{"text": 7}'] * 9,
            ["--fdl.TEXT_FIELD=text"],
            "on_bad_record='skip'",
            [f"--fdl.{name}.on_bad_record=skip" for name in INPUTS],
        ),
    ],
)
def test_error_of_data_names_the_field_that_fixes_it(tmp_path, capsys, lines, fields, name, flags):
    pytest.importorskip("layerkit_experiments")
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    command = [
        *("--exp=lm.quickstart.LocalText", "--mode=inspect", "--inspect=batches"),
        *(f"--fdl.TEXT_FILES=['{tmp_path}/a.jsonl']", "--num_batches=1", *fields),
    ]

    def run(*more: str) -> tuple[int, str]:
        names = [word.partition("=")[0] for word in more]
        kept = [word for word in command if word.partition("=")[0] not in names]
        return cli.main([*kept, *more]), capsys.readouterr().err

    code, error = run()
    assert code == 2
    assert name in error
    assert run(*flags) == (0, "")
