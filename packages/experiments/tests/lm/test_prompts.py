"""Samples of the experiments: beginnings of held-out rows, the same at each decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.config import Config
from layerkit.config.nested_map import NestedMap
from layerkit.errors import ConfigError
from layerkit_experiments.lm.c4 import C4Spmd1BAdam4Replicas
from layerkit_experiments.lm.jaxformer import Jaxformer1B
from layerkit_experiments.lm.lm_cloud import LmCloudSpmdTest
from layerkit_experiments.lm.pile import Pile126M
from layerkit_experiments.recipes.published_data.prompts import RowPrompts
from layerkit_inputs import BaseInput
from layerkit_inputs.testing.tfds_folders import write_tfds_folder
from layerkit_runner.run.resolve import resolve


def batches(config: Any, rows: int) -> list[NestedMap]:
    source = config.clone(batch_size=rows, percore_batch_size=None).Instantiate()
    return [*source.eval_batches(), *source.eval_batches()]


@pytest.mark.parametrize("data_format", ["local_text", "synthetic"])
def test_prompts_are_the_beginnings_of_the_first_held_out_rows(data_format: str):
    fields = {"DATA_FORMAT": data_format, "PROMPTS_PER_DEVICE": 2.0, "PROMPT_LENGTH": 7}
    experiment = resolve(C4Spmd1BAdam4Replicas(**fields))
    (prompts,) = experiment.decode_datasets
    assert (prompts.name, prompts.percore_batch_size) == ("prompts", 2.0)
    first, again = batches(prompts, 3)
    rows = experiment.datasets[-1].clone(batch_size=3, percore_batch_size=None).Instantiate()
    np.testing.assert_array_equal(first.ids, rows.get_next().ids[:, :7])
    np.testing.assert_array_equal(first.ids, again.ids)
    assert first.prompt_lengths.tolist() == [7, 7, 7]


def test_prompts_of_seqio_are_texts_of_the_held_out_split(tmp_path: Path):
    pytest.importorskip("seqio")
    texts = {"train": ["one"] * 4, "validation": ["two words"] * 4}
    write_tfds_folder(tmp_path, "the_pile:1.0.0", texts=texts)
    fields = {"VOCAB_PATH": "bytes", "TFDS_DATA_DIR": str(tmp_path), "PROMPTS_PER_DEVICE": 1.0}
    (prompts,) = resolve(Pile126M(**fields, PROMPT_LENGTH=5)).decode_datasets
    source = prompts.clone(batch_size=2, percore_batch_size=None).Instantiate()
    (batch,) = source.eval_batches()
    # The first id of a row is the start id.
    assert batch.prompt_lengths.tolist() == [5, 5]
    assert source.ids_to_strings(batch.ids[:, 1:], batch.prompt_lengths - 1) == ["two ", "two "]


def test_rows_of_another_input_name_the_field_and_the_way_out():
    class Rows(BaseInput):
        pass

    class Mine(C4Spmd1BAdam4Replicas):
        def datasets(self) -> list[Config]:
            return [Rows.HParams.config()]

    with pytest.raises(ConfigError, match=r"PROMPTS_PER_DEVICE=2.0.*\(RowPrompts, Rows\)"):
        Mine(PROMPTS_PER_DEVICE=2.0).decode_datasets()


def test_prompt_ends_with_the_first_document_of_a_packed_row():
    class Packed(RowPrompts, BaseInput):
        def _next(self) -> NestedMap:
            return NestedMap(
                ids=np.array([[5, 6, 7, 8], [9, 4, 0, 0]], np.int32),
                paddings=np.array([[0, 0, 0, 0], [0, 0, 1, 1]], np.float32),
                segment_ids=np.array([[1, 1, 2, 2], [1, 1, 0, 0]], np.int32),
                provenance=np.array([0, 1], np.int32),
            )

        def _reset(self) -> None:
            pass

    batch = Packed(batch_size=2, prompt_length=3, eval_loop_num_batches=1).get_next()
    assert batch.ids.tolist() == [[5, 6, 0], [9, 4, 0]]
    assert batch.paddings.tolist() == [[0, 0, 1], [0, 0, 1]]
    assert batch.prompt_lengths.tolist() == [2, 2]
    assert batch.provenance.tolist() == [0, 1]


def test_jaxformer_samples_with_one_seed_and_saves_the_first_weights():
    experiment = resolve(Jaxformer1B(SEED=9))
    train = experiment.task.train
    assert (train.decode_random_seed, train.save_step_zero) == (9, True)
    assert [config.name for config in experiment.decode_datasets] == ["prompts"]


def test_others_decode_only_if_asked():
    assert resolve(LmCloudSpmdTest()).decode_datasets == []
    assert len(resolve(LmCloudSpmdTest(PROMPTS_PER_DEVICE=1)).decode_datasets) == 1
