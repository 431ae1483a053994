from __future__ import annotations

from typing import Any

import pytest

from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.seqio.seqio_input import SeqIOInput


@pytest.mark.parametrize("converter", ["language_model", "prefix_lm", "encoder_decoder"])
@pytest.mark.parametrize("use_packing", [True, False])
def test_blank_batch_has_the_arrays_of_a_real_batch(converter, use_packing, make_task):
    examples = [{"inputs": [5, 6], "targets": [7, 8, 9]}] * 8
    fields: dict[str, Any] = {
        "task_feature_lengths": {"inputs": 4, "targets": 6},
        "feature_converter": converter,
        "use_packing": use_packing,
        "is_training": True,
    }
    task = make_task(examples, splits=("train",))
    batch = SeqIOInput(batch_size=3, mixture_or_task=task, **fields).get_next()
    config = SeqIOInput.HParams.config(mixture_name="not_here", **fields)
    blank = SeqIOInput.blank_batch(config, 3)
    assert spec_of(blank) == spec_of(batch)
    assert not any(array.any() for path, array in blank.flatten_items() if "paddings" not in path)


def test_prompts_have_no_blank_batch():
    config = SeqIOInput.HParams.config(
        mixture_name="not_here", task_feature_lengths={"inputs": 4}, feature_converter="prompts"
    )
    assert SeqIOInput.blank_batch(config, 3) is None
