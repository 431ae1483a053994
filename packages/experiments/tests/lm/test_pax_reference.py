"""Named experiments have the weights, first draws and settings of paxml's classes.

`pax/weights.json` is what paxml 1.4.0 says of them; `scripts/pax_reference.py` writes it. Weights
of the two libraries are paired by `layerkit.interop.praxis`.

Standard deviations are compared by the rules of the two libraries, at full size. That the values
drawn have them is tested on the experiment that is small enough.

`pax/translations.json` has sources of classes, and what paxml builds from them;
`scripts/pax_translations.py` writes it.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts
from flax.traverse_util import flatten_dict, unflatten_dict

from layerkit.base.weights import WeightBox, is_box
from layerkit.config import Config, assigned_fields, build, target_of
from layerkit.config.nested_map import NestedMap
from layerkit.interop.praxis import find_sources
from layerkit_runner.config.registry import find_experiment, load_experiment
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.run.resolve import resolve
from layerkit_runner.tools.translate.pax_classes import translate_pax
from layerkit_runner.tools.translate.tables import module_text, read_tables

RECORDS = Path(__file__).parents[1] / "pax"
REFERENCE = json.loads((RECORDS / "weights.json").read_text())
TRANSLATIONS = json.loads((RECORDS / "translations.json").read_text())
# Pax's default initializer has the scale 1.000001.
RELATIVE = 2e-6
# Values of this repository that differ on purpose, with the reason where the field is set.
DIFFERENT: dict[str, dict[str, Any]] = {
    "lm.lm_cloud.LmCloudSpmdTest": {"num_train_steps": 10, "summary_interval_steps": 1},
    # Pax's classes train no steps; these have the number of the script.
    **{name: {"num_train_steps": 1000} for name in REFERENCE if "lm.boolq." in name},
    # As in later versions of Pax.
    **{name: {"num_train_steps": 100} for name in REFERENCE if "lm.pile.Synthetic" in name},
}
# Pax misspells the field of these.
MICROBATCH_SIZES = {"lm.c4.C4SpmdPipelineGpt3AdamOrgHPBS1p5k768Replicas": 8}
# Groups and microbatches that the shards of a batch cannot share evenly.
NUM_GROUPS = {"lm.nvidia.MoELarge": 32, "lm.nvidia.Grok_PP": 64, "lm.nvidia.Grok_Proxy_PP": 64}
NUM_MICROBATCHES = {"lm.nvidia.Grok_PP": 8, "lm.nvidia.Grok_Proxy_PP": 8}
# 64 experts cannot be split evenly over 128 devices.
MESHES = {"lm.nvidia.GLaM64B64EProxy": {"ici": [1, 16, 8, 1], "dcn": None}}
# An evaluation runs on all devices.
ANY_MESH = ("lm.pile.Lambada126M",)
# Steps of Pax unless a class says otherwise.
ENDLESS = 10_000_000
# The others are alike and take longer than the ordinary run has.
SAMPLES = (
    "lm.bert.BertSpmdL4H128",
    "lm.c4.C4Spmd1BAdam4Replicas",
    "lm.c4.C4SpmdPipelineGpt3AdamMLPerfHPBS4k1024Replicas",
    "lm.c4.C4SpmdPipelineGpt3SmallAdam8Replicas",
    "lm.c4_multislice.C4Spmd22BAdam2xv4_8",
    "lm.lm_cloud.LmCloudSpmd2BLimitSteps",
    "lm.lm_cloud.LmCloudSpmdPipelineMultislice2BCircular",
    "lm.lm_cloud.LmCloudSpmdTest",
    "lm.lm_cloud.LmCloudTransformerAdamLimitSteps",
    "lm.nvidia.GLaM64B64EProxy",
    "lm.nvidia.Grok_PP",
    "lm.nvidia.Llama2_70B",
    "lm.nvidia.NVIDIA175B",
    "lm.optimal_scaling.OptimalScaling2x2x1",
    "lm.pile.GPT5B",
    "lm.pile.Pile126M",
)
EACH = pytest.mark.parametrize(
    "name",
    [
        name if name in SAMPLES else pytest.param(name, marks=pytest.mark.experiments)
        for name in REFERENCE
    ],
)


@functools.cache
def resolved(name: str) -> ResolvedExperiment:
    return resolve(load_experiment(find_experiment(name))())


@functools.cache
def declared(name: str) -> dict[str, WeightBox]:
    """The weights by name, without values."""
    model = build(resolved(name).task.model)
    tree = jax.eval_shape(model.init_boxed, jax.random.key(0))["params"]
    return flatten_dict(tree, sep="/", is_leaf=lambda _, leaf: is_box(leaf))


class PaxWeight:
    """One line of the reference: a weight, or a weight of each layer."""

    def __init__(self, line: list[Any]):
        name, self.copies, prefix, shape, self.method, self.scale, self.std = line
        self.names = [name.replace("*", str(copy)) for copy in range(self.copies)]
        self.prefix, self.shape = tuple(prefix), tuple(shape)


def pax_weights(name: str) -> dict[str, PaxWeight]:
    lines = [PaxWeight(line) for line in REFERENCE[name]["weights"]]
    return {each: line for line in lines for each in line.names}


def standard_deviation(box: WeightBox) -> float:
    """The deviation by the definition of the initializer."""
    assert box.init is not None and box.fans is not None
    if box.init.method == "constant":
        return 0.0
    if box.init.method == "gaussian":
        return box.init.scale
    if box.init.method == "uniform":
        return box.init.scale / math.sqrt(3)
    assert box.init.method == "xavier_last_axes"
    return box.init.scale * math.sqrt(6 / sum(box.fans)) / math.sqrt(3)


@EACH
def test_weights_and_first_deviations_are_those_of_pax(name: str):
    ours, theirs = declared(name), pax_weights(name)
    total = sum(math.prod(box.value.shape) for box in ours.values())
    assert total == REFERENCE[name]["num_weights"]
    for path, source in find_sources(ours, theirs).items():
        line, shape = theirs[source.names[0]], ours[path].value.shape
        own = line.shape[1:] if source.weight.part is not None else line.shape
        if (
            len(line.shape) < source.weight.rank
        ):  # GLaM merges heads, those of the output before dims.
            own = shape[-source.weight.rank :]
            assert math.prod(own) == math.prod(line.shape)
        elif source.weight.transpose is not None:
            own = tuple(own[axis] for axis in source.weight.transpose)
        assert shape[len(shape) - len(own) :] == own, path
        layers = 1
        if source.is_stacked:
            layers = len(range(len(source.names) * math.prod(line.prefix))[source.layers])
        assert math.prod(shape[: len(shape) - len(own)]) == layers, path
        deviation = standard_deviation(ours[path])
        assert deviation == pytest.approx(line.std, rel=RELATIVE, abs=0), path
        if line.std == 0:  # constants
            assert ours[path].init.scale == line.scale, path


def test_drawn_weights_have_the_deviations_of_pax():
    name = "lm.lm_cloud.LmCloudSpmdTest"
    theirs = pax_weights(name)
    model = build(resolved(name).task.model)
    drawn = flatten_dict(jax.jit(model.init)(jax.random.key(5))["params"], sep="/")
    for path, source in find_sources(drawn, theirs).items():
        expected, value = theirs[source.names[0]].std, np.asarray(drawn[path], np.float64)
        if expected == 0:
            assert not value.any()
        else:
            # Four standard errors of a deviation that is measured on n values.
            assert value.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * value.size))


@EACH
def test_settings_of_training_are_those_of_pax(name: str):
    reference, experiment = REFERENCE[name], resolved(name)
    train = experiment.task.train
    expected = {**reference["train"], **DIFFERENT.get(name, {})}
    if expected["num_train_steps"] == ENDLESS:  # the run ends where the rate stays the same
        del expected["num_train_steps"]
        assert train.num_train_steps >= train.learner.learning_rate.decay_end
    assert {field: getattr(train, field) for field in expected} == expected
    check_learner(train.learner, reference)


def check_learner(learner: Config, reference: dict[str, Any]) -> None:
    assert (learner.on_nonfinite == "skip") is (
        reference["learner"]["check_valid_step"]
        and reference["learner"]["enable_skip_step_on_gradient_anomalies"]
    )
    limit = reference["learner"]["skip_step_gradient_norm_value"] or None
    assert learner.skip_step_gradient_norm_value == limit
    optimizer, pax = learner.optimizer, reference["optimizer"]
    if pax["class"] == "Adam":
        moments = (optimizer.b1, optimizer.b2, optimizer.eps)
        assert moments == (pax["beta1"], pax["beta2"], pax["epsilon"])
    else:
        assert (pax["class"], pax["decay_method"]) == ("ShardedAdafactor", "adam")
        assert (optimizer.beta1, optimizer.decay_adam) == (pax["beta1"], pax["decay_adam"])
    assert optimizer.weight_decay == pax["weight_decay"]
    cap = pax["clip_threshold"] if pax["clip_threshold"] > 0 else None
    name_of_cap = "update_rms_cap" if pax["class"] == "Adam" else "clip_threshold"
    assert getattr(optimizer, name_of_cap, None) == cap
    assert getattr(optimizer, "mask", None) is None
    assert learner.clip_global_norm == (pax["clip_gradient_norm_to_value"] or None)
    schedule = learner.learning_rate
    rate_at = schedule.Instantiate()
    for step, rate in reference["learning_rates"].items():
        # The first steps of a warmup are differences of numbers near the peak, in float32.
        rounding = 2e-7 * schedule.peak
        assert float(rate_at(int(step))) == pytest.approx(rate, rel=1e-5, abs=rounding), step


@EACH
def test_settings_of_the_model_and_the_data_are_those_of_pax(name: str):
    experiment, pax, data = resolved(name), REFERENCE[name]["model"], REFERENCE[name]["data"]
    lm = experiment.task.model.lm_tpl
    # A layer with experts comes first, a dense one last.
    first, *others = lm.stack_tpl.block_tpls or (lm.stack_tpl.layer_tpl,)
    layer = others[-1] if others else first
    check_rates_and_caps(experiment.task.model, pax)
    softmax = assigned_fields(lm.softmax_tpl)
    assert softmax.get("scale_by_sqrt_dims", False) is pax["scale_sqrt_depth"]
    # Pax moves the probability to the other classes, the layer to all.
    others = lm.softmax_tpl.label_smoothing * (1 - 1 / lm.vocab_size)
    assert others == pytest.approx(pax["label_smoothing"])
    assert layer.norm_tpl.epsilon == pax["epsilon"]
    experts = REFERENCE[name].get("experts")
    if experts is not None:
        check_experts(name, first.feed_forward_tpl, experts)
    if experts is None or others:
        activation = layer.feed_forward_tpl.activation_tpl
        # Two names of x·sigmoid(x).
        assert target_of(activation).__name__ == pax["activation"].replace("Swish", "SiLU")
    inputs = experiment.datasets
    assert {each.percore_batch_size for each in inputs} == {data["percore_batch_size"]}
    # Later versions of Pax train on BoolQ, too.
    assert len(inputs) == data["splits"] + ("lm.boolq." in name)
    for each in inputs:
        lengths = getattr(each, "task_feature_lengths", None) or {"targets": each.seq_length}
        of_row = (length for feature, length in lengths.items() if feature != "wrong_targets")
        assert sum(of_row) == data["max_seq_len"]


def check_rates_and_caps(model: Config, pax: dict[str, Any]) -> None:
    lm = model.lm_tpl
    layer = (lm.stack_tpl.block_tpls or (lm.stack_tpl.layer_tpl,))[-1]
    is_repeated = "Repeated" in target_of(lm.stack_tpl).__name__
    assert model.fprop_dtype == pax["fprop_dtype"]
    branches = layer.attention_tpl, layer.feed_forward_tpl
    rates = [one.dropout_rate for one in (layer, *branches)]
    assert rates == [pax["dropout_prob"]] * 3
    of_layers, of_embeddings = (
        (pax["input_dropout_prob"], 0.0) if is_repeated else (0.0, pax["input_dropout_prob"])
    )
    assert (layer.input_dropout_rate, lm.dropout_rate) == (of_layers, of_embeddings)
    logit_cap = pax["atten_logit_cap"]
    assert layer.attention_tpl.logit_cap == (logit_cap if logit_cap > 0 else None)
    cap = pax["soft_cap_logits"]
    assert lm.softmax_tpl.logit_soft_cap == (abs(cap) if cap else None)


def check_experts(name: str, experts: Config, pax: dict[str, Any]) -> None:
    assert target_of(experts.activation_tpl).__name__ == pax["activation"]
    assert experts.num_experts == pax["num_experts"]
    assert experts.num_groups == NUM_GROUPS.get(name, pax["num_groups"])
    assert experts.use_gate is pax["use_gated_activation"]
    assert experts.capacity_factor == pax["unadjusted_expert_capacity_factor"]
    assert experts.load_balance_weight == pax["moe_load_balance_loss_weight"]
    assert experts.balance_per_group and not experts.router_z_weight
    assert experts.router_tpl.logit_cap == (pax["gating_logit_cap"] or None)


@EACH
def test_mesh_and_pipeline_are_those_of_pax(name: str):
    experiment, mesh = resolved(name), MESHES.get(name, REFERENCE[name]["mesh"])
    for kind, sizes in mesh.items() if name not in ANY_MESH else ():
        ours = getattr(experiment.partitioner, f"{kind}_mesh_shape", None)
        assert (ours or [1]) == (sizes or [1]) or (ours is None and set(sizes) == {1}), kind
    pipeline, stack = REFERENCE[name]["pipeline"], experiment.task.model.lm_tpl.stack_tpl
    assert hasattr(stack, "num_stages") is (pipeline is not None)
    if pipeline is not None:
        assert stack.num_stages == pipeline["num_pipeline_stages"]
        assert stack.circular_repeats == pipeline["circular_repeat"]
        number = NUM_MICROBATCHES.get(name, pipeline["num_pipeline_microbatches"])
        assert stack.num_microbatches == number
        size = MICROBATCH_SIZES.get(name, pipeline["pipeline_microbatch_size"])
        assert stack.microbatch_size == size


# Constants that are listed, because no field has their meaning.
NOT_TRANSLATED = {"adam PACKED_INPUT=False": ["PACKED_INPUT = False"]}


def packed_batch() -> NestedMap:
    """Return two rows of two documents each, of which the last four tokens are padding."""
    with np.load(RECORDS / "LmCloudSpmd.npz") as archive:
        tokens = archive["tokens"][0, :2].astype(np.int32)
    ids, place = tokens[:, :-1], np.tile(np.arange(tokens.shape[1] - 1, dtype=np.int32), (2, 1))
    second, padding = place >= 12, place >= 28
    return NestedMap(
        ids=ids,
        labels=tokens[:, 1:],
        weights=np.float32(~padding),
        segment_ids=np.where(padding, 0, 1 + second),
        segment_pos=place - 12 * second,
    )


def value_of(name: str, shape: list[int]) -> np.ndarray:
    """Return the values of a weight of Praxis, which follow from its name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return np.float32(0.2) * rng.standard_normal(shape, np.float32)


