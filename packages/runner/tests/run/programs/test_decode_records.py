"""Records of decoded batches: which rows, which values, and where they are kept."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from layerkit.config.nested_map import NestedMap
from layerkit_runner import UsageError
from layerkit_runner.observers.metrics_log import encode
from layerkit_runner.run.programs.decode_program import LARGEST_LIST, DecodedRecords


@pytest.fixture
def collect(tiny: SimpleNamespace) -> Any:
    """Collects one batch of outputs, NumPy arrays of two rows."""

    def make(
        outputs: dict[str, Any], *, kind: str = "Points", npz_name: str | None = "step.npz"
    ) -> DecodedRecords:
        dataset = getattr(tiny, kind).HParams.config(batch_size=2).Instantiate()
        decoded = DecodedRecords(dataset, "points", npz_name=npz_name)
        decoded.add(NestedMap(outputs), num_rows=2)
        return decoded

    return make


@pytest.mark.parametrize(
    ("marks", "kept"),
    [
        ({}, [1.0, 2.0]),
        ({"provenance": np.array([-1, 5])}, [2.0]),
        ({"eval_sample_weights": np.array([0.5, 0.0])}, [1.0]),
        ({"prompt_lengths": np.array([0, 3])}, [2.0]),
    ],
)
def test_rows_of_padding_are_left_out_by_any_mark(collect: Any, marks: Any, kept: list[float]):
    records = collect({**marks, "score": np.array([1.0, 2.0])}).records
    assert [record["score"] for record in records] == kept
    assert [sorted({*record} - {"example"}) for record in records] == [["score"]] * len(kept)
    assert [record.get("example") for record in records] == (
        [5] if "provenance" in marks else [None] * len(kept)
    )


@pytest.mark.parametrize(
    ("array", "values"),
    [
        (np.array([True, False]), [True, False]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([1.5, 2.5], ml_dtypes.bfloat16), [1.5, 2.5]),
        (np.array([1 + 2j, 3j]), [[1.0, 2.0], [0.0, 3.0]]),
        (np.array([np.nan, -np.inf], np.float32), ["NaN", "-Infinity"]),
        (np.zeros((2, 0)), [[], []]),
    ],
)
def test_values_of_any_dtype_are_valid_json(collect: Any, array: np.ndarray, values: list[Any]):
    records = collect({"value": array}).records
    lines = [json.loads(encode(record), parse_constant=pytest.fail) for record in records]
    assert [line["value"] for line in lines] == values


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16])
def test_large_arrays_are_kept_beside_the_records(collect: Any, dtype: Any):
    large = np.arange(2 * (LARGEST_LIST + 1)).reshape(2, -1).astype(dtype)
    small = large[:, :-1]
    decoded = collect({"large": large, "small": small})
    arrays = np.load(io.BytesIO(decoded.npz()))
    assert list(arrays) == ["large"]
    for row, record in enumerate(decoded.records):
        assert record["large"] == {"npz": "step.npz", "array": "large", "row": row}
        assert record["small"] == small[row].tolist()
        assert arrays["large"][row].tolist() == large[row].tolist()
    in_memory = collect({"large": large}, npz_name=None)
    assert in_memory.npz() is None
    assert in_memory.records[1]["large"] == large[1].tolist()


@pytest.mark.parametrize("shape", [(), (3,), (1, 2)])
def test_output_without_an_entry_for_each_row_is_an_error(raises: Any, collect: Any, shape: Any):
    with raises(UsageError, field="of.mean", value=list(shape)):
        collect({"of": {"mean": np.zeros(shape)}})


CONTINUATION = {
    "ids": np.array([[1, 2, 2], [3, 4, 0]]),
    "lengths": np.array([3, 2]),
    "prompt_lengths": np.array([1, 1]),
    "log_probs": np.array([[-1.0, -0.5, 0.0], [-2.0, 0.0, 0.0]]),
}


def test_other_outputs_are_added_to_a_continuation(collect: Any):
    records = collect({**CONTINUATION, "entropy": np.array([0.25, 0.5])}, kind="Prompts").records
    assert records[0] == {
        "prompt": "1",
        "continuation": "22",
        "log_prob": -1.5,
        "num_tokens": 2,
        "entropy": 0.25,
    }


def test_prompt_and_continuation_are_the_text_of_all_ids(tiny: SimpleNamespace):
    class Words(tiny.Prompts):
        """Id n is the word n after a space, which is omitted at the beginning; 9 is a byte."""

        has_prediction_metrics = True

        def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
            rows = zip(ids, lengths, strict=True)
            texts = ["".join(f" {token}" for token in row[:length]) for row, length in rows]
            return [text.replace(" 9 9", " é").replace(" 9", "�")[1:] for text in texts]

    decoded = DecodedRecords(Words.HParams.config(batch_size=2).Instantiate(), "words", npz_name="")
    ids = np.array([[1, 2, 3, 2], [1, 9, 9, 2]])
    candidates = NestedMap(
        ids=np.stack([ids, ids], axis=1),
        lengths=np.full((2, 2), [4, 3]),
        log_probs=np.zeros((2, 2, 4)),
        scores=np.zeros((2, 2)),
    )
    outputs = NestedMap(
        ids=ids,
        lengths=np.full(2, 4),
        prompt_lengths=np.full(2, 2),
        log_probs=np.zeros((2, 4)),
        candidates=candidates,
    )
    decoded.add(outputs, num_rows=2)
    first, second = decoded.records
    assert (first["prompt"], first["continuation"], first["prediction"]) == ("1 2", " 3 2", "3 2")
    assert [one["continuation"] for one in first["candidates"]] == [" 3 2", " 3"]
    assert (second["prompt"], second["continuation"]) == ("1", " é 2")
    assert [one["continuation"] for one in second["candidates"]] == [" é 2", " é"]
