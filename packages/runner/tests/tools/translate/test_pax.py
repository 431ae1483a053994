"""Pax's classes as ours; the sources here are written for these tests, as Pax's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.translate.pax import other_classes, translate_pax
from layerkit_runner.tools.translate.pax_fields import COMPOSED, NEUTRAL, ONLY, RENAMED, SAME
from layerkit_runner.tools.translate.written import Translation

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
GPT3 = '''
import jax.numpy as jnp
from paxml.tasks.lm.params.c4 import TransformerLmSpmdAdam
from praxis import base_layer, layers
WeightInit = base_layer.WeightInit
WARMUP = 600 + 36

def configure(cls, task_p):
  model_p = task_p.model
  model_p.decoder_tpl.seqlen = cls.MAX_SEQ_LEN
  model_p.params_init = WeightInit.Gaussian(0.006)
  model_p.lm_tpl.softmax_tpl.feed_forward_tpl.has_bias = False
  model_p.lm_tpl.softmax_tpl.soft_cap_logits = None
  if cls.SEPARATE_EMBEDDING:
    model_p.lm_tpl.never = True
  else:
    model_p.lm_tpl.softmax_tpl.scale_sqrt_depth = False
    model_p.lm_tpl.softmax_tpl.lookup_style = cls.EMBEDDING_LOOKUP_STYLE
  stacked_p = model_p.lm_tpl.stacked_transformer_tpl
  if fdl.get_callable(stacked_p) == transformers.PipelinedTransformer:
    stacked_p = stacked_p.pipeline_stage
  if issubclass(fdl.get_callable(stacked_p), transformers.StackedTransformerRepeated):
    stacked_p = stacked_p.block
  layer = stacked_p.transformer_layer_params_tpl
  layer.ln_tpl.epsilon = cls.LAYERNORM_EPSILON
  layer.tr_fflayer_tpl.ln_tpl.epsilon = cls.LAYERNORM_EPSILON
  model_p.lm_tpl.final_ln_tpl.epsilon = cls.LAYERNORM_EPSILON
  layer.ln_tpl.reductions_in_fp32 = True
  layer.tr_atten_tpl.internal_enable_per_dim_scale = False
  layer.tr_atten_tpl.use_bias = True
  layer.tr_fflayer_tpl.activation_tpl.approximate = True
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
    task_p = super().task()
    task_p = configure(self, task_p)
    task_p.train.num_train_steps = self.MAX_STEPS
    model_p = task_p.model
    model_p.params_init = WeightInit.Gaussian(self.INIT_STD)
    softmax_init = WeightInit.Gaussian(self.INIT_STD)
    model_p.lm_tpl.softmax_tpl.params_init = softmax_init
    model_p.lm_tpl.stacked_transformer_tpl.input_dropout_prob = 0.1
    model_p.apply_eval_sample_weights = True
    logging.info('a GPT of %d layers', self.NUM_LAYERS)
    return task_p
'''


def only(text: str, name: str | None = None) -> Translation:
    (translation,) = translate_pax({"file.py": text}, None if name is None else [name])
    return translation


def told(text: str) -> list[str]:
    """What is left over besides the data, which the classes here do not name."""
    return [str(left) for left in only(text).leftovers if left.name != "datasets()"]


def test_the_two_slice_class_of_pax_is_ours():
    translation = only(MULTISLICE, "TwoSlices")
    assert (translation.name, translation.summary) == ("TwoSlices", "Two of them.")
    assert translation.leftovers == []
    assert translation.recipes == ["AdamExponential", "Spmd", "C4", "LmExperiment"]
    ours = load_experiment(find_experiment("lm.c4_multislice.C4Spmd22BAdam2xv4_128"))()
    # Biases of feed-forwards are Pax's default, and its named models here have none.
    names = translation.fields.keys() - {"FEED_FORWARD_BIAS", "CHECKPOINT_EVERY_N_STEPS"}
    assert {name: translation.fields[name] for name in names} == {
        name: getattr(ours, name) for name in names
    }
    assert len(names) > 30


def test_a_gpt_with_what_its_methods_set():
    translation = only(GPT3)
    assert translation.leftovers == []
    assert translation.settings == {}
    assert translation.recipes == ["AdamWCosine", "Spmd", "ThePile", "LmExperiment"]
    expected: Mapping[str, Any] = {
        "MODEL_DIMS": 768,
        "PERCORE_BATCH_SIZE": 0.5,
        "POSITIONS": "trainable",
        "ATTENTION_BIAS": True,
        "NORM_EPSILON": 1e-5,
        "ATTENTION_LOGIT_CAP": None,
        "SOFTMAX_LOGIT_CAP": None,  # set by configure()
        "SCALE_EMBEDDING": False,
        "ACTIVATION": "gelu",
        "WARMUP_STEPS": 636,
        "DECAY_START": 637,
        "DECAY_END": 500000,
        "MIN_LEARNING_RATE_RATIO": 0.1,
        "DECAYED_WEIGHTS": "all",
        "INIT_STD": 0.023,
        "INPUT_DROPOUT_RATE": 0.1,
        "CHECKPOINT_POLICY": "none",  # Pax does not look at it where layers are not repeated
    }
    assert {name: translation.fields[name] for name in expected} == expected
    assert "UPDATE_RMS_CAP" not in translation.fields


def test_a_class_under_pmap_is_ours():
    translation = only(PMAP)
    assert translation.leftovers == []
    assert translation.recipes == ["AdamExponential", "Pmap", "SyntheticTokens", "LmExperiment"]
    found = load_experiment(find_experiment("lm.lm_cloud.LmCloudTransformerAdamLimitSteps"))
    ours = found()
    names = translation.fields.keys() - {"FEED_FORWARD_BIAS"}
    assert {name: translation.fields[name] for name in names} == {
        name: getattr(ours, name) if name != "INPUT_DROPOUT_RATE" else 0.0 for name in names
    }


def test_which_classes_are_translated():
    assert [one.name for one in translate_pax({"f": MULTISLICE}, ["Slice", "Base"])] == [
        "Slice",
        "Base",
    ]
    registered = translate_pax({"f": MULTISLICE})
    assert [one.name for one in registered] == ["Slice", "TwoSlices"]  # though one is inherited
    assert other_classes({"f": MULTISLICE}) == ["Base"]
    both = {"a": GPT3, "b": "class Small(Gpt):\n  NUM_LAYERS = 2"}
    translated = [(one.name, one.fields["NUM_LAYERS"]) for one in translate_pax(both)]
    assert (translated, other_classes(both)) == ([("Small", 2)], ["Gpt"])  # none is registered
    with pytest.raises(UsageError, match="no class 'TwoSlice' in f; did you mean 'TwoSlices'"):
        translate_pax({"f": MULTISLICE}, ["TwoSlice"])
    with pytest.raises(UsageError, match="f is no Python"):
        translate_pax({"f": "class"})
    with pytest.raises(UsageError, match="there is no class in f, g"):
        translate_pax({"f": "NUM_LAYERS = 2", "g": ""})


def test_a_class_may_have_the_name_of_its_base():
    translation = only("class C4SpmdAdam(c4.C4SpmdAdam):\n  NUM_LAYERS = 3\n  MODEL_DIMS = 64")
    assert translation.leftovers == []
    sizes = ("NUM_LAYERS", "MODEL_DIMS", "VOCAB_SIZE")
    assert [translation.fields[name] for name in sizes] == [3, 64, 32128]
    assert told("class Registry(theirs.Registry): pass") == [
        "base Registry = ?: give the file that has it as well, or write what it sets"
    ]
    with pytest.raises(UsageError, match="the bases of X are in no order"):
        only("class A: pass\nclass X(object, A, A): pass", "X")


def test_an_augmented_field_and_heads_that_follow_from_their_size():
    body = "NUM_LAYERS = 3\n  NUM_LAYERS *= 2\n  MODEL_DIMS = 256\n  NUM_HEADS = None"
    translation = only(f"class X(TransformerLmSpmdAdam, SyntheticDataset):\n  {body}")
    assert translation.leftovers == []
    assert (translation.fields["NUM_LAYERS"], translation.fields["NUM_HEADS"]) == (6, 2)


def test_what_pax_learns_besides_is_set():
    assert only(MULTISLICE, "TwoSlices").settings == {
        "task.model.lm_tpl.stack_tpl.layer_tpl.attention_tpl.per_dim_scale": True,
        "task.model.lm_tpl.softmax_tpl.use_bias": True,
    }


def test_data_of_a_base_in_the_same_file_are_those_of_the_base():
    base = "class SyntheticDataset(BaseExperiment):\n  def datasets(self):\n    return []\n"
    text = f"{base}class X(TransformerLmSpmdAdam, SyntheticDataset):\n  NUM_LAYERS = 2\n"
    translation = only(text, "X")
    assert "SyntheticTokens" in translation.recipes and "C4" not in translation.recipes
    assert [left.name for left in translation.leftovers] == ["SyntheticDataset.datasets()"]


def test_data_that_no_class_names_are_left_over():
    leftovers = only("class X(TransformerLmSpmdAdam):\n  NUM_LAYERS = 2\n").leftovers
    assert [left.name for left in leftovers] == ["datasets()"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("OURS = 3", "OURS = 3: no field of this name is known"),
        ("NUM_LAYERS = count()", "NUM_LAYERS = count(): the source alone does not tell its value"),
        ("NUM_LAYERS = 1 / 0", "NUM_LAYERS = 1 / 0: division by zero"),
        ("NUM_LAYERS = [1] - 2", "NUM_LAYERS = [1] - 2: unsupported operand type(s) for -"),
        ("NUM_LAYERS = 2.5", "NUM_LAYERS = 2.5: expected a whole number"),
        ("NUM_LAYERS = OTHERS", "NUM_LAYERS = OTHERS: it is no plain value"),
        ("NUM_LAYERS = 2\n  NUM_LAYERS, x = f()", "NUM_LAYERS = f(): the source alone does not"),
        ("NUM_LAYERS = 2\n  if A:\n    NUM_LAYERS = 3", "NUM_LAYERS = if A: the source alone"),
        ("PERCORE_BATCH_SIZE = 'a'", "PERCORE_BATCH_SIZE = 'a': expected a number"),
        ("ATTEN_LOGIT_CAP = 'a'", "ATTEN_LOGIT_CAP = 'a': expected a number"),
        ("USE_BIAS = 'no'", "USE_BIAS = 'no': expected True or False"),
        ("ICI_MESH_SHAPE = 8", "ICI_MESH_SHAPE = 8: expected a list of whole numbers"),
        ("TRAINABLE_POSITION_EMB = 2", "TRAINABLE_POSITION_EMB = 2: expected True or False"),
        ("ACTIVATION_CLS = f()", "ACTIVATION_CLS = f(): the source alone does not tell its value"),
        ("ACTIVATION_CLS = [1]", "ACTIVATION_CLS = [1]: ACTIVATION is one of gelu, "),
        ("LR_SCHEDULE = [1]", "LR_SCHEDULE = [1]: recipes have linear_rampup_expon"),
        ("LR_LRED_WARMUP = STEPS", "LR_LRED_WARMUP = STEPS: it is no plain value"),
        ("LR_LRED_WARMUP = 0.5", "LR_LRED_WARMUP = 0.5: expected a whole number"),
        ("FPROP_DTYPE = jnp.int8", "FPROP_DTYPE = int8: it is one of float32, bfloat16, float16"),
        ("NORM_POLICY = 'post'", "NORM_POLICY = 'post': recipes normalise before each branch"),
        ("ACTIVATION_CLS = layers.Swish", "ACTIVATION_CLS = Swish: ACTIVATION is one of gelu, "),
        ("LR_SCHEDULE = 'constant'", "LR_SCHEDULE = 'constant': recipes have linear_rampup_expon"),
        (
            "USE_REPEATED_LAYER = True\n  CHECKPOINT_POLICY = A.SAVE_QKV",
            "CHECKPOINT_POLICY = SAVE_QKV: CHECKPOINT_POLICY is one of dots, dots_no_batch, full",
        ),
        (
            "LR_SCHEDULE = 'linear_rampup_cosine_decay'",
            "ADAM_CLIP_THRESHOLD = 1.0: AdamWCosine bounds no updates; AdamExponential does",
        ),
        ("def datasets(self): ...", "X.datasets() = …: a method; recipes of data"),
        (
            "def task(self):\n    p = super().task()\n    p.model.lm_tpl.z = f(2)",
            "p.model.lm_tpl.z = f(2): set in X.task(); set it in a task() of your own",
        ),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason(body, message):
    (found,) = told(f"class X(TransformerLmSpmdAdam):\n  {body}\n")
    assert message in found


def test_an_unknown_base_and_another_optimizer_are_told():
    assert told("class X(theirs.Base): pass") == [
        "base Base = ?: give the file that has it as well, or write what it sets"
    ]
    assert told("class X(model_params.TransformerLmSpmdAdafactor): pass") == [
        "optimizer = ShardedAdafactor: no recipe has it; Adam is taken instead"
    ]


def test_each_field_is_treated_in_one_way():
    kinds = [set(SAME), set(RENAMED), set(NEUTRAL), set(ONLY), set(COMPOSED)]
    assert sum(map(len, kinds)) == len(set.union(*kinds))


HUGE = [
    "9**9**9",
    "-9**9**9",
    "10**100000 // 3",
    "(((9**99)**99)**99)",
    "[0] * 10**10",
    "10**10 * [0]",
    "[[0] * 900] * 900",
    "'a' * 10**9",
    "1 << 10**9",
    f"0x{'f' * 1_000}",
    f"'{'a' * 100_000}'",
]


@pytest.mark.parametrize("expression", HUGE, ids=lambda text: text[:20])
def test_expression_with_huge_value_is_not_computed(expression):
    translation = only(f"class A:\n  NUM_LAYERS = {expression}\n")
    assert translation.fields.get("NUM_LAYERS") is None
    assert [left.name for left in translation.leftovers] == ["NUM_LAYERS", "datasets()"]


def test_value_that_doubles_with_each_name_is_not_computed():
    lines = [f"  X{n + 1} = [X{n}, X{n}]\n" for n in range(60)]
    leftovers = told("class A:\n  X0 = [1, 1]\n" + "".join(lines))
    assert max(map(len, leftovers)) < 10_000


def test_value_within_the_bounds_is_computed():
    assert only("class A:\n  MAX_STEPS = 2**40\n").fields["MAX_STEPS"] == 2**40
    assert only("class A:\n  ICI_MESH_SHAPE = [1] * 3\n").fields["ICI_MESH_SHAPE"] == [1, 1, 1]


@pytest.mark.parametrize(
    "text",
    [
        f"class A:\n  X = {'1+' * 2_500}1\n",
        f"class A:\n  X = {'-' * 100_000}1\n",
        f"class A:\n  X = 0x{'f' * 10_000}\n",
        "class A0:\n  X = 1\n" + "".join(f"class A{n + 1}(A{n}):\n  pass\n" for n in range(3_000)),
        f"class A:\n  X = {'[' * 5_000}{']' * 5_000}\n",
    ],
    ids=["sum", "minus", "integer", "classes", "lists"],
)
def test_code_that_is_too_deep_or_too_long_is_refused(text):
    with pytest.raises(UsageError, match=r"file\.py"):
        translate_pax({"file.py": text})


def test_functions_whose_calls_double_are_refused():
    functions = "".join(f"def f{n}(t):\n  f{n + 1}(t)\n  f{n + 1}(t)\n" for n in range(40))
    task = "  def task(self):\n    t = super().task()\n    f0(t)\n    return t\n"
    with pytest.raises(UsageError, match="nodes"):
        translate_pax({"file.py": f"{functions}def f40(t):\n  t.a = 1\nclass A:\n{task}"})


def test_sizes_of_another_kind_are_told():
    names = [
        left.split(" ")[0] for left in told("class A:\n  MODEL_DIMS = [8]\n  DIMS_PER_HEAD = 2\n")
    ]
    assert names == ["MODEL_DIMS"]
