from __future__ import annotations

import dataclasses
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
from layerkit_runner.config.commands import load_mode
from layerkit_runner.config.flags import RunOptions
from layerkit_runner.config.resolve import resolve
from layerkit_runner.tools.inspect.built_layers import built_layers, describe_layers


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


def test_wrong_field_of_a_layer_raises(raises: Any, experiment: Any):
    with raises(UsageError):
        described(experiment, DIMS=0)
