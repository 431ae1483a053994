"""Overrides that replace the class of a config, and keep the fields that both classes have."""

from __future__ import annotations

from typing import Any

import optax
import pytest

from layerkit.config import Config, Partial
from layerkit.layers import MultiHeadAttention
from layerkit_inputs.synthetic.random_tokens import SyntheticInput
from layerkit_runner import BaseExperiment, Override, UsageError
from layerkit_runner.run.resolve import resolve
from layerkit_runner.step.task import SingleTask


class Wide(MultiHeadAttention):
    """An attention with a field of its own."""

    width: int = 3


class Narrow(Wide):
    """An attention whose number of heads is a text."""

    num_heads: str = ""


class Small(BaseExperiment):
    """A language model whose attention the recipe has set."""

    def task(self) -> Config:
        from layerkit.models.language_model import LanguageModel

        task = SingleTask.HParams.config(model=LanguageModel.HParams.config())
        layer = task.model.lm_tpl.stack_tpl.layer_tpl
        layer.attention_tpl.set(num_heads=4, logit_cap=50.0)
        task.train.learner.optimizer = Partial(optax.adam)
        return task

    def datasets(self) -> list[Config]:
        return [SyntheticInput.HParams.config(batch_size=2, is_training=True)]


LAYER = "task.model.lm_tpl.stack_tpl.layer_tpl"
PATH = f"{LAYER}.attention_tpl"


class Scheduled(Small):
    def task(self) -> Config:
        task = super().task()
        task.train.learner.learning_rate = Config(optax.constant_schedule, 1.0)
        return task


def attention(*overrides: tuple[str, str]) -> tuple[Any, str]:
    resolved = resolve(Small(), [Override(path, text) for path, text in overrides])
    return resolved.task.model.lm_tpl.stack_tpl.layer_tpl.attention_tpl, "".join(resolved.notes)


def test_class_keeps_the_fields_that_were_set_and_says_so():
    result, note = attention((f"{PATH}.width", "5"), (PATH, f"{__name__}.Wide"))
    assert result.__fn_or_cls__ is Wide
    assert (result.num_heads, result.logit_cap, result.width) == (4, 50.0, 5)
    assert note == f"{PATH} is now Wide; kept from MultiHeadAttention: num_heads, logit_cap"


def test_field_that_does_not_fit_is_dropped_and_named():
    result, note = attention((PATH, f"{__name__}.Narrow"))
    assert (result.num_heads, result.logit_cap) == ("", 50.0)
    assert note.endswith("kept from MultiHeadAttention: logit_cap; DROPPED: num_heads")


@pytest.mark.parametrize("text", ["nowhere.Layer", "Wide", "3"])
def test_value_that_is_no_class_is_an_error(raises, text):
    with raises(UsageError, owner=f"--fdl.{PATH}", field=PATH):
        attention((PATH, text))


def test_number_replaces_a_config_where_the_field_takes_one():
    rate = "task.train.learner.learning_rate"
    resolved = resolve(Scheduled(), [Override(rate, "1e-4")])
    assert resolved.task.train.learner.learning_rate == 1e-4


def test_class_of_another_kind_is_an_error(raises):
    with raises(UsageError, field="--fdl.task.train"):
        attention(("task.train", "layerkit.layers.RmsNorm"))


@pytest.mark.parametrize("text", ["subprocess.getoutput", "subprocess.Popen", "os.system"])
def test_recorded_class_of_another_kind_is_an_error(raises, text):
    with raises(UsageError, owner="--fdl.task.model", value=text):
        resolve(Small(), [Override("task.model", text, is_recorded=True)])


def test_recorded_class_of_the_same_kind_or_optimizer_is_taken():
    optimizer = "task.train.learner.optimizer"
    overrides = [(PATH, f"{__name__}.Wide"), (optimizer, "optax.lion")]
    resolved = resolve(Small(), [Override(*each, is_recorded=True) for each in overrides])
    assert resolved.task.train.learner.optimizer.__fn_or_cls__ is optax.lion
    layer = resolved.task.model.lm_tpl.stack_tpl.layer_tpl
    assert layer.attention_tpl.__fn_or_cls__ is Wide


def test_with_class_keeps_set_fields_or_raises(raises):
    config = Wide.HParams.config(num_heads=4, width=5)
    with raises(TypeError, value="width"):
        config.with_class(MultiHeadAttention)
    del config.width
    assert config.with_class(MultiHeadAttention, logit_cap=1.0) == (
        MultiHeadAttention.HParams.config(num_heads=4, logit_cap=1.0)
    )
