"""Translation of Pax's classes. The sources are written for these tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.translate import pax_classes as pax
from layerkit_runner.tools.translate.tables import Translation, module_text, read_tables

TABLES = read_tables()

MULTISLICE = '''
from jax import numpy as jnp
from paxml import experiment_registry
from paxml.tasks.lm.params import c4
from praxis import layers

class Base(c4.C4SpmdAdam):
  """22 billion weights.

  And more.
  """
  NUM_LAYERS = 48
  MODEL_DIMS = 6144
  HIDDEN_DIMS = MODEL_DIMS * 4
  NUM_HEADS = 24
  DIMS_PER_HEAD = 256
  PERCORE_BATCH_SIZE = 16
  MAX_SEQ_LEN = 1024
  VOCAB_SIZE = 32768
  FPROP_DTYPE = jnp.bfloat16
  USE_REPEATED_LAYER = True
  SUMMARY_INTERVAL_STEPS = 10
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_NOTHING

@experiment_registry.register
class Slice(Base):
  ICI_MESH_SHAPE = [1, 64, 1]

@experiment_registry.register
class TwoSlices(Slice):
  """Two of them."""
  DCN_MESH_SHAPE = [2, 1, 1]
'''
PMAP = """
class LmCloud(model_params.TransformerLmPmapAdam, lm_cloud.SyntheticDataset):
  NUM_LAYERS = 10
  MODEL_DIMS = 1024
  HIDDEN_DIMS = MODEL_DIMS * 4
  DIMS_PER_HEAD = 64
  NUM_HEADS = MODEL_DIMS // DIMS_PER_HEAD
  PERCORE_BATCH_SIZE = 16
  MAX_STEPS = 2000
"""
SMALL = """
class Small(lm_cloud.LmCloudSpmd):
  PERCORE_BATCH_SIZE = 4
  NUM_LAYERS = 2
  MODEL_DIMS = 64
  HIDDEN_DIMS = MODEL_DIMS * 4
  DIMS_PER_HEAD = 8
  ICI_MESH_SHAPE = [1, 1, 1]
  MAX_STEPS = 10
  SUMMARY_INTERVAL_STEPS = 1
