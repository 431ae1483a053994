"""Experiments: declared fields, overrides before methods, deep paths on the results."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config import Config, build
from layerkit_runner import BaseExperiment, Observer, Override, UsageError
from layerkit_runner.config.config_tree import config_json, config_text, override_text
from layerkit_runner.config.experiment import experiment_fields, reduced_values
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.requests import parse_fields
from layerkit_runner.errors import FieldError
from layerkit_runner.run.resolve import resolve


@dataclasses.dataclass
class Lm:
    num_layers: int = 2
    hidden_dims: int | None = None
    dtype: Any = "float32"


@dataclasses.dataclass
class Task:
    model: Lm
    learning_rate: float = 1e-3
    schedules: dict[str, Any] | None = None


@dataclasses.dataclass
class Vocabulary:
    size: int = 256


@dataclasses.dataclass
class Input:
    batch_size: int
    vocabulary: Vocabulary | None = None
    is_training: bool = True


@dataclasses.dataclass
class Mesh:
    shape: tuple[int, ...] = (1, 1, 1)


class Optimizer:
    LEARNING_RATE: float = 1e-3


class Small(Optimizer, BaseExperiment):
    NUM_LAYERS: int = 2
    MODEL_DIMS: int = 8
    HIDDEN_DIMS: int | None = None
    MESH: tuple[int, ...] = (1, 1, 1)

    def validate(self) -> None:
        if self.NUM_LAYERS > 100:
            raise ValueError(f"NUM_LAYERS={self.NUM_LAYERS} is more than 100")

    def task(self) -> Config:
        hidden = self.HIDDEN_DIMS or 4 * self.MODEL_DIMS
        model = Config(Lm, num_layers=self.NUM_LAYERS, hidden_dims=hidden)
        schedules = {"warmup": Config(Lm), "steps": [1, 2]}
        return Config(Task, model=model, learning_rate=self.LEARNING_RATE, schedules=schedules)

    def datasets(self) -> list[Config]:
        vocabulary = Config(Vocabulary)
        train = Config(Input, batch_size=4, vocabulary=vocabulary)
        return [train, Config(Input, batch_size=2, vocabulary=vocabulary, is_training=False)]

    def partitioner(self) -> Config:
        return Config(Mesh, shape=self.MESH)


class Smaller(Small):
    NUM_LAYERS = 1


def resolved(experiment: BaseExperiment | None = None, **paths: str) -> Any:
    overrides = [Override(path.replace("__", "."), text) for path, text in paths.items()]
    return resolve(experiment or Small(), overrides)


# Declaring fields.


def test_fields_include_those_of_bases_and_mix_ins():
    assert experiment_fields(Smaller) == {
        "LEARNING_RATE": "float",
        "NUM_LAYERS": "int",
        "MODEL_DIMS": "int",
        "HIDDEN_DIMS": "int | None",
        "MESH": "tuple[int, ...]",
    }
    assert Smaller().NUM_LAYERS == 1
    assert Smaller().LEARNING_RATE == 1e-3


def test_mix_in_may_assign_a_field_that_another_base_declares(raises):
    class Deep:
        NUM_LAYERS = 64

    class Deeper(Deep, Small):
        pass

    assert Deeper().NUM_LAYERS == 64
    with raises(FieldError, owner="Wrong", value="LAYERS"):
        type("Mixed", (type("Wrong", (), {"LAYERS": 64}), Small), {})


def test_property_replaces_a_field(raises):
    class Derived(Small):
        @property
        def HIDDEN_DIMS(self) -> int:
            return 3 * self.MODEL_DIMS

    assert Derived(MODEL_DIMS=10).HIDDEN_DIMS == 30
    with raises(FieldError, value="HIDDEN_DIMS"):
        Derived(HIDDEN_DIMS=3)


# Overriding fields.


def test_overrides_change_one_instance():
    assert Small(NUM_LAYERS=5).NUM_LAYERS == 5
    assert Small(LEARNING_RATE=0.0).LEARNING_RATE == 0.0
    assert Small(HIDDEN_DIMS=None).overrides["HIDDEN_DIMS"] is None
    assert Small().NUM_LAYERS == 2
    assert dict(Small(NUM_LAYERS=5).overrides) == {"NUM_LAYERS": 5}


def test_unknown_field_raises(raises):
    with raises(FieldError, owner="Small", value="num_layer"):
        Small(num_layer=5)
    with raises(FieldError, owner="Small", value="NUM_LAYER"):
        Small().NUM_LAYER = 3


def test_value_of_another_type_in_a_class_raises_unless_it_is_overridden(raises):
    class Wrong(Small):
        NUM_LAYERS = "two"

    with raises(FieldError, field="NUM_LAYERS", value="two", expected="int"):
        Wrong()
    assert Wrong(NUM_LAYERS=2).NUM_LAYERS == 2


def test_values_are_converted_to_the_annotated_type():
    experiment = Small(LEARNING_RATE=1, MESH=[1, 2, 4])
    assert experiment.MESH == (1, 2, 4)
    assert isinstance(experiment.LEARNING_RATE, float)


def test_field_without_default_requires_a_value():
    class Needs(Small):
        VOCAB_SIZE: int

    with pytest.raises(FieldError) as caught:
        Needs()
    assert caught.value.field == "VOCAB_SIZE"
    assert Needs(VOCAB_SIZE=3).VOCAB_SIZE == 3


def test_list_defaults_belong_to_the_instance():
    class Listed(Small):
        ICI_MESH_SHAPE: list[int] = [1, 1, 1]

    Listed().ICI_MESH_SHAPE.append(9)
    assert Listed().ICI_MESH_SHAPE == [1, 1, 1]


# Resolving.


def test_deep_paths_set_any_field():
    result = resolved(
        task__model__num_layers="4",
        task__learning_rate="1",
        task__schedules__warmup__num_layers="7",
        task__schedules__steps__1="5",
        datasets__1__batch_size="16",
        datasets__1__vocabulary="None",
        partitioner__shape__1="8",
    )
    assert result.task.model.num_layers == 4
    assert result.task.learning_rate == 1.0
    assert result.task.schedules["warmup"].num_layers == 7
    assert result.task.schedules["steps"] == [1, 5]
    assert [d.batch_size for d in result.datasets] == [4, 16]
    assert result.datasets[1].vocabulary is None
    assert result.partitioner.shape == (1, 8, 1)
    assert build(result.task).model == Lm(num_layers=4, hidden_dims=32)


def test_a_shared_config_stays_shared():
    result = resolved(datasets__0__vocabulary__size="512")
    assert result.datasets[0].vocabulary is result.datasets[1].vocabulary
    assert result.datasets[1].vocabulary.size == 512


def test_overrides_do_not_change_the_returned_config():
    class Cached(Small):
        def task(self) -> Config:
            return cached

    cached = Small().task()
    assert resolved(Cached(), task__model__num_layers="9").task.model.num_layers == 9
    assert cached.model.num_layers == 2


@pytest.mark.parametrize(
    ("path", "text", "data"),
    [
        ("task.model.num_layerz", "4", {"value": "num_layerz"}),
        ("task.modle.num_layers", "4", {"value": "modle"}),
        ("task.model.num_layers.x", "4", {"field": "task.model.num_layers", "value": 2}),
        ("task.model", "Big", {"field": "task.model", "value": "Big"}),
        ("task.schedules.warmpu", "1", {"value": "warmpu", "choices": ("warmup", "steps")}),
        ("datasets.batch_size", "4", {"field": "datasets", "value": "batch_size"}),
        ("datasets.2.batch_size", "4", {"field": "datasets", "value": "2"}),
        ("decode_datasets.0.x", "4", {"field": "decode_datasets", "value": "0"}),
    ],
)
def test_wrong_path_or_value_raises(raises, path: str, text: str, data: dict[str, Any]):
    with raises(UsageError, **data) as caught:
        resolved(**{path.replace(".", "__"): text})
    assert f"--fdl.{path}" in str(caught.value)


def test_element_of_another_type_raises_with_flag_and_field(raises):
    with raises(UsageError, owner="--fdl.partitioner.shape.0", field="partitioner.shape"):
        resolved(partitioner__shape__0="x")


def test_paths_to_a_shared_config_must_agree(raises):
    paths = {"datasets__0__vocabulary__size": "1", "datasets__1__vocabulary__size": "2"}
    with raises(UsageError, problem="contradictory flags"):
        resolved(**paths)
    agreeing = dict.fromkeys(paths, "5")
    assert resolved(**agreeing).datasets[0].vocabulary.size == 5


def test_validate_runs_before_the_methods():
    class Checked(Small):
        def task(self) -> Config:
            raise AssertionError("made before it was checked")

    with pytest.raises(UsageError) as caught:
        resolve(Checked(NUM_LAYERS=101))
    assert str(caught.value).endswith("Checked: NUM_LAYERS=101 is more than 100")


class PlainObserver(Observer):
    path: str = "x"

    def __repr__(self) -> str:
        return "PlainObserver()"


@pytest.mark.parametrize(
    ("root", "result", "expected"),
    [
        ("datasets", Config(Input, batch_size=1), "a list of Configs"),
        ("observers", [PlainObserver()], "a list of Configs"),
        ("partitioner", None, "a Config"),
    ],
)
def test_method_that_returns_no_config_raises(raises, root: str, result: Any, expected: str):
    wrong = type("Wrong", (Small,), {root: lambda self: result})
    with raises(UsageError, owner="Wrong", field=f"{root}()", expected=expected) as caught:
        resolve(wrong())
    assert ("[Config(" in caught.value.hint) == (root == "datasets")


def test_error_in_a_method_has_its_file_and_line(raises: Any):
    broken = type("Broken", (Small,), {"task": lambda self: 1 / 0})
    with raises(UsageError) as caught:
        resolve(broken())
    assert re.fullmatch(r".*test_experiment\.py:\d+", caught.value.owner)


def test_none_leaves_an_input_out():
    left = resolve(Small(), [Override("datasets.0", "None")])
    assert len(left.datasets) == len(Small().datasets()) - 1


# The resolved configuration as text.


def test_config_text_names_functions_without_addresses():
    class Odd(Small):
        def task(self) -> Config:
            return Config(Task, model=Config(Lm, dtype=json.dumps), schedules={"x": object()})

    text = config_text(resolve(Odd()))
    assert "task.model.dtype = json.dumps\n" in text
    assert "<object object>" in text


def test_arguments_in_config_json_resolve_to_the_same_config():
    first = resolved(
        Small(NUM_LAYERS=3, MESH=(1, 2, 4)),
        task__model__dtype="bfloat16",
        datasets__0__batch_size="7",
    )
    written = json.loads(json.dumps(config_json(first)))
    assert written["experiment"] == f"{__name__}.Small"
    assert written["fields"]["MESH"] == [1, 2, 4]
    assert written["config"]["task.model.dtype"] == "bfloat16"

    flags = parse_flags(written["arguments"])
    fields = parse_fields("Small", experiment_fields(Small), flags.overrides)
    second = resolve(Small(**fields), [o for o in flags.overrides if o.is_deep])
    assert config_text(second) == config_text(first)
    assert config_json(second) == config_json(first)


class Color(enum.Enum):
    RED = "r"


class Bounded(Small):
    BOUNDS: list[float] = [0.0]
    COLOR: Color | None = None


def test_arguments_in_config_json_keep_infinite_floats_and_members():
    fields = {"BOUNDS": [1.0, float("inf"), float("-inf")], "COLOR": Color.RED}
    written = json.loads(json.dumps(config_json(resolve(Bounded(**fields)))))
    flags = parse_flags(written["arguments"])
    assert parse_fields("Bounded", experiment_fields(Bounded), flags.overrides) == fields


class Named(Small):
    NAME: str | None = None
    ANYTHING: Any = None


@given(
    st.text() | st.sampled_from(["None", "3", "True", "true", "false", " a", "(1,)", "nan", "'a'"])
)
def test_any_string_in_a_command_is_read_back(value: str):
    overrides = [Override(name, override_text(value)) for name in ("NAME", "ANYTHING")]
    read = parse_fields("Named", experiment_fields(Named), overrides)
    assert read == {"NAME": value, "ANYTHING": value}


def test_unused_field_is_no_field_until_a_class_replaces_the_list(raises: Any):
    class Plain(Small):
        unused_fields = ("MODEL_DIMS",)
        reduced_fields = {"MODEL_DIMS": 2, "NUM_LAYERS": 1}

    class Again(Plain):
        unused_fields = ("NUM_LAYERS",)

    assert "MODEL_DIMS" not in experiment_fields(Plain)
    assert reduced_values(Plain) == {"NUM_LAYERS": 1}
    with raises(FieldError, value="MODEL_DIMS"):
        Plain(MODEL_DIMS=3)
    assert Again(MODEL_DIMS=3).MODEL_DIMS == 3
    with raises(FieldError, owner="Typo.unused_fields", value="MODEL_DIM"):
        type("Typo", (Small,), {"unused_fields": ("MODEL_DIM",)})


def test_reduced_values_combine_those_of_all_bases():
    class Depth:
        NUM_LAYERS: int = 48
        reduced_fields = {"NUM_LAYERS": 2, "MODEL_DIMS": 64}

    class Wide(Depth, Small):
        reduced_fields = {"MODEL_DIMS": 16}

    class Own(Wide):
        """Adds nothing."""

    assert reduced_values(Small) == {}
    assert reduced_values(Own) == {"NUM_LAYERS": 2, "MODEL_DIMS": 16}
    assert Own(**reduced_values(Own)).MODEL_DIMS == 16
