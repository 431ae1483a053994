"""DecodeProgram: records compared with computed ones.

The model of conftest.py continues a prompt with three copies of its first id, each with
log-probability -0.5. Prompt n is n + 1 times the id n + 1.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from flax import linen as nn

from layerkit.config.nested_map import NestedMap
from layerkit_runner.data.host_inputs import make_input
from layerkit_runner.observers import Observer
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.run.programs.decode_program import DecodeProgram

RECORDS = [
    {"example": 0, "prompt": "1", "continuation": "111", "log_prob": -1.5, "num_tokens": 3},
    {"example": 1, "prompt": "22", "continuation": "222", "log_prob": -1.5, "num_tokens": 3},
    {"example": 2, "prompt": "333", "continuation": "333", "log_prob": -1.5, "num_tokens": 3},
]


@pytest.fixture(params=[SpmdPartitioner, PmapPartitioner])
def make(request: pytest.FixtureRequest, tiny: SimpleNamespace, tmp_path: Any) -> Any:
    """Makes a program and a state, by default those of conftest.py."""

    def build(
        task: Any = None, prompts: Any = None, num_devices: int = 8
    ) -> tuple[DecodeProgram, Any]:
        partitioner = request.param()
        partitioner.start(jax.devices()[:num_devices])
        task = (task or tiny.task_config()).Instantiate()
        partitioner.bind(task)
        config = (prompts or tiny.Prompts.HParams.config()).clone(percore_batch_size=1.0)
        folder = epath.Path(tmp_path) / "decode"
        dataset = make_input(config, partitioner)
        program = DecodeProgram(task, partitioner, dataset, "prompts", folder)
        return program, partitioner.init_fn(task)()

    return build


def test_decoding_makes_one_record_for_each_prompt(make: Any, recorder: Any):
    program, state = make()
    assert program.run(state, 7, recorder) == RECORDS
    path = program.output_path(7)
    assert path.name == "step_00000007.jsonl"
    assert written(program) == RECORDS
    assert [*path.parent.iterdir()] == [path]
    assert recorder.texts == [(7, "prompts", "1⟫111")]


def written(program: DecodeProgram) -> list[dict[str, Any]]:
    """The records in the file of step 7."""
    return [json.loads(line) for line in program.output_path(7).read_text().splitlines()]


def drawing(tiny: SimpleNamespace, traces: list[Any]) -> Any:
    """Return the config of a task whose model continues prompts with random digits."""

    class Drawing(tiny.Regression):
        """Goes on with random digits."""

        def decode(self, batch: NestedMap) -> NestedMap:
            traces.append(batch.ids.shape)
            outputs = super().decode(batch)
            digits = jax.random.randint(self.next_prng_key(), outputs.ids.shape, 1, 10)
            column = np.arange(outputs.ids.shape[1])
            is_drawn = column >= batch.prompt_lengths[:, None]
            return NestedMap({**outputs, "ids": jax.numpy.where(is_drawn, digits, outputs.ids)})

    return tiny.task_config().set(model=Drawing.HParams.config())


@pytest.mark.parametrize("seed", [None, 5])
def test_decode_random_seed_draws_the_same_numbers_at_every_step(
    make: Any, tiny: SimpleNamespace, seed: int | None
):
    task = drawing(tiny, [])
    task.train.decode_random_seed = seed
    program, state = make(task)
    later = state.replace(step=state.step + 1)
    drawn = [program.run(each, step, Observer()) for step, each in enumerate((state, later))]
    assert (drawn[0] == drawn[1]) == (seed is not None)


class Words:
    """A metric with the methods of clu's: the number of different words."""

    def __init__(self, words: set[str]) -> None:
        self.words = words

    def merge(self, other: Words) -> Words:
        return Words(self.words | other.words)

    def compute(self) -> int:
        return len(self.words)


def test_process_decode_out_of_the_model_makes_records_and_metrics(
    make: Any, tiny: SimpleNamespace, recorder: Any
):
    class Processing(tiny.Regression):
        @nn.nowrap
        def process_decode_out(self, input_obj: Any, decode_out: NestedMap) -> Any:
            rows = np.flatnonzero(decode_out.eval_sample_weights)
            texts = input_obj.ids_to_strings(decode_out.ids, decode_out.lengths)
            lengths = decode_out.lengths[rows]
            scalars = {"length": (lengths.mean(), len(rows))}
            values = [(texts[row], {"length": decode_out.lengths[row]}) for row in rows]
            return scalars, values, {"texts": Words({texts[row] for row in rows})}

    class TwoBatches(tiny.Prompts):
        num_rows: int = 9  # 8 and 1

    task = tiny.task_config().set(model=Processing.HParams.config())
    program, state = make(task, TwoBatches.HParams.config())
    records = program.run(state, 7, recorder)
    # Prompt n is n + 1 times the id n + 1, and three are appended.
    assert [record["length"] for record in records] == [n + 4 for n in range(9)]
    assert records[1] == {"key": "22222", "length": 5}
    assert recorder.evals == [(7, "decode/prompts", {"length": 8.0, "texts": 9.0})]
    assert written(program) == records


