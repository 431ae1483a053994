"""DecodeProgram: records by hand, on disk and back; finished outputs stay as they are.

The model of conftest.py goes on with three times a prompt's first id, each with log-probability
-0.5; prompt n is n + 1 times the id n + 1.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from etils import epath

from layerkit_runner.infeed import make_input
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.programs import DecodeProgram

RECORDS = [
    {"prompt": "1", "continuation": "111", "log_prob": -1.5, "num_tokens": 3},
    {"prompt": "22", "continuation": "222", "log_prob": -1.5, "num_tokens": 3},
    {"prompt": "333", "continuation": "333", "log_prob": -1.5, "num_tokens": 3},
]


class Recorder(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[tuple[int, str, str]] = []
        self.messages: list[str] = []

    def text(self, step: int, name: str, text: str) -> None:
        self.texts.append((step, name, text))

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(params=[SpmdPartitioner, PmapPartitioner])
def decoding(
    request: pytest.FixtureRequest, tiny: SimpleNamespace, tmp_path: Any
) -> tuple[DecodeProgram, Any]:
    """The program and a state."""
    partitioner = request.param()
    partitioner.start()
    task = tiny.task_config().Instantiate()
    partitioner.bind(task)
    prompts = make_input(tiny.Prompts.HParams.config(percore_batch_size=1.0), partitioner)
    folder = epath.Path(tmp_path) / "decode"
    program = DecodeProgram(task, partitioner, prompts, "prompts", folder)
    return program, partitioner.init_fn(task)()


def test_one_record_for_each_prompt_and_none_for_padding(decoding: tuple[DecodeProgram, Any]):
    program, state = decoding
    recorder = Recorder()
    assert program.run(state, 7, recorder) == RECORDS
    path = program.output_path(7)
    assert path is not None
    assert path.name == "step_00000007.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == RECORDS
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert recorder.texts == [(7, "prompts", "1111")]


def test_a_finished_output_is_read_and_not_made_again(decoding: tuple[DecodeProgram, Any]):
    program, state = decoding
    path = program.output_path(7)
    assert path is not None
    path.parent.mkdir(parents=True)
    kept = [{"prompt": "by", "continuation": "hand", "log_prob": 0.0, "num_tokens": 4}]
    path.write_text(json.dumps(kept[0]) + "\n")
    recorder = Recorder()
    assert program.run(state, 7, recorder) == kept
    assert recorder.messages == [f"{path} is already there"]
    assert program.run(state, 8, recorder) == RECORDS


def test_a_half_written_output_does_not_count(decoding: tuple[DecodeProgram, Any]):
    program, state = decoding
    path = program.output_path(7)
    assert path is not None
    path.parent.mkdir(parents=True)
    (path.parent / f"{path.name}.partial").write_text('{"prompt": "1')
    assert program.run(state, 7, Recorder()) == RECORDS
