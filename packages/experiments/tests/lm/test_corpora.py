"""Where the text of C4, The Pile and LAMBADA comes from, told without reading any."""

from __future__ import annotations

from typing import Any

import pytest

from layerkit.config import target_of
from layerkit.errors import ConfigError
from layerkit_experiments.lm.c4 import C4Spmd1BAdam4Replicas
from layerkit_experiments.lm.pile import Lambada126M, Pile126M
from layerkit_experiments.recipes.language_model import remat_policy
from layerkit_inputs import GrainMapInput, LocalText, SyntheticInput, TokenRecords
from layerkit_runner.config.experiment import reduced_values
from layerkit_runner.run.resolve import resolve


def test_the_vocabulary_of_the_environment_is_written_down(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VOCAB_PATH", "env.model")
    for fields, path in (({}, "env.model"), ({"VOCAB_PATH": "own.model"}, "own.model")):
        for data in resolve(Pile126M(**fields)).datasets:
            assert data.mixture_or_task.vocab_path == path


def test_the_same_data_in_another_format():
    fields: dict[str, Any] = {"DATA_FORMAT": "grain", "GRAIN_DATA_DIR": "tokens"}
    train, heldout = resolve(C4Spmd1BAdam4Replicas(**fields, VOCAB_PATH="c4.model")).datasets
    for data, split in ((train, "train"), (heldout, "heldout")):
        assert target_of(data) is TokenRecords
        assert (data.path, data.split, data.seq_length) == ("tokens", split, 1024)
        assert (data.percore_batch_size, data.tokenizer.path) == (32.0, "c4.model")
    assert heldout.eval_loop_num_batches == 8
    (data,) = resolve(Lambada126M(**fields, VOCAB_PATH="c4.model")).datasets
    assert target_of(data) is GrainMapInput
    rows = data.dataset
    assert (rows.path, rows.vocab_path, rows.vocab_size) == ("tokens", "c4.model", 50304)
    assert (rows.seq_length, rows.target_length) == (2048, 64)


@pytest.mark.parametrize(
    ("data_format", "reader"), [("local_text", LocalText), ("synthetic", SyntheticInput)]
)
def test_other_text_for_the_same_model(data_format: str, reader: type):
    for batches in (8, None):
        experiment = C4Spmd1BAdam4Replicas(DATA_FORMAT=data_format, EVAL_NUM_BATCHES=batches)
        for data in resolve(experiment).datasets:
            assert target_of(data) is reader
            data.clone(batch_size=1, percore_batch_size=None, seq_length=8).Instantiate()


@pytest.mark.parametrize(
    ("cls", "fields", "field"),
    [
        (Pile126M, {"DATA_FORMAT": "grain"}, "GRAIN_DATA_DIR"),
        (Lambada126M, {"DATA_FORMAT": "grain"}, "GRAIN_DATA_DIR"),
        (
            Pile126M,
            {"DATA_FORMAT": "grain", "GRAIN_DATA_DIR": "tokens", "PACKED_INPUT": False},
            "PACKED_INPUT",
        ),
        (Lambada126M, {"DATA_FORMAT": "synthetic"}, "DATA_FORMAT"),
        (Lambada126M, {"MAX_SEQ_LEN": 64}, "TARGET_LENGTH"),
    ],
)
def test_contradicting_fields_raise(raises: Any, cls: type, fields: dict[str, Any], field: str):
    with raises(ConfigError, field=field):
        resolve(cls(**fields))


def test_policies_by_the_names_of_pax():
    assert remat_policy("AutodiffCheckpointType.SAVE_NOTHING") == "full"
    assert remat_policy("SAVE_DOT_WITH_NO_BATCH_DIM") == "dots_no_batch"
    assert remat_policy("SAVE_OUT_PROJ") == "attention_out"
    assert remat_policy("projections") == "projections"
    fields = {"CHECKPOINT_POLICY": "SAVE_EVERYTHING"}
    assert resolve(Pile126M(**fields)).task.model.lm_tpl.stack_tpl.remat == "none"


def test_a_reduced_form_is_of_the_same_kind():
    whole, reduced = (
        resolve(C4Spmd1BAdam4Replicas(**fields))
        for fields in ({}, reduced_values(C4Spmd1BAdam4Replicas))
    )
    assert reduced.task.model.lm_tpl.num_layers == 2
    assert reduced.task.model.lm_tpl.softmax_tpl.logit_soft_cap == 30.0
    assert reduced.task.train.learner.optimizer == whole.task.train.learner.optimizer
    assert target_of(reduced.partitioner) is target_of(whole.partitioner)
    assert reduced.partitioner.ici_mesh_shape is None
