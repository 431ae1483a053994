from __future__ import annotations

import dataclasses
import math
import textwrap
from html import escape
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, instance_field, sub_config_field
from layerkit.layers.transformer.repeat import Repeat
from layerkit.models import LanguageModel, TransformerLm
from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.config.flags import load_mode
from layerkit_runner.partitioning import PmapPartitioner, SpmdPartitioner
from layerkit_runner.run.resolve import resolve
from layerkit_runner.run_options import RunOptions
from layerkit_runner.tools.inspect.model import (
    ParameterTable,
    built_layers,
    describe_layers,
    parameter_table,
    table_html,
    table_text,
)


class Scale(BaseLayer):
    """A layer with one weight."""

    dims: int = 0
    epsilon: float = 1e-6

    def setup(self) -> None:
        self.create_variable("scale", WeightHParams((self.dims,), ("embed",)))

    def fprop(self, x: jax.Array) -> jax.Array:
        return x * self.theta.scale


class Block(BaseLayer):
    dims: int = 0
    scale_tpl: Any = sub_config_field(Scale.HParams)

    def setup(self) -> None:
        self.create_child("scale", self.scale_tpl, dims=self.dims)

    def fprop(self, x: jax.Array) -> jax.Array:
        return self.scale(x)


@dataclasses.dataclass(frozen=True)
class Order:
    """A value that is no layer."""


class Tower(BaseModel):
    """A model with three blocks in a list, of which one may differ, and two in a scan."""

    dims: int = 4
    middle_epsilon: float | None = None
    order: Any = instance_field(Order)
    block_tpl: Any = sub_config_field(Block.HParams)

    def setup(self) -> None:
        templates = [self.block_tpl.clone() for _ in range(3)]
        if self.middle_epsilon is not None:
            templates[1].scale_tpl.epsilon = self.middle_epsilon
        self.create_children("blocks", templates, dims=self.dims)
        repeated = Repeat.HParams.config(sub_tpl=self.block_tpl.clone(dims=self.dims))
        self.create_child("repeat", repeated, num_repeats=2)


class Holder(BaseModel):
    """A model with a layer in a field."""

    scale: Any = instance_field(Scale.HParams, dims=2)


def test_layers_are_listed_once_in_the_order_of_the_model():
    assert list(built_layers(Tower())) == [
        "",
        *(path for n in range(3) for path in (f"blocks_{n}", f"blocks_{n}/scale")),
        *("repeat", "repeat/sub", "repeat/sub/scale"),
    ]


def test_sizes_come_from_the_owner():
    for path, fields in built_layers(Tower(dims=6)).items():
        if path.endswith("scale"):
            assert (fields["class"], fields["dims"], fields["epsilon"]) == ("Scale", 6, 1e-6)


def test_fields_are_inherited_unless_they_are_set():
    own = Scale.HParams.config(dtype="float32", params_init=WeightInit.Constant(1.0))
    model = Tower(dtype="bfloat16", block_tpl=Block.HParams.config(scale_tpl=own))
    layers = built_layers(model)
    assert layers["blocks_1"]["dtype"] == layers["repeat/sub"]["dtype"] == "bfloat16"
    scale = layers["repeat/sub/scale"]
    assert (scale["dtype"], scale["fprop_dtype"]) == ("float32", "float32")
    assert scale["params_init"] == WeightInit.Constant(1.0)
    assert layers["blocks_1"]["params_init"] == WeightInit.Xavier()


def test_layer_in_a_field_inherits():
    layers = built_layers(Holder(fprop_dtype="bfloat16", scale=Scale(dims=2)))
    assert layers["scale"]["fprop_dtype"] == "bfloat16"
    assert layers[""]["scale"] == "Scale"


@pytest.fixture
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Towers(BaseExperiment):
        DIMS: int = 4

        def task(self) -> Config:
            return tiny.task_config().set(model=Tower.HParams.config(dims=self.DIMS))

        def datasets(self) -> list[Config]:
            return []

    return Towers


def described(experiment: Any, **fields: Any) -> str:
    jax.devices()  # starts JAX with the devices of the tests, which stay
    return describe_layers(resolve(experiment(**fields)), RunOptions())


def test_page_lists_each_layer_with_its_fields(experiment: Any):
    head, model, block, scale, *others = described(experiment, DIMS=8).split("\n\n")
    assert head == f"layers of {__name__}.{experiment.__qualname__}"
    assert model.splitlines()[0] == "task.model: Tower"
    assert "  block_tpl = Block" in model.splitlines() and "  order = Order()" in model.splitlines()
    assert block.splitlines()[0] == "  blocks_0: Block"
    assert scale == textwrap.indent(
        "blocks_0/scale: Scale\n"
        "  dtype = 'float32'\n"
        "  fprop_dtype = 'float32'\n"
        "  weight_format = None\n"
        "  params_init = WeightInit(method='xavier', scale=1.0)\n"
        "  train = None\n"
        "  shared_weight_id = None\n"
        "  dims = 8\n"
        "  epsilon = 1e-06",
        "    ",
    )
    assert len(others) == 7


def test_inspection_of_layers_prints_the_page(experiment: Any, capsys: pytest.CaptureFixture[str]):
    page = described(experiment)
    load_mode("inspect").run(resolve(experiment()), RunOptions(inspect="layers"))
    assert capsys.readouterr().out == f"{page}\n"


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


def test_page_has_the_sums_and_the_notes_of_the_text(lm_table: ParameterTable):
    table = dataclasses.replace(lm_table, loads="<Weights>", padded="w: 10 to 12")
    devices = range(table.num_devices)
    html, text = table_html(table, [*devices]), table_text(table)
    for name, total in table.modules.items():
        assert f"<td>{name}</td><td>{total.count:,}</td>" in html
    for note in ("task.initial_weights (<Weights>) sets", "padded on the devices: w: 10 to 12"):
        assert note in text and escape(note) in html


def test_axes_sharding_and_first_values(lm_table: ParameterTable):
    [row] = [row for row in lm_table.parameters if row.path.endswith("layers_0/feed_forward/up/w")]
    assert (row.axes, row.sharding) == (["embed", "mlp"], [["fsdp"], ["tensor"]])
    assert row.starts_as == "xavier 1"
    assert "embed 16/fsdp × mlp 64/tensor" in table_text(lm_table)


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
