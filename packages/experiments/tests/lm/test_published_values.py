"""The named experiments have the published values, and their weights lie as their meshes say.

The tables are those that Pax, MLPerf and NVIDIA publish, written down here a second time. Nothing
as large as these models is made: weights are counted by shapes, on devices that are simulated in a
process of its own.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import pytest

from layerkit_experiments.lm import pile
from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run_options import RunOptions
from layerkit_runner.tools.commands import PLAN


class Row(NamedTuple):
    """One experiment: sizes and mesh."""

    sizes: tuple[int, int, int, int, int]  # layers, model, hidden, heads, dims per head
    vocab: int
    length: int
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
    "c4.C4Spmd1BAdam4Replicas": Row((13, 2560, 10240, 20, 128), 32000, 1024, [1, 4, 1], None, "E"),
    "c4.C4Spmd16BAdam32Replicas": Row(
        (36, 6144, 24576, 48, 128), 32000, 1024, [1, 16, 2], None, "E"
    ),
    "c4.C4SpmdPipelineGpt3SmallAdam64Replicas": Row(
        XL, 50257, 2048, [4, 1, 4, 4], None, "pipeline"
    ),
    "c4.C4SpmdPipelineGpt3SmallAdam8Replicas": Row(XL, 51200, 2048, [2, 1, 2, 2], None, "pipeline"),
    "c4_multislice.C4Spmd22BAdam1xv4_128": Row(B22, 32768, 1024, [1, 64, 1], None, "E"),
    "c4_multislice.C4Spmd22BAdam2xv4_128": Row(B22, 32768, 1024, [1, 64, 1], [2, 1, 1], "E"),
    "c4_multislice.C4Spmd22BAdam4xv4_128": Row(B22, 32768, 1024, [1, 64, 1], [4, 1, 1], "E"),
    "c4_multislice.C4Spmd22BAdam1xv4_384": Row(WIDE, 32768, 1024, [1, 192, 1], None, "E"),
    "c4_multislice.C4Spmd22BAdam2xv4_384": Row(WIDE, 32768, 1024, [1, 192, 1], [2, 1, 1], "E"),
    "c4_multislice.C4Spmd22BAdam1xv4_8": Row(B1, 32768, 1024, [1, 4, 1], None, "E"),
    "c4_multislice.C4Spmd22BAdam2xv4_8": Row(B1, 32768, 1024, [1, 4, 1], [2, 1, 1], "E"),
    "c4_multislice.C4Spmd22BAdam4xv4_8": Row(B1, 32768, 1024, [1, 4, 1], [4, 1, 1], "E"),
    "c4_multislice.C4Spmd32BAdam1xv5_256": Row(B32, 32768, 2048, [1, 128, 1], None, "E"),
    "c4_multislice.C4Spmd32BAdam2xv5_256": Row(B32, 32768, 2048, [1, 128, 1], [2, 1, 1], "E"),
    "pile.Pile126M": Row(SMALL, 50304, 2048, [8, 1, 1], [8, 1, 1], "K"),
    "pile.GPT5B": Row((24, 4096, 16384, 32, 128), 50304, 2048, [1, 8, 1], [1, 32, 1], "K"),
    "pile.GPT175B": Row((96, 12288, 49152, 96, 128), 50257, 2048, [1, 8, 1], [1, 32, 1], "K"),
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
    result = importlib.import_module(f"layerkit_experiments.lm.{module}")
    return resolve(getattr(result, class_name)())


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


def check_weights(result: dict[str, Any]) -> None:
    for name, sizes in result.items():
        row = PUBLISHED[name.removeprefix("lm.")]
        assert sizes["num_params"] == _count_by_hand(row), name
        assert sizes["dtypes"] == ["float32"]
        # All axes but `data` split the weights, save what has one dimension, and the learned
        # positions of a pipeline, which only fsdp splits.
        first = 1 if row.kind == "pipeline" else 0
        parts = 1
        for shape in (row.ici, row.dcn or [1] * len(row.ici)):
            for axis, size in enumerate(shape):
                parts *= 1 if axis == first else size
        vectors = _vectors_by_hand(row)
        positions = _positions_by_hand(row) if row.kind == "pipeline" else 0
        most = (sizes["num_params"] - vectors - positions) / parts
        most += vectors + positions / row.ici[-2]
        assert sizes["num_params"] / parts <= sizes["num_params_here"] <= most, name


def test_number_of_weights_at_full_size(measure_states: Any):
    check_weights(measure_states(f"lm.{name}" for name in SAMPLES))


@pytest.mark.experiments
def test_weights_of_all_at_full_size(measure_states: Any):
    check_weights(measure_states(f"lm.{name}" for name in PUBLISHED if name not in SAMPLES))
