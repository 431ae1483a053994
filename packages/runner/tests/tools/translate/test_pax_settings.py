"""What `task()` of a Pax class sets is a field of ours, or is told: nothing is passed over."""

from __future__ import annotations

import textwrap

import pytest

from layerkit_runner.config.registry import find_experiment
from layerkit_runner.tools.translate.pax import translate_pax
from layerkit_runner.tools.translate.pax_settings import DONE_ANYWAY, FIELDS, NEUTRAL
from layerkit_runner.tools.translate.written import Translation

LAYER = "p.model.lm_tpl.stacked_transformer_tpl.transformer_layer_params_tpl"
SET = "set in X.task(); set it in a task() of your own"
UNKNOWN = f"under a condition that the source alone does not tell; {SET}"


def task_of(body: str, more: str = "") -> Translation:
    """The translation of a class whose task() does this with the task `p`."""
    method = textwrap.indent(f"p = super().task()\n{body}\nreturn p", "    ")
    text = f"{more}\nclass X(c4.C4SpmdAdam):\n  def task(self):\n{method}\n"
    (translation,) = translate_pax({"file.py": text}, ["X"])
    return translation


def told(body: str, more: str = "") -> list[str]:
    return [str(leftover) for leftover in task_of(body, more).leftovers]


BEFORE = task_of("").fields


def changed(body: str, more: str = "") -> dict[str, object]:
    """The fields that differ from those of a class that sets nothing."""
    translation = task_of(body, more)
    assert translation.leftovers == []
    assert translation.fields.keys() >= BEFORE.keys()
    return {
        name: value
        for name, value in translation.fields.items()
        if name not in BEFORE or BEFORE[name] != value
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("p.train.num_train_steps = 500", {"MAX_STEPS": 500}),
        ("p.train.set(num_train_steps=500)", {"MAX_STEPS": 500}),
        ("p.train.learner.optimizer.epsilon = 1e-12", {"ADAM_EPSILON": 1e-12}),
        ("lp = p.train.learner\nlp.optimizer.learning_rate = 2e-4", {"LEARNING_RATE": 2e-4}),
        (
            "lp = p.train\nlp.save_max_to_keep = lp.eval_interval_steps = None",
            {"CHECKPOINT_MAX_TO_KEEP": None, "EVAL_INTERVAL_STEPS": None},
        ),
        ("p.model.lm_tpl.packed_input = False", {"PACKED_INPUT": False}),
        (
            f"{LAYER}.tr_fflayer_tpl.activation_tpl.approximate = False",
            {"ACTIVATION": "gelu_exact"},
        ),
        (f"{LAYER}.tr_fflayer_tpl.has_bias = False", {"FEED_FORWARD_BIAS": False}),
        (f"layer = {LAYER}\nlayer.tr_atten_tpl.use_bias = True", {"ATTENTION_BIAS": True}),
        ("p.model.decoder_tpl.eos_id = END", {"EOS_ID": 3}),
        ("p.train.num_train_steps = 5\np.train.num_train_steps = 6", {"MAX_STEPS": 6}),
        ("if self.NUM_LAYERS > 20:\n  p.train.num_train_steps = 5", {"MAX_STEPS": 5}),
        ("if self.NUM_LAYERS > 30:\n  p.train.num_train_steps = 5", {}),
        ("if unknown():\n  p.train.summary_interval_steps = 100", {}),  # as it is anyway
        ("p = also(self, p)", {"MAX_STEPS": 24}),
        ("p = also(task_p=p, cls=self)\nreturn p\np.train.num_train_steps = 1", {"MAX_STEPS": 24}),
        ("p.train.learner.repeat_prefix_sep = '_'", {}),
    ],
)
def test_a_path_is_a_field(body, expected):
    more = "END = 3\ndef also(cls, task_p):\n  t = task_p.train\n"
    assert changed(body, f"{more}  t.num_train_steps = cls.NUM_LAYERS\n  return task_p") == expected


