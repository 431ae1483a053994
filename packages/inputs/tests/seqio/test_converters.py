from __future__ import annotations

import numpy as np
import pytest

from layerkit_inputs.seqio.converters import RowFormat


@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=str)
def test_given_first_token_shifts_labels_to_the_left(dtype):
    """As `LanguageModelFeatures(pack=True, reverse_bos_padding=True)` of Paxml, without its EOS."""
    row_format = RowFormat(
        "language_model",
        {"targets": 7},
        packed=True,
        weights_on_targets_only=False,
        bos_id=0,
        first_token="given",
    )
    row = [{"targets": np.array(ids, dtype)} for ids in ([7, 8, 5], [4, 9])]
    batch = row_format.batch([row])
    assert batch.ids.tolist() == [[7, 8, 5, 4, 9, 0, 0]]
    assert batch.labels.tolist() == [[8, 5, 4, 9, 0, 0, 0]]
    assert batch.weights.tolist() == [[1, 1, 1, 1, 0, 0, 0]]
    assert batch.paddings.tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0, 0]]
    assert batch.segment_pos.tolist() == [[0, 1, 2, 0, 1, 0, 0]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=str)
@pytest.mark.parametrize("converter", ["prefix_lm", "language_model"])
def test_suffixes_follow_targets_and_alone_have_a_loss(converter, dtype):
    """The example in the docstring of SeqIO's PrefixSuffixLMFeatureConverter."""
    examples = [
        {"inputs": [9, 4, 6], "targets": [3, 9], "suffixes": [2, 1]},
        {"inputs": [3, 2], "targets": [4], "suffixes": []},
    ]
    row = [{name: np.array(ids, dtype) for name, ids in one.items()} for one in examples]
    row_format = RowFormat(
        converter,
        {"inputs": 7, "targets": 5, "suffixes": 3},
        packed=True,
        weights_on_targets_only=converter == "prefix_lm",
        bos_id=0,
    )
    assert row_format.limits == (15,) and not row_format.passed_through
    assert [row_format.sizes(example) for example in row] == [(7,), (3,)]
    batch = row_format.batch([row])
    padding = [0] * 5
    assert batch.labels.tolist() == [[9, 4, 6, 3, 9, 2, 1, 3, 2, 4, *padding]]
    assert batch.ids.tolist() == [[0, 9, 4, 6, 3, 9, 2, 0, 3, 2, *padding]]
    assert batch.weights.tolist() == [[0, 0, 0, 0, 0, 1, 1, 0, 0, 1, *padding]]
    assert batch.segment_ids.tolist() == [[1] * 7 + [2] * 3 + padding]
    assert batch.segment_pos.tolist() == [[*range(7), *range(3), *padding]]


def test_suffixes_of_an_encoder_decoder_are_passed_through():
    lengths = {"inputs": 7, "targets": 8, "suffixes": 3}
    row_format = RowFormat(
        "encoder_decoder", lengths, packed=False, weights_on_targets_only=False, bos_id=0
    )
    assert row_format.passed_through == ["suffixes"] and row_format.limits == (7, 8, 3)
