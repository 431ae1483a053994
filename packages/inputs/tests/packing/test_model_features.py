"""Features: the arrays of SeqIO's converters, from lengths instead of from zeros."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.errors import ConfigError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.packing.first_fit import plan_packing
from layerkit_inputs.packing.model_features import (
    Segment,
    encoder_decoder_features,
    lm_features,
    prompt_features,
    segment_features,
    stretch_pair_features,
)

EOS = 1


def trimmed(examples, length):
    return [[*tokens[: length - 1], EOS] for tokens in examples]


def lists(batch):
    return {path: array.tolist() for path, array in batch.flatten_items()}


def test_inputs_and_targets_of_an_unpacked_row():
    inputs, targets = trimmed([[7, 8, 5, 6, 9, 4, 3]], 7), trimmed([[13, 19]], 5)
    batch = lm_features(inputs, targets, length=12)
    assert lists(batch) == {
        "ids": [[0, 7, 8, 5, 6, 9, 4, 1, 13, 19, 1, 0]],
        "labels": [[7, 8, 5, 6, 9, 4, 1, 13, 19, 1, 0, 0]],
        "weights": [[1.0] * 10 + [0, 0]],
        "paddings": [[0.0] * 10 + [1, 1]],
        "segment_ids": [[1] * 10 + [0, 0]],
        "segment_pos": [[*range(10), 0, 0]],
        "inputs_indicator": [[1] * 8 + [0] * 4],
    }
    assert {spec.dtype.name for _, spec in spec_of(batch).flatten_items()} == {"int32", "float32"}


def test_the_loss_of_a_continuation_counts_targets_only():
    batch = lm_features([[7, 8, 1]], [[3, 1]], length=7, weights_on_targets_only=True)
    assert batch.weights.tolist() == [[0, 0, 0, 1, 1, 0, 0]]
    assert batch.paddings.tolist() == [[0, 0, 0, 0, 0, 1, 1]]


def test_three_examples_packed_into_one_row():
    targets = trimmed([[7, 6, 9], [18, 14], [23, 25]], 12)
    plan = plan_packing([len(tokens) for tokens in targets], 12)
    assert lists(lm_features(None, targets, length=12, rows=plan.rows())) == {
        "ids": [[0, 7, 6, 9, 0, 18, 14, 0, 23, 25, 0, 0]],
        "labels": [[7, 6, 9, 1, 18, 14, 1, 23, 25, 1, 0, 0]],
        "weights": [[1.0] * 10 + [0, 0]],
        "paddings": [[0.0] * 10 + [1, 1]],
        "segment_ids": [[1] * 4 + [2] * 3 + [3] * 3 + [0, 0]],
        "segment_pos": [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 0]],
    }


def test_a_packed_prefix_lm_is_that_of_seqio():
    inputs, targets = [[7, 8, 5, 1], [8, 4, 9, 3, 1]], [[3, 9, 1], [4, 1]]
    batch = lm_features(inputs, targets, length=15, rows=[[0, 1]], weights_on_targets_only=True)
    assert batch.labels.tolist() == [[7, 8, 5, 1, 3, 9, 1, 8, 4, 9, 3, 1, 4, 1, 0]]
    assert batch.ids.tolist() == [[0, 7, 8, 5, 1, 3, 9, 0, 8, 4, 9, 3, 1, 4, 0]]
    assert batch.weights.tolist() == [[0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]]
    assert batch.segment_pos.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0]]
    assert batch.segment_ids.tolist() == [[1] * 7 + [2] * 7 + [0]]
    assert batch.inputs_indicator.tolist() == [[1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]]


def test_source_and_target_packed_side_by_side():
    inputs = trimmed([[7, 8, 5, 9, 4], [28, 24]], 10)
    targets = trimmed([[13, 19], [34]], 5)
    plan = plan_packing([[len(i), len(t)] for i, t in zip(inputs, targets, strict=True)], (10, 5))
    batch = encoder_decoder_features(
        inputs, targets, inputs_length=10, targets_length=5, rows=plan.rows()
    )
    assert lists(batch) == {
        "src.ids": [[7, 8, 5, 9, 4, 1, 28, 24, 1, 0]],
        "src.paddings": [[0.0] * 9 + [1]],
        "src.segment_ids": [[1] * 6 + [2] * 3 + [0]],
        "src.segment_pos": [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0]],
        "tgt.ids": [[0, 13, 19, 0, 34]],
        "tgt.labels": [[13, 19, 1, 34, 1]],
        "tgt.weights": [[1.0] * 5],
        "tgt.paddings": [[0.0] * 5],
        "tgt.segment_ids": [[1, 1, 1, 2, 2]],
        "tgt.segment_pos": [[0, 1, 2, 0, 1]],
    }
    for name, array in batch.flatten_items():
        assert array.dtype == ("float32" if name[4:] in ("weights", "paddings") else "int32"), name


def test_segments_of_both_sides_have_equal_numbers_if_a_side_is_empty():
    batch = encoder_decoder_features(
        [[5], [], [6]], [[7], [8], [9]], inputs_length=3, targets_length=3, rows=[[0, 1, 2]]
    )
    assert batch.src.segment_ids.tolist() == [[1, 3, 0]]
    assert batch.tgt.segment_ids.tolist() == [[1, 2, 3]]


def test_source_and_target_without_packing():
    batch = encoder_decoder_features(
        [[5, 1], [6, 7, 1]], [[3, 1], [4, 4, 1]], inputs_length=3, targets_length=4, bos_id=2
    )
    assert batch.src.ids.tolist() == [[5, 1, 0], [6, 7, 1]]
    assert batch.tgt.ids.tolist() == [[2, 3, 1, 0], [2, 4, 4, 1]]
    assert batch.tgt.weights.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    # A model that decodes refuses packed sources, which have these.
    assert "segment_pos" not in batch.src and "segment_pos" not in batch.tgt


def test_padding_is_defined_by_length_and_not_by_an_id():
    batch = lm_features(None, [[0, 5, 0]], length=5, pad_id=9)
    assert batch.labels.tolist() == [[0, 5, 0, 9, 9]]
    assert batch.weights.tolist() == [[1, 1, 1, 0, 0]]


def test_inputs_that_ended_before_a_piece_are_not_marked_in_it():
    rows = [
        [Segment(np.array([6, 7], np.int32), num_inputs=after, first_id=5)] for after in (1, -1)
    ]
    batch = segment_features(rows, length=3, has_inputs=True, weights_on_targets_only=True)
    assert batch.inputs_indicator.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert batch.weights.tolist() == [[0, 1, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    ("negative_ids", "weights"), [("no_weight", [0, 1, 0, 1, 0]), ("weight", [1, 1, 1, 1, 0])]
)
def test_negative_ids_are_absolute_values_with_the_weight_asked_for(negative_ids, weights):
    batch = lm_features(None, [[-5, 6, -7, 8]], length=5, negative_ids=negative_ids)
    assert batch.labels.tolist() == [[5, 6, 7, 8, 0]]
    assert batch.ids.tolist() == [[0, 5, 6, 7, 8]]
    assert batch.weights.tolist() == [weights]
    assert batch.paddings.tolist() == [[0, 0, 0, 0, 1]]


def test_prompts_stand_at_the_left():
    batch = prompt_features([[5, 6], [], [7, 8, 9]], length=4, bos_id=2)
    assert lists(batch) == {
        "ids": [[2, 5, 6, 0], [2, 0, 0, 0], [2, 7, 8, 9]],
        "paddings": [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]],
        "prompt_lengths": [3, 1, 4],
    }
    assert prompt_features([[5]], length=2).ids.tolist() == [[5, 0]]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12),
    seed=st.integers(0, 9),
)
def test_every_label_counts_once_and_is_predicted_from_the_one_before(sizes, seed):
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(1, 99, size) for size, _ in sizes]
    targets = [rng.integers(1, 99, size) for _, size in sizes]
    plan = plan_packing([sum(size) for size in sizes], 10, open_rows=2)
    batch = lm_features(inputs, targets, length=10, rows=plan.rows(), weights_on_targets_only=True)
    assert batch.weights.sum() == sum(size for _, size in sizes)
    for row, examples in enumerate(plan.rows()):
        for number, example in enumerate(examples, start=1):
            here = batch.segment_ids[row] == number
            tokens = [*inputs[example], *targets[example]]
            assert batch.labels[row, here].tolist() == tokens
            assert batch.ids[row, here].tolist() == [0, *tokens[:-1]]
            expected = [0] * len(inputs[example]) + [1] * len(targets[example])
            assert batch.weights[row, here].tolist() == expected


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (lambda: lm_features([[1, 2, 3]], [[4, 5]], length=4), "tokens of row 0", 5),
        (
            lambda: lm_features(None, [[1], [2, -3]], length=4),
            "example 1, targets",
            "ids from -3 to 2",
        ),
        (
            lambda: lm_features([[1]], [np.array([2.0])], length=4),
            "example 0, targets",
            "float64[1]",
        ),
        (lambda: prompt_features([[1], [[2]]], length=4), "prompt 1", "int64[1, 1]"),
        (
            lambda: lm_features(None, [[2**31]], length=4),
            "example 0, targets",
            "ids from 2147483648 to 2147483648",
        ),
    ],
    ids=["too long", "negative", "floats", "two dimensions", "too large"],
)
def test_wrong_examples_raise(raises, call, field, value):
    with raises(ConfigError, field=field, value=value):
        call()


@pytest.mark.parametrize("is_packed", [True, False])
def test_pairs_laid_end_to_end_are_those_given_one_by_one(is_packed):
    inputs, targets = [[7, 8, 1], [9, 1], []], [[3, 1], [], [4, 5, 1]]
    rows = [[0, 1], [], [2]] if is_packed else [[0], [1], [2]]
    expected = encoder_decoder_features(
        inputs,
        targets,
        inputs_length=6,
        targets_length=4,
        rows=rows if is_packed else None,
        bos_id=2,
        pad_id=6,
    )
    made = stretch_pair_features(
        np.concatenate(inputs).astype(np.int32),
        np.concatenate(targets).astype(np.int32),
        rows=np.repeat(np.arange(3), [len(row) for row in rows]),
        sizes=np.array([[*map(len, pair)] for pair in zip(inputs, targets, strict=True)]),
        num_rows=3,
        lengths=(6, 4),
        is_packed=is_packed,
        bos_id=2,
        pad_id=6,
    )
    for (path, array), (other_path, other) in zip(
        made.flatten_items(), expected.flatten_items(), strict=True
    ):
        assert path == other_path and array.dtype == other.dtype
        np.testing.assert_array_equal(array, other, err_msg=path)