@pytest.mark.parametrize(
    ("body", "leftovers"),
    [
        ("p.train.learner.optimizer.learning_rate *= 2", [
            "p.train.learner.optimizer.learning_rate = "
            f"p.train.learner.optimizer.learning_rate * 2: {SET}"
        ]),
        ("p.train.set(ours=1)", [f"p.train.ours = 1: {SET}"]),
        ("p.train.num_train_steps = '9'", [
            f"p.train.num_train_steps = '9': expected a whole number; {SET}"
        ]),
        ("p.model.apply_eval_sample_weights = False", [
            f"p.model.apply_eval_sample_weights = False: recipes have True; {SET}"
        ]),
        ("p.model.decoder_tpl.seqlen = 7", [f"p.model.decoder_tpl.seqlen = 7: {SET}"]),
        (f"{LAYER}.tr_atten_tpl.internal_enable_per_dim_scale = True", [
            f"{LAYER}.tr_atten_tpl.internal_enable_per_dim_scale = True: recipes have False; {SET}"
        ]),
        ("p.model.params_init = Xavier(1.0)", [f"p.model.params_init = Xavier(1.0): {SET}"]),
        ("setattr(p.train, 'num_train_steps', 5)", [
            f"setattr(p.train, 'num_train_steps', 5) = …: {SET}"
        ]),
        ("theirs.set_default_adam(p, 0.5)", [f"theirs.set_default_adam(p, 0.5) = …: {SET}"]),
        ("p = theirs.change(p)\np.train.num_train_steps = 5", [
            f"theirs.change(p) = …: {SET}", f"p.train.num_train_steps = 5: {SET}"
        ]),
        ("p.train['steps'] = 5", [f"p.train['steps'] = 5: {SET}"]),
        ("p.train.x, y = 5, 6", [f"p.train.x = 5: {SET}"]),
        ("del p.train.x", [f"del p.train.x = …: {SET}"]),
        ("self.more(p)", [f"self.more(p) = …: {SET}"]),
        ("if unknown():\n  p.train.num_train_steps = 5", [
            f"p.train.num_train_steps = 5: {UNKNOWN}"
        ]),
        ("for n in NUMBERS:\n  p.train.num_train_steps = 5", [
            f"p.train.num_train_steps = 5: {UNKNOWN}"
        ]),
        ("try:\n  p.train.num_train_steps = 5\nexcept E:\n  pass", [
            f"p.train.num_train_steps = 5: {UNKNOWN}"
        ]),
        ("if unknown():\n  return p\np.train.num_train_steps = 5", [
            f"p.train.num_train_steps = 5: {UNKNOWN}"
        ]),
        ("if change(p):\n  pass", [f"change(p) = …: {SET}"]),
        ("while change(p):\n  pass", [f"change(p) = …: {SET}"]),
        ("for x in change(p):\n  pass", [f"change(p) = …: {SET}"]),
        ("with change(p):\n  pass", [f"change(p) = …: {SET}"]),
        ("x = [change(p) for _ in NUMBERS]", [f"change(p) = …: {SET}"]),
        ("logging.info('%s', p)\nfdl.get_callable(p.model)\nprint(p)", []),
    ],
)  # fmt: skip
def test_whatever_else_sets_something_is_told(body, leftovers):
    assert told(body) == leftovers


def test_an_epsilon_of_norms_is_that_of_all():
    three = [f"{LAYER}.ln_tpl", f"{LAYER}.tr_fflayer_tpl.ln_tpl", "p.model.lm_tpl.final_ln_tpl"]
    all_of_them = "\n".join(f"{norm}.epsilon = 1e-5" for norm in three)
    assert changed(all_of_them) == {"NORM_EPSILON": 1e-5}
    reason = "recipes have one NORM_EPSILON for all norms, here 1e-06"
    assert told(f"{three[2]}.epsilon = 0.1") == [f"{three[2]}.epsilon = 0.1: {reason}"]
    assert told(f"{three[2]}.epsilon = 1e-6") == []


def test_the_embedding_starts_as_the_other_weights():
    softmax = "p.model.lm_tpl.softmax_tpl.params_init = WeightInit.Gaussian"
    both = f"init = WeightInit.Gaussian(scale=0.02)\np.model.params_init = init\n{softmax}(0.02)"
    assert changed(both) == {"INIT_STD": 0.02}
    # By itself it is not that of the whole model.
    (leftover,) = told(f"{softmax}(0.5)")
    assert leftover == (
        "p.model.lm_tpl.softmax_tpl.params_init = WeightInit.Gaussian(0.5): recipes start the"
        " embedding with the deviation 1/√MODEL_DIMS"
    )
    assert "INIT_STD" not in task_of(f"{softmax}(0.5)").fields
    assert changed(f"{softmax}(2048 ** -0.5)") == {}
    (leftover,) = told("p.model.params_init = WeightInit.Gaussian(0.02)")
    assert "here 0.02" in leftover and "Gaussian(1/√MODEL_DIMS)" in leftover


def test_the_layers_of_a_scan_or_of_a_stage_are_layers():
    body = """
    stacked = p.model.lm_tpl.stacked_transformer_tpl
    if fdl.get_callable(stacked) == PipelinedTransformer:
      stacked = stacked.pipeline_stage
    if issubclass(fdl.get_callable(stacked), Repeated):
      stacked = typing.cast(Repeated, stacked.block)
    stacked.input_dropout_prob = 0.1
    """
    assert changed(textwrap.dedent(body)) == {"INPUT_DROPOUT_RATE": 0.1}
    # Which of two other parts it is, nobody knows.
    other = "q = p.model\nif unknown():\n  q = p.train\nq.num_train_steps = 5"
    assert told(other) == [f"q.num_train_steps = 5: {SET}"]


def test_a_task_of_its_own_is_told():
    base = "class Base(c4.C4SpmdAdam):\n  def task(self):\n    p = super().task()\n"
    base += "    p.train.num_train_steps = 5\n    return p\n"
    heir = "class X(Base):\n  def task(self):\n    p = Task()\n    p.train.y = 1\n    return p\n"
    (translation,) = translate_pax({"file.py": base + heir})
    assert [str(leftover) for leftover in translation.leftovers] == [
        "X.task() = …: it makes a task without super().task(); fields of its bases are taken over",
        f"p.train.y = 1: {SET}",
    ]
    assert "MAX_STEPS" not in translation.fields


def test_each_path_is_treated_in_one_way_and_each_field_is_one_of_the_recipes():
    assert not FIELDS.keys() & DONE_ANYWAY.keys()
    assert not {*FIELDS, *DONE_ANYWAY} & set(NEUTRAL)
    known = find_experiment("lm.c4.C4Spmd1BAdam4Replicas").fields
    assert {field for field, _ in FIELDS.values()} <= set(known)
