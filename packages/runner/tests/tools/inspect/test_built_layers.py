from __future__ import annotations

import json
import textwrap
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from layerkit.base_layer import BaseLayer
from layerkit.base_model import BaseModel
from layerkit.config import Config, instance_field, sub_config_field
from layerkit.layers.repeat import Repeat
from layerkit.weights import WeightHParams, WeightInit
from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import resolve
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.tools.inspect.built_layers import BuiltLayer, built_layers, describe_layers


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


class Order:
    """A value that is no layer."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Order)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "Order()"


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


def by_path(model: BaseModel) -> dict[str, BuiltLayer]:
    return {layer.path: layer for layer in built_layers(model)}


def test_layers_are_listed_once_in_the_order_of_the_model():
    assert list(by_path(Tower())) == [
        "",
        *(path for n in range(3) for path in (f"blocks_{n}", f"blocks_{n}/scale")),
        *("repeat", "repeat/sub", "repeat/sub/scale"),
    ]


def test_sizes_come_from_the_owner():
    for path, layer in by_path(Tower(dims=6)).items():
        if path.endswith("scale"):
            assert (layer.cls, layer.fields["dims"], layer.fields["epsilon"]) == (Scale, 6, 1e-6)
            assert layer.changed == {"dims"}


def test_fields_are_inherited_unless_they_are_set():
    own = Scale.HParams.config(dtype="float32", params_init=WeightInit.Constant(1.0))
    model = Tower(dtype="bfloat16", block_tpl=Block.HParams.config(scale_tpl=own))
    layers = by_path(model)
    assert layers["blocks_1"].fields["dtype"] == layers["repeat/sub"].fields["dtype"] == "bfloat16"
    assert layers["repeat/sub"].changed >= {"dtype"}
    scale = layers["repeat/sub/scale"]
    assert (scale.fields["dtype"], scale.fields["fprop_dtype"]) == ("float32", "float32")
    assert scale.fields["params_init"] == WeightInit.Constant(1.0)
    assert scale.changed == {"dims", "params_init"}
    assert layers["blocks_1"].fields["params_init"] == WeightInit.Xavier()


def test_layer_in_a_field_inherits():
    layers = by_path(Holder(fprop_dtype="bfloat16", scale=Scale(dims=2)))
    assert layers["scale"].fields["fprop_dtype"] == "bfloat16"
    assert layers["scale"].changed == {"dims", "fprop_dtype"}
    assert layers[""].fields["scale"] == "Scale"
    assert layers[""].changed == {"fprop_dtype"}


@pytest.fixture
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Towers(BaseExperiment):
        DIMS: int = 4
        MIDDLE_EPSILON: float | None = None
        MESH: tuple[int, ...] = (1, 2, 1)

        def task(self) -> Config:
            model = Tower.HParams.config(dims=self.DIMS, middle_epsilon=self.MIDDLE_EPSILON)
            return tiny.task_config().set(model=model)

        def datasets(self) -> list[Config]:
            return []

        def partitioner(self) -> Config:
            return SpmdPartitioner.HParams.config(ici_mesh_shape=self.MESH)

    return Towers


def described(experiment: Any, options: RunOptions | None = None, **fields: Any) -> str:
    jax.devices()  # starts JAX with the devices of the tests, which stay
    return describe_layers(resolve(experiment(**fields)), options or RunOptions())


def test_page_of_layers(experiment: Any):
    common = [
        "dtype = 'float32'",
        "fprop_dtype = 'float32'",
        "params_init = WeightInit(method='xavier', scale=1.0)",
        "train = None",
    ]

    def block(indentation: int, title: str, *fields: str) -> str:
        lines = [title, *(f"  {field}" for field in fields), *(f"    {line}" for line in common)]
        if indentation == 0:
            lines.append("  * sharding = BoundSharding")
        return textwrap.indent(
            "\n".join([*lines, "    shared_weight_id = None"]), "  " * indentation
        )

    head = (
        f"layers of {__name__}.{experiment.__qualname__}\n"
        "on a mesh of data 1 × fsdp 2 × tensor 1\n"
        "`*`: differs from the default of the class"
    )
    scale = ("* dims = 8", "  epsilon = 1e-06")
    model = ("* dims = 8", "  middle_epsilon = None", "  order = Order()", "  block_tpl = Block")
    repeat = ("* sub_tpl = Block", "* num_repeats = 2", "  remat = 'none'", "  unroll = 1")
    assert described(experiment, DIMS=8).split("\n\n") == [
        head,
        block(0, "task.model: Tower", *model),
        block(1, "blocks_0…2: Block", "* dims = 8", "  scale_tpl = Scale"),
        block(2, "blocks_0…2/scale: Scale", *scale),
        block(1, "repeat: Repeat", *repeat),
        block(2, "repeat/sub: Block", "* dims = 8", "  scale_tpl = Scale"),
        block(3, "repeat/sub/scale: Scale", *scale),
    ]


def test_layers_that_differ_are_separate(experiment: Any):
    blocks = described(experiment, MIDDLE_EPSILON=0.1).split("\n\n")
    titles = [block.split("\n")[0].strip() for block in blocks if "blocks_" in block]
    assert titles == [
        *("blocks_0,2: Block", "blocks_0,2/scale: Scale"),
        *("blocks_1: Block", "blocks_1/scale: Scale"),
    ]
    assert "    * scale_tpl = Scale" in blocks[4]
    assert "      * epsilon = 0.1" in blocks[5]


def test_json_has_each_layer(experiment: Any):
    found = json.loads(described(experiment, RunOptions(json=True)))
    assert found["experiment"] == f"{__name__}.{experiment.__qualname__}"
    assert found["mesh"] == {"data": 1, "fsdp": 2, "tensor": 1}
    assert len(found["layers"]) == 10
    assert found["layers"][2] == {
        "path": "blocks_0/scale",
        "class": f"{__name__}.Scale",
        "fields": {
            "dims": 4,
            "epsilon": 1e-6,
            "dtype": "float32",
            "fprop_dtype": "float32",
            "params_init": "WeightInit(method='xavier', scale=1.0)",
            "train": None,
            "shared_weight_id": None,
        },
        "changed": ["dims"],
    }


def test_wrong_field_of_a_layer_raises(raises: Any, experiment: Any):
    with raises(UsageError):
        described(experiment, DIMS=0)
