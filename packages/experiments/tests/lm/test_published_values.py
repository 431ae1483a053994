"""The named experiments have the published values, and their weights lie as their meshes say.

The tables are those that Pax, MLPerf and NVIDIA publish, written down here a second time. Nothing
as large as these models is made: weights are counted by shapes, on devices that are simulated in a
process of its own.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from layerkit.config import target_of
from layerkit_experiments.lm import c4_multislice, pile
from layerkit_experiments.lm.recipes import seqio_tasks
from layerkit_inputs import SeqIOInput
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.config.resolve import ResolvedExperiment, resolve
from layerkit_runner.errors import UsageError
from layerkit_runner.optim.schedules import (
    linear_warmup_cosine_decay,
    linear_warmup_exponential_decay,
)
from layerkit_runner.tools.commands import PLAN


class Row(NamedTuple):
    """One experiment: sizes, data, rate and mesh."""

    sizes: tuple[int, int, int, int, int]  # layers, model, hidden, heads, dims per head
    vocab: int
    length: int
    rows: float  # per device
    batch: int  # global rows
    rate: float
    ici: list[int]
    dcn: list[int] | None
    kind: str  # which family: E, K or pipelined K


B22 = (48, 6144, 24576, 24, 256)
WIDE = (24, 9216, 36864, 24, 384)
B1 = (16, 2048, 8192, 8, 256)
B32 = (40, 8192, 32768, 32, 256)
XL = (24, 3072, 12288, 24, 128)
SMALL = (12, 768, 3072, 12, 64)

PUBLISHED = {
    "c4.C4Spmd1BAdam4Replicas": Row(
        (13, 2560, 10240, 20, 128), 32000, 1024, 32, 128, 1e-3, [1, 4, 1], None, "E"
    ),
    "c4.C4Spmd16BAdam32Replicas": Row(
        (36, 6144, 24576, 48, 128), 32000, 1024, 16, 512, 1e-3, [1, 16, 2], None, "E"
    ),
    "c4.C4SpmdPipelineGpt3SmallAdam64Replicas": Row(
        XL, 50257, 2048, 8, 512, 2e-4, [4, 1, 4, 4], None, "pipeline"
    ),
    "c4.C4SpmdPipelineGpt3SmallAdam8Replicas": Row(
        XL, 51200, 2048, 64, 512, 2e-4, [2, 1, 2, 2], None, "pipeline"
    ),
    **{
        f"c4_multislice.C4Spmd22BAdam{slices}xv4_128": Row(
            B22, 32768, 1024, 16, 1024 * slices, 1e-3, [1, 64, 1], dcn, "E"
        )
        for slices, dcn in ((1, None), (2, [2, 1, 1]), (4, [4, 1, 1]))
    },
    **{
        f"c4_multislice.C4Spmd22BAdam{slices}xv4_384": Row(
            WIDE, 32768, 1024, 10, 1920 * slices, 1e-3, [1, 192, 1], dcn, "E"
        )
        for slices, dcn in ((1, None), (2, [2, 1, 1]))
    },
    **{
        f"c4_multislice.C4Spmd22BAdam{slices}xv4_8": Row(
            B1, 32768, 1024, 16, 64 * slices, 1e-3, [1, 4, 1], dcn, "E"
        )
        for slices, dcn in ((1, None), (2, [2, 1, 1]), (4, [4, 1, 1]))
    },
    **{
        f"c4_multislice.C4Spmd32BAdam{slices}xv5_256": Row(
            B32, 32768, 2048, 2, 256 * slices, 1e-3, [1, 128, 1], dcn, "E"
        )
        for slices, dcn in ((1, None), (2, [2, 1, 1]))
    },
    "pile.Pile126M": Row(SMALL, 50304, 2048, 4, 256, 6e-4, [8, 1, 1], [8, 1, 1], "K"),
    "pile.GPT5B": Row(
        (24, 4096, 16384, 32, 128), 50304, 2048, 8, 2048, 1.6e-4, [1, 8, 1], [1, 32, 1], "K"
    ),
    "pile.GPT175B": Row(
        (96, 12288, 49152, 96, 128), 50257, 2048, 6, 1536, 2e-5, [1, 8, 1], [1, 32, 1], "K"
    ),
}
# What differs within the family K: deviation of the first weights, warmup, end of the decay, steps,
# and what the backward pass keeps.
OF_K = {
    "c4.C4SpmdPipelineGpt3SmallAdam64Replicas": (0.006, 265, 108_600, 108_600, "full"),
    "c4.C4SpmdPipelineGpt3SmallAdam8Replicas": (0.006, 265, 108_600, 108_600, "full"),
    "pile.Pile126M": (0.023, 636, 500_000, 600_000, "none"),
    "pile.GPT5B": (0.01, 115, 62_500, 75_000, "dots_no_batch"),
    "pile.GPT175B": (0.023, 265, 108_600, 75_000, "full"),
}
# Stages and rows of a microbatch.
PIPELINES = {
    "c4.C4SpmdPipelineGpt3SmallAdam64Replicas": (4, 16),
    "c4.C4SpmdPipelineGpt3SmallAdam8Replicas": (2, 8),
}
# One of each kind of mesh: split both ways, in stages with a vocabulary that nothing divides, and
# over two slices.
SAMPLES = (
    "c4.C4Spmd16BAdam32Replicas",
    "c4.C4SpmdPipelineGpt3SmallAdam64Replicas",
    "c4_multislice.C4Spmd22BAdam2xv4_128",
)


@functools.cache
def resolved(name: str) -> ResolvedExperiment:
    module, _, class_name = name.partition(".")
    found = importlib.import_module(f"layerkit_experiments.lm.{module}")
    return resolve(getattr(found, class_name)())


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_data_and_mesh_are_those_of_pax(name: str):
    row, experiment = PUBLISHED[name], resolved(name)
    lm = experiment.task.model.lm_tpl
    assert (
        lm.num_layers,
        lm.model_dims,
        lm.hidden_dims,
        lm.num_heads,
        lm.dim_per_head,
    ) == row.sizes
    assert (lm.num_kv_heads, lm.vocab_size) == (None, row.vocab)
    train, heldout = experiment.datasets
    for data, split in ((train, "train"), (heldout, "validation")):
        assert target_of(data) is SeqIOInput
        assert data.task_feature_lengths == {"targets": row.length}
        assert (data.percore_batch_size, data.split_name) == (row.rows, split)
        task = data.mixture_or_task
        assert target_of(task) is seqio_tasks.language_model_task
        of_pile = name.startswith("pile.")
        assert task.tfds_name == ("the_pile:1.0.0" if of_pile else "c4/en:3.0.1")
        assert (task.vocab_path, task.vocab_size) == (None, row.vocab)
    assert (train.use_packing, heldout.use_packing) == (True, False)
    partitioner = experiment.partitioner
    assert (partitioner.ici_mesh_shape, partitioner.dcn_mesh_shape) == (row.ici, row.dcn)
    devices = 1
    for size in (*row.ici, *(row.dcn or ())):
        devices *= size
    assert row.rows * devices == row.batch


@pytest.mark.parametrize("name", [name for name, row in PUBLISHED.items() if row.kind == "E"])
def test_rows_of_kind_e_have_its_layers_and_schedule(name: str):
    experiment = resolved(name)
    model, train = experiment.task.model, experiment.task.train
    lm, layer = model.lm_tpl, model.lm_tpl.stack_tpl.layer_tpl
    assert model.fprop_dtype == "bfloat16"
    assert lm.position_tpl.__fn_or_cls__.__name__ == "PositionalEmbedding"
    assert lm.embedding_tpl is None  # tied
    assert (lm.softmax_tpl.logit_soft_cap, lm.softmax_tpl.scale_by_sqrt_dims) == (30.0, True)
    assert (layer.attention_tpl.logit_cap, layer.attention_tpl.use_bias) == (50.0, False)
    feed_forward = layer.feed_forward_tpl
    assert feed_forward.activation_tpl.__fn_or_cls__.__name__ == "GELU"
    assert feed_forward.use_gate is False
    assert lm.stack_tpl.__fn_or_cls__.__name__ == "StackedTransformerRepeated"
    assert lm.stack_tpl.remat == "full"
    assert train.summary_interval_steps == 10
    optimizer = train.learner.optimizer
    assert (optimizer.b1, optimizer.b2, optimizer.eps) == (0.9, 0.99, 1e-6)
    assert (optimizer.weight_decay, optimizer.update_rms_cap) == (1e-3, 1.0)
    assert train.learner.clip_global_norm == 5.0
    # Linear to step 4000, then exponential from 4001 to 300000, down to a tenth.
    schedule = train.learner.learning_rate
    assert target_of(schedule) is linear_warmup_exponential_decay
    assert schedule.peak == PUBLISHED[name].rate
    assert (schedule.warmup_steps, schedule.decay_start) == (4000, 4001)
    assert (schedule.decay_end, schedule.min_ratio) == (300_000, 0.1)


@pytest.mark.parametrize("name", OF_K)
def test_rows_of_kind_k_have_its_layers_and_schedule(name: str):
    std, warmup, end, steps, remat = OF_K[name]
    experiment = resolved(name)
    model, train = experiment.task.model, experiment.task.train
    lm, layer = model.lm_tpl, model.lm_tpl.stack_tpl.layer_tpl
    assert model.fprop_dtype == "bfloat16"
    assert lm.position_tpl.__fn_or_cls__.__name__ == "TrainablePositionalEmbedding"
    assert lm.position_tpl.max_length == (16_384 if name in PIPELINES else 2048)
    assert lm.embedding_tpl is None  # tied
    assert (lm.softmax_tpl.logit_soft_cap, layer.attention_tpl.logit_cap) == (None, None)
    assert lm.softmax_tpl.scale_by_sqrt_dims is False
    assert layer.attention_tpl.use_bias is True
    feed_forward = layer.feed_forward_tpl
    assert feed_forward.activation_tpl.__fn_or_cls__.__name__ == "GELU"
    assert feed_forward.activation_tpl.approximate is True
    assert (layer.norm_tpl.epsilon, lm.final_norm_tpl.epsilon) == (1e-5, 1e-5)
    assert (lm.params_init.method, lm.params_init.scale) == ("gaussian", std)
    assert lm.softmax_tpl.weight_init == lm.params_init
    stack = lm.stack_tpl
    assert (stack.stage_remat if name in PIPELINES else stack.remat) == remat
    assert (lm.dropout_rate, layer.dropout_rate) == (0.0, 0.0)
    assert layer.input_dropout_rate == (0.1 if name == "pile.GPT5B" else 0.0)
    assert train.num_train_steps == steps
    optimizer = train.learner.optimizer
    assert optimizer.__fn_or_cls__.__name__ == "adamw"  # decoupled decay, no cap
    assert (optimizer.b1, optimizer.b2, optimizer.eps) == (0.9, 0.95, 1e-8)
    assert (optimizer.weight_decay, optimizer.mask) == (0.1, None)
    assert train.learner.clip_global_norm == 1.0
    # Linear to the end of the warmup, then a cosine from the next step on, down to a tenth.
    schedule = train.learner.learning_rate
    assert target_of(schedule) is linear_warmup_cosine_decay
    assert schedule.peak == PUBLISHED[name].rate
    assert (schedule.warmup_steps, schedule.decay_start) == (warmup, warmup + 1)
    assert (schedule.decay_end, schedule.min_ratio) == (end, 0.1)


def test_stacks_of_the_family_k():
    stacks = {name: resolved(name).task.model.lm_tpl.stack_tpl for name in OF_K}
    kinds = {name: stack.__fn_or_cls__.__name__ for name, stack in stacks.items()}
    assert kinds.pop("pile.Pile126M") == "StackedTransformer"
    assert kinds.pop("pile.GPT5B") == kinds.pop("pile.GPT175B") == "StackedTransformerRepeated"
    assert set(kinds.values()) == {"PipelinedTransformer"}
    for name, expected in PIPELINES.items():
        assert (stacks[name].num_stages, stacks[name].microbatch_size) == expected
        assert resolved(name).partitioner.mesh_axis_names[0] == "stage"


def test_lambada_asks_the_model_of_the_pile():
    experiment = resolved("pile.Lambada126M")
    (data,) = experiment.datasets
    assert (data.is_training, data.split_name, data.use_packing) == (False, "test", None)
    assert data.task_feature_lengths == {"inputs": 1984, "targets": 64}
    assert data.weights_on_targets_only is True
    assert data.mixture_or_task.tfds_name == "lambada:1.0.0"
    assert set(experiment.task.metrics) == {"last_word_accuracy"}
    assert experiment.task.model == resolved("pile.Pile126M").task.model


def test_plan_of_an_evaluation_names_the_trained_experiment():
    with pytest.raises(UsageError) as caught:
        PLAN.run(resolved("pile.Lambada126M"), RunOptions())
    assert "layerkit_experiments.lm.pile.Pile126M" in str(caught.value)


@pytest.mark.parametrize(
    ("published", "cls"),
    [
        ("tasks.lm.params.c4_multislice.C4Spmd22BAdam2xv4_128", "C4Spmd22BAdam2xv4_128"),
        ("paxml.tasks.lm.params.c4.C4Spmd1BAdam4Replicas", "C4Spmd1BAdam4Replicas"),
        ("paxml.contrib.gpu.scripts_gpu.configs.Pile126M", "Pile126M"),
        ("paxml.contrib.gpu.scripts_gpu.configs.GPT5B", "GPT5B"),
        ("paxml.contrib.gpu.scripts_gpu.configs.Pile5B", "GPT5B"),
        ("paxml.contrib.gpu.scripts_gpu.configs.Pile175B", "GPT175B"),
        ("paxml.contrib.gpu.scripts_gpu.configs.Lambada126M", "Lambada126M"),
    ],
)
def test_the_names_that_pax_has(published: str, cls: str):
    assert load_experiment(find_experiment(published)).__name__ == cls
    assert pile.Pile5B is pile.GPT5B
    assert pile.Pile175B is pile.GPT175B
    assert issubclass(c4_multislice.C4Spmd22BAdam4xv4_128, c4_multislice.C4Spmd22BAdam1xv4_128)


def weights_on_their_meshes(names: list[str], tmp_path: Path) -> dict[str, Any]:
    """Of each experiment how many weights it has in all and on one device, and their dtypes.

    In a process of its own, since the number of simulated devices is settled once. Nothing that
    reads the data is imported there.
    """
    script = tmp_path / "weights.py"
    script.write_text(
        "import importlib, json, math, sys\n"
        "import jax\n"
        "from layerkit_runner.config.resolve import resolve\n"
        "from layerkit_runner.trainer.job import build_parts\n"
        "jax.config.update('jax_num_cpu_devices', int(sys.argv[1]))\n"
        "found = {}\n"
        "for name in sys.argv[2:]:\n"
        "    module, _, cls = name.partition('.')\n"
        "    module = importlib.import_module(f'layerkit_experiments.lm.{module}')\n"
        "    partitioner, task = build_parts(resolve(getattr(module, cls)()))\n"
        "    sizes = [*(partitioner.ici_mesh_shape or ()), *(partitioner.dcn_mesh_shape or ())]\n"
        "    partitioner.start(jax.devices()[:math.prod(sizes)])\n"
        "    partitioner.bind(task)\n"
        "    whole = jax.tree.leaves(partitioner.abstract_stored_state(task).params)\n"
        "    here = jax.tree.leaves(partitioner.abstract_state(task).params)\n"
        "    found[name] = {\n"
        "        'count': sum(math.prod(leaf.shape) for leaf in whole),\n"
        "        'here': sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in here),\n"
        "        'dtypes': sorted({leaf.dtype.name for leaf in whole}),\n"
        "    }\n"
        "readers = {'tensorflow', 'seqio', 'grain', 'sentencepiece'} & set(sys.modules)\n"
        "assert not readers, f'imported: {readers}'\n"
        "print(json.dumps(found))\n"
    )
    largest = max(_num_devices(PUBLISHED[name]) for name in names)
    command = [sys.executable, str(script), str(largest), *names]
    # The number of devices is given by the command line.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _num_devices(row: Row) -> int:
    return round(row.batch / row.rows)


def _count_by_hand(row: Row) -> int:
    layers, d, ff, heads, per_head = row.sizes
    matrices = row.vocab * d + layers * (4 * d * heads * per_head + 2 * d * ff)
    return matrices + _positions_by_hand(row) + _vectors_by_hand(row)


def _positions_by_hand(row: Row) -> int:
    return {"E": 0, "K": row.length, "pipeline": 16_384}[row.kind] * row.sizes[1]


def _vectors_by_hand(row: Row) -> int:
    """What has one dimension: norms, biases, and in the family E scales of coordinates."""
    layers, d, ff, heads, per_head = row.sizes
    of_layer = 4 * d + ff + d
    if row.kind == "E":
        return layers * (of_layer + per_head) + 2 * d + row.vocab
    return layers * (of_layer + 3 * heads * per_head + d) + 2 * d


def check_weights(names: list[str], tmp_path: Path) -> None:
    for name, found in weights_on_their_meshes(names, tmp_path).items():
        row = PUBLISHED[name]
        assert found["count"] == _count_by_hand(row), name
        assert found["dtypes"] == ["float32"]
        # All axes but `data` split the weights, save what has one dimension, and the learned
        # positions of a pipeline, which only fsdp splits.
        first = 1 if row.kind == "pipeline" else 0
        parts = 1
        for shape in (row.ici, row.dcn or [1] * len(row.ici)):
            for axis, size in enumerate(shape):
                parts *= 1 if axis == first else size
        vectors = _vectors_by_hand(row)
        positions = _positions_by_hand(row) if row.kind == "pipeline" else 0
        most = (found["count"] - vectors - positions) / parts + vectors + positions / row.ici[-2]
        assert found["count"] / parts <= found["here"] <= most, name


def test_number_of_weights_at_full_size(tmp_path: Path):
    check_weights(list(SAMPLES), tmp_path)


@pytest.mark.experiments
def test_weights_of_all_at_full_size(tmp_path: Path):
    check_weights([name for name in PUBLISHED if name not in SAMPLES], tmp_path)
