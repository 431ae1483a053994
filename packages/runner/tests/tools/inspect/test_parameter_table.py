from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from layerkit.models import LanguageModel, TransformerLm
from layerkit_runner.errors import UsageError
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.tools.inspect.parameter_table import (
    ParameterTable,
    parameter_table,
    table_text,
)


def table_of(config: Any, partitioner: Any = None) -> ParameterTable:
    partitioner = partitioner or SpmdPartitioner(ici_mesh_shape=[2, 2, 2])
    partitioner.start()
    task = config.Instantiate()
    partitioner.bind(task)
    return parameter_table("tests.Experiment", partitioner, task)


def language_model(**sizes: int) -> Any:
    return LanguageModel.HParams.config(lm_tpl=TransformerLm.HParams.config(**sizes))


@pytest.fixture(scope="module")
def lm_config(tiny: SimpleNamespace) -> Any:
    config = tiny.task_config()
    config.model = language_model(
        vocab_size=32, model_dims=16, hidden_dims=64, num_layers=3, num_heads=2
    )
    return config


@pytest.fixture(scope="module")
def lm_table(lm_config: Any) -> ParameterTable:
    return table_of(lm_config)


def test_counts_of_a_small_model(lm_table: ParameterTable):
    layer = 4 * 16 * 16 + 2 * 16 * 64  # query, key, value and output; up and down
    counts = {row.path: row.count for row in lm_table.parameters}
    norms = sum(count for path, count in counts.items() if "norm" in path)
    biases = sum(count for path, count in counts.items() if path.endswith("/b"))
    in_all = 32 * 16 + 3 * layer + norms + biases
    assert lm_table.totals["weights"].count == in_all == sum(counts.values())
    assert lm_table.modules["lm/softmax"].count == 32 * 16
    assert sum(total.count for total in lm_table.modules.values()) == in_all
    assert lm_table.totals["weights"].bytes == 4 * in_all


def test_table_matches_the_created_weights(lm_config: Any, lm_table: ParameterTable):
    partitioner = SpmdPartitioner(ici_mesh_shape=[2, 2, 2])
    partitioner.start()
    task = lm_config.Instantiate()
    partitioner.bind(task)
    state = partitioner.init_fn(task)()
    made = {
        "/".join(part.key for part in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }
    assert [row.path for row in lm_table.parameters] == list(made)
    for row in lm_table.parameters:
        array = made[row.path]
        shard = array.addressable_shards[0].data
        assert (tuple(row.shape), row.dtype) == (array.shape, array.dtype.name)
        assert row.bytes_per_device == shard.nbytes
        divided = [
            size // math.prod(lm_table.mesh[axis] for axis in split)
            for size, split in zip(row.shape, row.sharding, strict=True)
        ]
        assert tuple(divided) == shard.shape
    optimizer = jax.tree.leaves(state.opt_state)
    assert lm_table.totals["optimizer"].bytes == sum(leaf.nbytes for leaf in optimizer)


def test_axes_sharding_and_first_values(lm_table: ParameterTable):
    [row] = [row for row in lm_table.parameters if row.path.endswith("layers_0/feed_forward/up/w")]
    assert (row.axes, row.sharding) == (["embed", "mlp"], [["fsdp"], ["tensor"]])
    assert row.starts_as == "xavier 1"
    assert "embed 16/fsdp × mlp 64/tensor" in table_text(lm_table)


def test_equal_layers_share_a_line(lm_table: ParameterTable):
    lines = table_text(lm_table).splitlines()
    [line] = [line for line in lines if "feed_forward/up/w" in line]
    assert line.split()[:4] == ["lm/stack/layers_0…2/feed_forward/up/w", "3", "×", "1,024"]
    other = dataclasses.replace(
        lm_table,
        parameters=[
            dataclasses.replace(row, dtype="bfloat16") if "layers_1/" in row.path else row
            for row in lm_table.parameters
        ],
    )
    paths = [line.split()[0] for line in table_text(other).splitlines() if "/up/w" in line]
    assert paths == ["lm/stack/layers_0,2/feed_forward/up/w", "lm/stack/layers_1/feed_forward/up/w"]


def test_weights_are_not_split_under_pmap(lm_config: Any):
    table = table_of(lm_config, PmapPartitioner())
    assert table.mesh == {"batch": 8}
    assert all(split == [] for row in table.parameters for split in row.sharding)
    assert table.totals["weights"].bytes_per_device == table.totals["weights"].bytes


def test_frozen_weights_and_other_variables(tiny: SimpleNamespace):
    config = tiny.task_config(counts=True)
    config.train.learner.trainable = ("linear/w",)
    table = table_of(config, SpmdPartitioner(ici_mesh_shape=[8, 1, 1]))
    assert [(row.path, row.is_frozen) for row in table.parameters] == [("linear/w", False)]
    assert [row.path for row in table.non_trainable] == ["counter/sum"]
    assert table.totals["non_trainable"].count == 1
    config = tiny.task_config()
    config.model = language_model(
        vocab_size=8, model_dims=8, hidden_dims=8, num_layers=1, num_heads=1
    )
    config.train.learner.frozen = ("lm/softmax/.*",)
    table = table_of(config, SpmdPartitioner(ici_mesh_shape=[8, 1, 1]))
    assert [row.path for row in table.parameters if row.is_frozen] == ["lm/softmax/w"]
    assert table.totals["frozen"].count == 8 * 8
    [line] = [line for line in table_text(table).splitlines() if line.startswith("lm/softmax/w")]
    assert line.endswith("(frozen)")


def test_mesh_that_does_not_divide_a_weight_raises(raises: Any, tiny: SimpleNamespace):
    with raises(UsageError, problem="cannot be split evenly", value=1):
        table_of(tiny.task_config(dims=3))
