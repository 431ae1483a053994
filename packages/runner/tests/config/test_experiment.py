"""Experiments: declared fields, overrides before methods, deep paths on the results."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerkit.config import Config, build
from layerkit_runner import BaseExperiment, Override, UsageError
from layerkit_runner.config.config_text import config_json, config_text
from layerkit_runner.config.experiment import experiment_fields, reduced_values
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.overrides import parse_fields
from layerkit_runner.config.resolve import resolve
from layerkit_runner.errors import FieldError


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


def refusal(**paths: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(**paths)
    return str(caught.value)


# Declaring fields.


def test_fields_come_from_the_class_its_bases_and_mix_ins():
    assert experiment_fields(Smaller) == {
        "LEARNING_RATE": "float",
        "NUM_LAYERS": "int",
        "MODEL_DIMS": "int",
        "HIDDEN_DIMS": "int | None",
        "MESH": "tuple[int, ...]",
    }
    assert Smaller().NUM_LAYERS == 1
    assert Smaller().LEARNING_RATE == 1e-3


def test_assigning_what_nobody_declared_is_an_error_when_the_class_is_made():
    with pytest.raises(TypeError) as caught:

        class Typo(Small):
            NUM_LAYRES = 3

    assert str(caught.value) == (
        "test_assigning_what_nobody_declared_is_an_error_when_the_class_is_made.<locals>.Typo"
        " assigns NUM_LAYRES, which is not declared; did you mean 'NUM_LAYERS'? A new field needs"
        " an annotation, such as NUM_LAYRES: int = 3."
    )


def test_a_mix_in_may_assign_what_the_other_base_declares_and_nothing_else():
    class Deep:
        NUM_LAYERS = 64

    class Deeper(Deep, Small):
        pass

    assert Deeper().NUM_LAYERS == 64

    class Wrong:
        LAYERS = 64

    with pytest.raises(TypeError, match=r"Wrong assigns LAYERS, which is not declared"):

        class Mixed(Wrong, Small):
            pass


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("eval_program", "eval_programs"),
        ("evaluate_programs", "eval_programs"),
        ("decode_dataset", "decode_datasets"),
        ("partition", "partitioner"),
        ("dataset", "datasets"),
    ],
)
def test_a_misspelt_hook_is_refused_since_nothing_would_call_it(name: str, hook: str):
    mix_in = type("Programs", (), {name: lambda self: None})
    for bases, members in (((Small,), vars(mix_in)[name]), ((mix_in, Small), None)):
        with pytest.raises(UsageError) as caught:
            type("Programs", bases, {name: members} if members else {})
        assert str(caught.value) == (
            f"Programs defines {name}(), which a run never calls; did you mean {hook!r}? A method"
            f" of your own needs a name less like it, such as _{name}."
        )


def test_names_that_are_only_somewhat_like_a_hook_are_your_own():
    class Own(Small):
        def dataset(self, split: str) -> Config:  # hooks take nothing
            return Config(Input, batch_size=1)

        def validator(self) -> None:
            """Not as near as that."""

        def decode_dataset(self) -> Config:
            return self.dataset("decode")

        def decode_datasets(self) -> list[Config]:  # beside it, so both names are meant
            return [self.decode_dataset()]

    class Below(Own):
        def decode_dataset(self) -> Config:
            return self.dataset("test")

    assert len(Below().decode_datasets()) == 1


def test_a_property_derives_a_field_that_can_then_not_be_set():
    class Derived(Small):
        @property
        def HIDDEN_DIMS(self) -> int:
            return 3 * self.MODEL_DIMS

    assert Derived(MODEL_DIMS=10).HIDDEN_DIMS == 30
    with pytest.raises(TypeError, match="has no field 'HIDDEN_DIMS'"):
        Derived(HIDDEN_DIMS=3)


# Overriding fields.


def test_overrides_change_one_instance():
    assert Small(NUM_LAYERS=5).NUM_LAYERS == 5
    assert Small().NUM_LAYERS == 2
    assert dict(Small(NUM_LAYERS=5).overrides) == {"NUM_LAYERS": 5}


def test_an_unknown_override_names_the_near_one():
    with pytest.raises(TypeError) as caught:
        Small(num_layer=5)
    assert str(caught.value) == (
        "Small has no field 'num_layer'; did you mean 'NUM_LAYERS'?"
        " Its fields: LEARNING_RATE, NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, MESH."
    )


def test_values_are_checked_whether_overridden_or_not(raises):
    with raises(FieldError, owner="Small", field="NUM_LAYERS", value=1.5, expected="int"):
        Small(NUM_LAYERS=1.5)

    class Wrong(Small):
        NUM_LAYERS = "two"

    with raises(FieldError, field="NUM_LAYERS", value="two", expected="int"):
        Wrong()
    assert Wrong(NUM_LAYERS=2).NUM_LAYERS == 2


def test_values_become_what_the_annotation_says():
    experiment = Small(LEARNING_RATE=1, MESH=[1, 2, 4])
    assert experiment.MESH == (1, 2, 4)
    assert isinstance(experiment.LEARNING_RATE, float)


def test_falsy_overrides_count():
    assert Small(LEARNING_RATE=0.0).LEARNING_RATE == 0.0
    assert Small(HIDDEN_DIMS=None).overrides["HIDDEN_DIMS"] is None


def test_assigning_an_unknown_field_later_is_an_error_too():
    with pytest.raises(TypeError, match="did you mean 'NUM_LAYERS'"):
        Small().NUM_LAYER = 3


def test_a_field_without_default_needs_a_value():
    class Needs(Small):
        VOCAB_SIZE: int

    with pytest.raises(TypeError, match=r"Needs needs a value for VOCAB_SIZE\.$"):
        Needs()
    assert Needs(VOCAB_SIZE=3).VOCAB_SIZE == 3


def test_list_defaults_belong_to_the_instance():
    class Listed(Small):
        ICI_MESH_SHAPE: list[int] = [1, 1, 1]

    Listed().ICI_MESH_SHAPE.append(9)
    assert Listed().ICI_MESH_SHAPE == [1, 1, 1]


# Resolving.


def test_what_is_derived_from_a_field_follows_its_override():
    assert resolved().task.model.hidden_dims == 32
    assert resolved(Small(MODEL_DIMS=100)).task.model.hidden_dims == 400


def test_deep_paths_set_any_field():
    result = resolved(
        task__model__num_layers="4",
        task__learning_rate="1",
        task__schedules__warmup__num_layers="7",
        task__schedules__steps__1="5",
        datasets__1__batch_size="16",
        partitioner__shape__1="8",
    )
    assert result.task.model.num_layers == 4
    assert result.task.learning_rate == 1.0
    assert result.task.schedules["warmup"].num_layers == 7
    assert result.task.schedules["steps"] == [1, 5]
    assert [d.batch_size for d in result.datasets] == [4, 16]
    assert result.partitioner.shape == (1, 8, 1)
    assert build(result.task).model == Lm(num_layers=4, hidden_dims=32)


def test_a_shared_config_stays_shared():
    result = resolved(datasets__0__vocabulary__size="512")
    assert result.datasets[0].vocabulary is result.datasets[1].vocabulary
    assert result.datasets[1].vocabulary.size == 512


def test_what_the_experiment_handed_out_is_not_changed():
    class Cached(Small):
        def task(self) -> Config:
            return cached

    cached = Small().task()
    assert resolved(Cached(), task__model__num_layers="9").task.model.num_layers == 9
    assert cached.model.num_layers == 2


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (
            "task.model.num_layerz",
            "4",
            "task.model is a config of Lm, which has no field 'num_layerz'; did you mean"
            " 'num_layers'? Its fields: num_layers, hidden_dims, dtype.",
        ),
        (
            "task.modle.num_layers",
            "4",
            "task is a config of Task, which has no field 'modle'; did you mean 'model'?"
            " Its fields: model, learning_rate, schedules.",
        ),
        (
            "task.model.num_layers.x",
            "4",
            "task.model.num_layers is 2, which has no field 'x' nor any other.",
        ),
        (
            "task.model",
            "Big",
            "task.model is a config of Lm; set its fields, such as task.model.num_layers, or None.",
        ),
        (
            "task.schedules.warmpu",
            "1",
            "task.schedules has no key 'warmpu'; did you mean 'warmup'? Its keys: warmup, steps.",
        ),
        (
            "datasets.batch_size",
            "4",
            "datasets is a list; say which element, such as datasets.0.batch_size.",
        ),
        ("datasets.2.batch_size", "4", "datasets has no element 2; it has 2 elements, 0 to 1."),
        ("decode_datasets.0.x", "4", "decode_datasets has no element 0; it has no elements."),
    ],
)
def test_a_path_that_leads_nowhere_names_the_level_and_the_near_name(
    path: str, text: str, message: str
):
    assert refusal(**{path.replace(".", "__"): text}) == f"--fdl.{path}: {message}"


def test_value_of_another_type_raises_with_the_flag(raises):
    with raises(UsageError, field="--fdl.task.model.num_layers", value="four", expected="int"):
        resolved(task__model__num_layers="four")


def test_element_of_another_type_raises_with_flag_and_field(raises):
    with raises(UsageError, owner="--fdl.partitioner.shape.0", field="partitioner.shape"):
        resolved(partitioner__shape__0="x")


def test_a_part_can_be_switched_off():
    assert resolved(datasets__0__vocabulary="None").datasets[0].vocabulary is None


def test_two_paths_to_one_config_must_agree():
    paths = {"datasets__0__vocabulary__size": "1", "datasets__1__vocabulary__size": "2"}
    assert refusal(**paths) == (
        "--fdl.datasets.1.vocabulary.size: it contradicts --fdl.datasets.0.vocabulary.size=1: both"
        " paths lead to the same Vocabulary."
    )
    agreeing = dict.fromkeys(paths, "5")
    assert resolved(**agreeing).datasets[0].vocabulary.size == 5


def test_validate_refuses_before_anything_is_made():
    class Checked(Small):
        def task(self) -> Config:
            raise AssertionError("made before it was checked")

    with pytest.raises(UsageError) as caught:
        resolve(Checked(NUM_LAYERS=101))
    assert str(caught.value).endswith(
        "Checked cannot run as asked: NUM_LAYERS=101 is more than 100"
    )


def test_a_method_that_returns_no_config_is_named():
    class Wrong(Small):
        def datasets(self) -> Any:
            return Config(Input, batch_size=1)

    with pytest.raises(TypeError, match=r"Wrong\.datasets\(\) must return a list of Configs"):
        resolve(Wrong())


# The resolved configuration as text.


def test_text_has_a_line_for_each_field():
    result = resolved(Smaller(), datasets__1__batch_size="16")
    assert config_text(result).splitlines() == [
        f"experiment = {__name__}.Smaller",
        "experiment.LEARNING_RATE = 0.001",
        "experiment.NUM_LAYERS = 1",
        "experiment.MODEL_DIMS = 8",
        "experiment.HIDDEN_DIMS = None",
        "experiment.MESH = (1, 1, 1)",
        "task = Task",
        "task.model = Lm",
        "task.model.num_layers = 1",
        "task.model.hidden_dims = 32",
        "task.model.dtype = 'float32'",
        "task.learning_rate = 0.001",
        "task.schedules.warmup = Lm",
        "task.schedules.warmup.num_layers = 2",
        "task.schedules.warmup.hidden_dims = None",
        "task.schedules.warmup.dtype = 'float32'",
        "task.schedules.steps = [1, 2]",
        "datasets.0 = Input",
        "datasets.0.batch_size = 4",
        "datasets.0.vocabulary = Vocabulary",
        "datasets.0.vocabulary.size = 256",
        "datasets.0.is_training = True",
        "datasets.1 = Input",
        "datasets.1.batch_size = 16",
        "datasets.1.vocabulary = the same as datasets.0.vocabulary",
        "datasets.1.is_training = False",
        "decode_datasets = []",
        "partitioner = Mesh",
        "partitioner.shape = (1, 1, 1)",
    ]


def test_text_names_functions_and_hides_addresses():
    class Odd(Small):
        def task(self) -> Config:
            return Config(Task, model=Config(Lm, dtype=json.dumps), schedules={"x": object()})

    text = config_text(resolve(Odd()))
    assert "task.model.dtype = json.dumps\n" in text
    assert "<object object>" in text


def test_the_arguments_in_the_json_make_the_same_configuration_again():
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


class Named(Small):
    NAME: str | None = None
    ANYTHING: Any = None


def text_of(**fields: Any) -> dict[str, str]:
    return config_json(resolve(Named(**fields)))["overrides"]


@pytest.mark.parametrize("value", ["bfloat16", "/data/c4.model", "gs://bucket/a b", "a.b"])
def test_strings_stand_in_commands_as_they_are_typed(value: str):
    assert text_of(NAME=value) == {"NAME": value}


@given(
    st.text() | st.sampled_from(["None", "3", "True", "true", "false", " a", "(1,)", "nan", "'a'"])
)
def test_any_string_in_a_command_is_read_as_it_was(value: str):
    written = text_of(NAME=value, ANYTHING=value)
    overrides = [Override(name, text) for name, text in written.items()]
    read = parse_fields("Named", experiment_fields(Named), overrides)
    assert read == {"NAME": value, "ANYTHING": value}


def test_every_base_says_how_its_own_fields_are_reduced():
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
    text = "^reduced_fields of .*Wrong: .*Wrong has no field 'NUM_LAYER'; did you mean 'NUM_LAYERS'"
    with pytest.raises(TypeError, match=text):

        class Wrong(Small):
            reduced_fields = {"NUM_LAYER": 1}
