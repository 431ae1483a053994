"""A value of another type raises when it is assigned, from Python and from the command line."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from layerkit.config import Config
from layerkit.config.field_types import FieldTypeError
from layerkit.errors import ConfigError
from layerkit.layers.attention.multi_head import MultiHeadAttention
from layerkit.layers.basic.linears import Linear
from layerkit.models.language_model import LanguageModel
from layerkit_inputs.synthetic.random_tokens import SyntheticInput
from layerkit_runner import BaseExperiment, Override, UsageError
from layerkit_runner.config.experiment import experiment_fields
from layerkit_runner.config.requests import parse_fields
from layerkit_runner.errors import FieldError
from layerkit_runner.run.resolve import resolve
from layerkit_runner.step.task import SingleTask


class Small(BaseExperiment):
    """A small language model."""

    NUM_LAYERS: int = 2
    LEARNING_RATE: float | None = None
    MESH: list[int] = [1, 1]
    DTYPE: str = "float32"

    def task(self) -> Config:
        task = SingleTask.HParams.config(model=LanguageModel.HParams.config())
        layer = task.model.lm_tpl.stack_tpl.layer_tpl
        layer.attention_tpl = MultiHeadAttention.HParams.config()
        return task

    def datasets(self) -> list[Config]:
        return [SyntheticInput.HParams.config(batch_size=2, is_training=True)]


LM = "task.model.lm_tpl"
LAYER = f"{LM}.stack_tpl.layer_tpl"
# Path, value in Python and text on the command line.
CONFIG_VALUES = [
    (f"{LM}.vocab_size", 1.5, "1.5"),
    (f"{LM}.train", "yes", "yes"),
    (f"{LM}.stack_tpl.block_tpls", (1, 2), "[1,2]"),
    (f"{LM}.softmax_tpl.weight_init", 0.02, "0.02"),
    (f"{LAYER}.attention_tpl.num_heads", None, "None"),
    ("task.loss_weights", {"loss": "all"}, "{loss: all}"),
    ("task.train.num_train_steps", "many", "many"),
    ("task.train.save_keep_steps", 100, "100"),
    ("datasets.0.is_training", "true", "true"),
]
EXPERIMENT_VALUES = [
    ("NUM_LAYERS", 1.5, "1.5"),
    ("LEARNING_RATE", "fast", "fast"),
    ("MESH", [1, "all"], "[1,all]"),
    ("DTYPE", None, "None"),
]


def config_with(path: str) -> tuple[Any, str]:
    """Return the config that has the last field of a path, and the field."""
    root, *parents, field = path.split(".")
    config: Any = getattr(resolve(Small()), root)
    for name in parents:
        config = config[int(name)] if name.isdecimal() else getattr(config, name)
    return config, field


@pytest.mark.parametrize(("path", "value", "text"), CONFIG_VALUES)
def test_config_value_of_another_type_raises(raises, path, value, text):
    config, field = config_with(path)
    before = getattr(config, field)
    with raises(FieldTypeError, field=field, value=value):
        setattr(config, field, value)
    with pytest.raises(FieldTypeError):
        config.set(**{field: value})
    with pytest.raises(FieldTypeError):
        Config(config.__fn_or_cls__, **{field: value})
    assert getattr(config, field) == before
    with raises(UsageError, field=f"--fdl.{path}"):
        resolve(Small(), [Override(path, text)])


@pytest.mark.parametrize(("field", "value", "text"), EXPERIMENT_VALUES)
def test_experiment_value_of_another_type_raises(raises, field, value, text):
    with raises(FieldError, owner="Small", field=field, value=value):
        Small(**{field: value})
    with raises(FieldError, field=field, value=value):
        parse_fields("lm.Small", experiment_fields(Small), [Override(field, text)])


def test_template_of_another_family_raises_with_the_expected_base(raises):
    config, _ = config_with(f"{LAYER}.norm_tpl")
    with raises(FieldTypeError, field="norm_tpl", expected="Config[BaseNormalization]"):
        config.norm_tpl = Linear.HParams.config()
    feed_forward, _ = config_with(f"{LAYER}.feed_forward_tpl.activation_tpl")
    with raises(ConfigError, field="activation_tpl", expected="Config[BaseActivation]"):
        feed_forward.activation_tpl = Linear


def test_part_of_another_class_raises_with_the_expected_class(raises):
    task, _ = config_with("task.model")
    with raises(FieldTypeError, owner="SingleTask", field="model", expected="BaseModel"):
        task.model = Linear.HParams.config()
    task.model = Config(functools.partial(LanguageModel))  # a function may return any class