@pytest.mark.parametrize(
    "name",
    # Classes with further fields, which are named after a space, are left to the session slow.
    [pytest.param(n, marks=pytest.mark.slow) if " " in n else n for n in TRANSLATIONS],
)
def test_translated_class_is_what_paxml_builds(name: str):
    pax = TRANSLATIONS[name]
    (translation,), _ = translate_pax({"pax.py": pax["source"]}, read_tables())
    left = [each.text for each in translation.leftovers]
    assert left == NOT_TRANSLATED.get(name, [])
    if left:
        return
    module: dict[str, Any] = {"__name__": __name__}
    exec(module_text([translation]), module)
    task = resolve(module[translation.name]()).task
    check_learner(task.train.learner, pax)
    check_rates_and_caps(task.model, pax["model"])
    model = build(task.model)
    boxes = flatten_dict(
        jax.eval_shape(model.init_boxed, jax.random.key(0))["params"],
        sep="/",
        is_leaf=lambda _, leaf: is_box(leaf),
    )
    total = sum(math.prod(box.value.shape) * standard_deviation(box) for box in boxes.values())
    assert total == pytest.approx(pax["deviations"], rel=RELATIVE)
    theirs = {path: value_of(path, shape) for path, shape in pax["weights"].items()}
    params = {}
    for path, source in find_sources(boxes, theirs).items():
        shape = boxes[path].value.shape
        view = source.view(lambda weight: ts.array(theirs[weight]), shape)
        params[path] = view.read().result()
    metrics, *_ = model.apply({"params": unflatten_dict(params, sep="/")}, packed_batch())
    assert float(metrics["loss"].value) == pytest.approx(pax["loss"], abs=2e-6)