"""
GPT3 = '''
import jax.numpy as jnp
from paxml.tasks.lm.params.c4 import TransformerLmSpmdAdam
from praxis import base_layer, layers
WeightInit = base_layer.WeightInit
WARMUP = 600 + 36

def configure(cls, task_p):
  WARMUP = 1
  task_p.model.lm_tpl.softmax_tpl.feed_forward_tpl.has_bias = False
  return task_p

class Gpt(TransformerLmSpmdAdam, PileUnsupervisedDataset):
  """A GPT."""
  NUM_LAYERS = 12
  NUM_HEADS: int = 12
  DIMS_PER_HEAD = 64
  MODEL_DIMS = NUM_HEADS * DIMS_PER_HEAD
  MAX_SEQ_LEN = 2048
  VOCAB_SIZE = 50304
  PERCORE_BATCH_SIZE = 0.5
  ICI_MESH_SHAPE = [8,1,1]
  FPROP_DTYPE = jnp.bfloat16
  MAX_STEPS = 600000
  TRAINABLE_POSITION_EMB = True
  TRAINABLE_PE_MAX_SEQ_LEN = MAX_SEQ_LEN
  SEPARATE_EMBEDDING = False
  USE_BIAS = True
  LAYERNORM_EPSILON = 1e-5
  ATTEN_LOGIT_CAP = -1.0
  ADAM_CLIP_THRESHOLD = -1.0
  ACTIVATION_CLS = layers.GELU
  LR_SCHEDULE = 'linear_rampup_cosine_decay'
  LR_COS_WARMUP = WARMUP
  LR_COS_DECAY_START = LR_COS_WARMUP+1
  LR_COS_DECAY_END = 500000
  INIT_STD = 0.023

  def task(self):
    task_p = configure(self, super().task())
    task_p.model.params_init = WeightInit.Gaussian(self.INIT_STD)
    return task_p
'''


def translate_pax(texts: Mapping[str, str], names: list[str] | None = None) -> list[Translation]:
    return pax.translate_pax(texts, TABLES, names)[0]


def only(text: str, name: str | None = None) -> Translation:
    (translation,) = translate_pax({"file.py": text}, None if name is None else [name])
    return translation


def told(text: str) -> list[str]:
    """Return the leftovers, without the one of the data, which the classes here do not name."""
    return [str(left) for left in only(text).leftovers if left.text != "datasets()"]


@pytest.mark.parametrize(
    ("text", "name", "recipes", "counterpart", "different"),
    [
        (
            *(MULTISLICE, "TwoSlices", ["adam_exponential", "spmd", "C4"]),
            *("lm.c4_multislice.C4Spmd22BAdam2xv4_128", {"CHECKPOINT_EVERY_N_STEPS": 1000}),
        ),
        (
            *(SMALL, "Small", ["adam_exponential", "spmd", "synthetic_tokens"]),
            *("lm.lm_cloud.LmCloudSpmdTest", {}),
        ),
        (
            *(PMAP, "LmCloud", ["adam_exponential", "pmap", "synthetic_tokens"]),
            *("lm.lm_cloud.LmCloudTransformerAdamLimitSteps", {"INPUT_DROPOUT_RATE": 0.0}),
        ),
    ],
    ids=["TwoSlices", "Small", "LmCloud"],
)
def test_class_has_the_fields_of_its_counterpart(text, name, recipes, counterpart, different):
    translation = only(text, name)
    assert (translation.name, translation.leftovers, translation.settings) == (name, [], {})
    assert list(translation.recipes) == [*recipes, "LmExperiment"]
    ours = load_experiment(find_experiment(counterpart))()
    expected = {field: getattr(ours, field) for field in translation.fields} | different
    assert translation.fields == expected
    assert len(expected) >= (24 if "pmap" in recipes else 31)


def test_constant_that_base_classes_do_not_read_is_left_out_unless_a_task_may_read_it():
    constants = "INPUT_DROPOUT_PROB = 0.1\n  INIT_STD = 0.02\n  USE_BIAS = True"
    translation = only(f"class X(lm_cloud.LmCloudSpmd):\n  {constants}\n")
    assert translation.leftovers == []
    assert [str(constant) for constant in translation.unread] == [
        f"file.py:{line}: {text}: its base classes in Pax do not read it"
        for line, text in enumerate(constants.split("\n  "), 2)
    ]
    assert not {"INPUT_DROPOUT_RATE", "INIT_STD", "ATTENTION_BIAS"} & translation.fields.keys()
    assert "# LEFT OUT file.py:3: INIT_STD = 0.02" in module_text([translation])
    text = f"class X(lm_cloud.LmCloudSpmd):\n  {constants}\n  def task(self): return f(self)\n"
    translation = only(text)
    assert (translation.fields["INIT_STD"], translation.unread) == (0.02, [])


def test_weights_and_initializer_of_praxis_are_set():
    fields = only(MULTISLICE, "TwoSlices").fields
    names = ("FEED_FORWARD_BIAS", "PER_DIM_SCALE", "SOFTMAX_BIAS", "COMBINE_QKV", "WEIGHT_INIT")
    assert [fields[name] for name in names] == [*[True] * 4, "xavier_last_axes"]


def test_class_with_a_task_is_translated_except_for_its_statements():
    translation = only(GPT3)
    assert translation.summary == "A GPT."
    assert list(translation.recipes) == ["adamw_cosine", "spmd", "ThePile", "LmExperiment"]
    expected: Mapping[str, Any] = {
        "MODEL_DIMS": 768,
        "PERCORE_BATCH_SIZE": 0.5,
        "POSITIONS": "trainable",
        "ATTENTION_BIAS": True,
        "NORM_EPSILON": 1e-5,
        "ATTENTION_LOGIT_CAP": None,
        "SCALE_EMBEDDING": True,
        "ACTIVATION": "gelu",
        "WARMUP_STEPS": 636,
        "DECAY_START": 637,
        "DECAY_END": 500000,
        "MIN_LEARNING_RATE_RATIO": 0.1,
        "DECAYED_WEIGHTS": "all",
        "INIT_STD": 0.023,
        "MAX_STEPS": 600000,
        "CHECKPOINT_POLICY": "none",  # Pax ignores it where layers are not repeated
    }
    assert {name: translation.fields[name] for name in expected} == expected
    assert "UPDATE_RMS_CAP" not in translation.fields
    assert [str(left) for left in translation.leftovers] == [
        "file.py:39: def task(self):: set what it changes in a task() of your own"
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "locals()['NUM_LAYERS'] = 3",
        "change()",
        "del NUM_LAYERS",
        "class HParams: pass",
        "@property",
    ],
)
def test_statement_of_a_class_body_that_is_no_constant_is_listed(statement):
    more = "\n  def NUM_LAYERS(self): pass" if statement.startswith("@") else ""
    text = f"class X(TransformerLmSpmdAdam):\n  {statement}{more}\n"
    (left,) = [str(left) for left in only(text, "X").leftovers if left.text != "datasets()"]
    assert left.startswith("file.py:")


def test_decorator_that_registers_nothing_is_listed():
    text = "@frozen\n@experiment_registry.register(allow=True)\nclass X(c4.C4SpmdAdam):\n  pass\n"
    assert told(text) == ["file.py:1: @frozen: it is not a constant"]


def test_constants_of_the_module_have_their_values_at_the_class():
    head = "from jax.numpy import bfloat16\nN = 3\nM = N * 2\n"
    body = "  NUM_LAYERS = N + M\n  FPROP_DTYPE = bfloat16\n"
    translation = only(f"{head}class X(c4.C4SpmdAdam):\n{body}N = 4\n")
    assert (translation.fields["NUM_LAYERS"], translation.fields["FPROP_DTYPE"]) == (9, "bfloat16")
    # A branch may replace a constant.
    (left,) = told("N = 3\nif A:\n  N = 4\nclass X(TransformerLmSpmdAdam):\n  NUM_LAYERS = N\n")
    assert left.endswith("NUM_LAYERS = N: its value is known only when the source is run")


def test_control_characters_of_a_source_do_not_reach_the_terminal():
    (left,) = told("class X(TransformerLmSpmdAdam):\n  OURS = f('\x1b]0;x\x07', '\u2028')\n")
    assert left.startswith("file.py:2: OURS = f('�]0;x�', '") and left.isprintable()


def test_names_or_registration_or_inheritance_select_the_classes(raises):
    assert [one.name for one in translate_pax({"f": MULTISLICE}, ["Slice", "Base"])] == [
        "Slice",
        "Base",
    ]
    registered = translate_pax({"f": MULTISLICE})
    assert [one.name for one in registered] == ["Slice", "TwoSlices"]  # though one is inherited
    assert pax.translate_pax({"f": MULTISLICE}, TABLES)[1] == ["Base"]
    both = {"a": GPT3, "b": "class Small(Gpt):\n  NUM_LAYERS = 2"}
    translated = [(one.name, one.fields["NUM_LAYERS"]) for one in translate_pax(both)]
    assert translated == [("Small", 2)]  # none is registered
    assert pax.translate_pax(both, TABLES)[1] == ["Gpt"]
    with raises(UsageError, owner="f", value="TwoSlice"):
        translate_pax({"f": MULTISLICE}, ["TwoSlice"])
    with raises(UsageError, owner="f"):
        translate_pax({"f": "class"})
    with raises(UsageError, owner="f, g"):
        translate_pax({"f": "NUM_LAYERS = 2", "g": ""})


def test_class_with_the_name_of_its_base_is_translated(raises):
    translation = only("class C4SpmdAdam(c4.C4SpmdAdam):\n  NUM_LAYERS = 3\n  MODEL_DIMS = 64")
    assert translation.leftovers == []
    sizes = ("NUM_LAYERS", "MODEL_DIMS", "VOCAB_SIZE")
    assert [translation.fields[name] for name in sizes] == [3, 64, 32128]
    assert told("class Registry(theirs.Registry): pass") == [
        "base Registry: add the file that defines it, or set its fields"
    ]
    with raises(UsageError, owner="X"):
        only("class A: pass\nclass X(object, A, A): pass", "X")


def test_augmented_field_is_evaluated_and_heads_are_derived():
    body = "NUM_LAYERS = 3\n  NUM_LAYERS *= 2\n  MODEL_DIMS = 256\n  NUM_HEADS = None"
    translation = only(f"class X(TransformerLmSpmdAdam, SyntheticDataset):\n  {body}")
    assert translation.leftovers == []
    assert (translation.fields["NUM_LAYERS"], translation.fields["NUM_HEADS"]) == (6, 2)


def test_data_set_of_a_base_in_the_same_file_is_inherited():
    base = "class SyntheticDataset(BaseExperiment):\n  def datasets(self):\n    return []\n"
    text = f"{base}class X(TransformerLmSpmdAdam, SyntheticDataset):\n  NUM_LAYERS = 2\n"
    translation = only(text, "X")
    assert "synthetic_tokens" in translation.recipes and "C4" not in translation.recipes
    assert [left.text for left in translation.leftovers] == ["def datasets(self):"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("OURS = 3", "OURS = 3: unknown key."),
        ("NUM_LAYERS = f()", "NUM_LAYERS = f(): its value is known only when the source is run"),
        ("NUM_LAYERS = 1 / 0", "NUM_LAYERS = 1 / 0: division by zero"),
        ("NUM_LAYERS = 2.5", "NUM_LAYERS = 2.5: expected an integer"),
        ("NUM_LAYERS = 2\n  if A:\n    NUM_LAYERS = 3", "file.py:3: if A:: its value is known"),
        ("USE_BIAS = 'no'", "USE_BIAS = 'no': expected True or False"),
        ("ICI_MESH_SHAPE = 8", "ICI_MESH_SHAPE = 8: expected a list of integers"),
        ("TRAINABLE_POSITION_EMB = 2", "TRAINABLE_POSITION_EMB = 2: expected one of True, F"),
        ("NORM_POLICY = 'post'", "NORM_POLICY = 'post': recipes normalize before each branch"),
        (
            "LR_SCHEDULE = 'linear_rampup_cosine_decay'",
            "UPDATE_RMS_CAP = 1.0: the recipes of this class have no such field; adam_exponential",
        ),
        ("def datasets(self): ...", "def datasets(self): ...: recipes of data are listed"),
    ],
)
def test_constant_without_a_field_is_listed_with_the_reason(body, message):
    (result,) = told(f"class X(TransformerLmSpmdAdam):\n  {body}\n")
    assert message in result


def test_sharded_adafactor_has_its_recipe():
    text = "class X(model_params.TransformerLmSpmdAdafactor): pass"
    assert told(text) == []
    assert "adafactor_exponential" in only(text).recipes


HUGE = [
    "9**9**9",
    "-9**9**9",
    "10**100000 // 3",
    "[0] * 10**10",
    "10**10 * [0]",
    "[[0] * 900] * 900",
    "'a' * 10**9",
    "1 << 10**9",
    f"0x{'f' * 1_000}",
    f"0x{'f' * 10_000}",
]


@pytest.mark.parametrize("expression", HUGE, ids=lambda text: text[:20])
def test_expression_with_huge_value_is_not_computed(expression):
    translation = only(f"class A:\n  NUM_LAYERS = {expression}\n")
    assert translation.fields.get("NUM_LAYERS") is None
    first, second = translation.leftovers
    assert (first.where, second.text) == ("file.py:2", "datasets()")


def test_value_that_doubles_with_each_name_is_not_computed():
    for first, next_value in (("[1, 1]", "[X{n}, X{n}]"), ("3", "X{n} * X{n}")):
        lines = [f"  X{n + 1} = {next_value.format(n=n)}\n" for n in range(60)]
        leftovers = told(f"class A:\n  X0 = {first}\n" + "".join(lines))
        assert max(map(len, leftovers)) < 10_000


def test_value_within_the_bounds_is_computed():
    assert only("class A:\n  MAX_STEPS = 1024 * 1024\n").fields["MAX_STEPS"] == 2**20
    text = "class A:\n  N = 2\n  ICI_MESH_SHAPE = [1, N * 2, -(-N)]\n"
    assert only(text).fields["ICI_MESH_SHAPE"] == [1, 4, 2]


@pytest.mark.parametrize(
    "text",
    [
        f"class A:\n  X = {'1+' * 2_500}1\n",
        f"class A:\n  X = {'-' * 100_000}1\n",
        "class A0:\n  X = 1\n" + "".join(f"class A{n + 1}(A{n}):\n  pass\n" for n in range(3_000)),
        f"class A:\n  X = {'[' * 5_000}{']' * 5_000}\n",
    ],
    ids=["sum", "minus", "classes", "lists"],
)
def test_code_that_is_nested_too_deeply_or_too_long_is_an_error(text):
    # The message depends on the version of Python.
    with pytest.raises(UsageError) as error:
        translate_pax({"file.py": text})
    assert error.value.owner in ("file.py", "A3000")