def test_each_batch_uses_its_own_random_key(make: Any, tiny: SimpleNamespace):
    traces: list[Any] = []

    class SamePrompts(tiny.Prompts):
        """The prompt 1, sixteen times: two batches."""

        num_rows: int = 16

        def _read_rows(self, rows: np.ndarray) -> NestedMap:
            return super()._read_rows(np.zeros_like(rows))

    program, state = make(drawing(tiny, traces), SamePrompts.HParams.config())
    records = program.run(state, 7, Observer())
    drawn = [record["continuation"] for record in records]
    assert len(drawn) == 16
    assert drawn[:8] != drawn[8:]
    again = program.run(state, 8, Observer())
    assert [record["continuation"] for record in again] == drawn
    assert len(traces) == 1  # or each batch would be compiled for


def test_scores_and_other_candidates_are_kept(make: Any, tiny: SimpleNamespace):
    class Ranking(tiny.Regression):
        """Besides what it repeats, the same less its last id; and a third that is not found."""

        def decode(self, batch: NestedMap) -> NestedMap:
            best = super().decode(batch)
            best.scores = jax.numpy.sum(best.log_probs, axis=1) / 2
            other = NestedMap(
                ids=best.ids,
                lengths=best.lengths - 1,
                log_probs=best.log_probs.at[:, -1].set(0.0),
                scores=best.scores - 0.25,
            )
            none = NestedMap(
                ids=best.ids,
                lengths=batch.prompt_lengths,
                log_probs=0 * best.log_probs,
                scores=jax.numpy.full_like(best.scores, -np.inf),
            )
            candidates = jax.tree.map(
                lambda *each: jax.numpy.stack(each, axis=1), best, other, none
            )
            return NestedMap({**best, "candidates": candidates})

    program, state = make(tiny.task_config().set(model=Ranking.HParams.config()))
    records = program.run(state, 7, Observer())
    assert records == [
        {
            **record,
            "score": -0.75,
            "candidates": [
                {"continuation": first * 3, "log_prob": -1.5, "num_tokens": 3, "score": -0.75},
                {"continuation": first * 2, "log_prob": -1.0, "num_tokens": 2, "score": -1.0},
            ],
        }
        for record, first in zip(RECORDS, "123", strict=True)
    ]
    assert written(program) == records


def test_a_model_that_reads_a_source_has_it_as_its_prompt(make: Any, tiny: SimpleNamespace):
    class Translating(tiny.Regression):
        """Says the first id of its source twice, after a first input of its own."""

        def decode(self, batch: NestedMap) -> NestedMap:
            source = batch.src
            is_row = jax.numpy.any(source.ids != 0, axis=1).astype(int)
            spoken = jax.numpy.broadcast_to(source.ids[:, :1], (len(is_row), 2))
            return NestedMap(
                ids=jax.numpy.pad(spoken, ((0, 0), (1, 0))),
                lengths=3 * is_row,
                prompt_lengths=is_row,
                log_probs=jax.numpy.full(spoken.shape, -0.5),
                source=NestedMap(ids=source.ids, lengths=jax.numpy.sum(source.ids != 0, axis=1)),
            )

    class Sources(tiny.Prompts):
        """The prompts as sources, in a vocabulary of letters; targets are digits."""

        def _read_rows(self, rows: np.ndarray) -> NestedMap:
            return NestedMap(src=NestedMap(ids=super()._read_rows(rows).ids))

        def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
            texts = super().ids_to_strings(ids, lengths)
            letters = str.maketrans("123", "abc")
            return {"src": [text.translate(letters) for text in texts], "tgt": texts}[key]

    task = tiny.task_config().set(model=Translating.HParams.config())
    program, state = make(task, Sources.HParams.config())
    assert program.run(state, 7, Observer()) == [
        {
            "example": number,
            "prompt": source,
            "continuation": target,
            "log_prob": -1.0,
            "num_tokens": 2,
        }
        for number, (source, target) in enumerate([("a", "11"), ("bb", "22"), ("ccc", "33")])
    ]


def test_metrics_of_the_data_set_see_each_prediction_once(
    make: Any, tiny: SimpleNamespace, recorder: Any
):
    class Rated(tiny.Prompts):
        """Its metric is how many predictions are what the prompts call for."""

        has_prediction_metrics = True

        def prediction_metrics(self, predictions: Any) -> dict[str, float]:
            right = [predictions[n] == str(n + 1) * 3 for n in predictions]
            return {"right": np.float32(sum(right)), "examples": len(predictions)}

    program, state = make(prompts=Rated.HParams.config())
    assert program.run(state, 7, recorder) == RECORDS
    expected = (7, "decode/prompts", {"right": 3.0, "examples": 3.0})
    assert recorder.evals == [expected]


def test_example_with_an_empty_prompt_is_decoded(make: Any, tiny: SimpleNamespace):
    class FirstIsEmpty(tiny.Prompts):
        """The first example has no prompt at all."""

        def _read_rows(self, rows: np.ndarray) -> NestedMap:
            batch = super()._read_rows(rows)
            batch.prompt_lengths = np.where(rows == 0, 0, batch.prompt_lengths).astype(np.int32)
            return batch

    program, state = make(prompts=FirstIsEmpty.HParams.config())
    records = program.run(state, 7, Observer())
    assert [record["example"] for record in records] == [0, 1, 2]
    assert records[0]["prompt"] == ""
