"""Record what paxml 1.4.0 builds from experiment classes that `translate pax` translates.

Runs under Python 3.10 with paxml 1.4.0 and without this repository's packages (`nox -s
pax_reference`):

    python scripts/pax_translations.py FOLDER

The script writes FOLDER/translations.json: for each class its source, the loss of fixed weights,
the sum of the initial standard deviations of all weights, and the settings of training; and
FOLDER/base_classes.json: the constants of paxml's base classes.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pax_reference as reference
from praxis import base_layer, pax_fiddle, py_utils

HEAD = """
import jax.numpy as jnp
from paxml.tasks.lm import model_params
from paxml.tasks.lm.params import c4, lm_cloud
from praxis import layers
"""
SIZES = {"NUM_LAYERS": 2, "MODEL_DIMS": 32, "HIDDEN_DIMS": 64, "NUM_HEADS": 2, "DIMS_PER_HEAD": 16}
SIZES |= {"VOCAB_SIZE": 64, "MAX_SEQ_LEN": 32, "PERCORE_BATCH_SIZE": 2}
MESH = {"ICI_MESH_SHAPE": [1, 1, 1], "FPROP_DTYPE": "jnp.float32"}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("c4.TransformerLmSpmdAdam, lm_cloud.SyntheticDataset", {**SIZES, **MESH}),
    "adafactor": (
        "model_params.TransformerLmSpmdAdafactor, lm_cloud.SyntheticDataset",
        {**SIZES, **MESH},
    ),
    "cloud": ("lm_cloud.LmCloudSpmd", {**SIZES, **MESH}),
    "c4": ("c4.C4SpmdAdam", {**SIZES, **MESH}),
    "pipeline": (
        "c4.TransformerLmSpmdPipelineAdam, lm_cloud.SyntheticDataset",
        {
            **SIZES,
            **MESH,
            "NUM_STAGES": 2,
            "MICROBATCH_SIZE": 1,
            "ICI_MESH_SHAPE": [2, 1, 1, 1],
        },
    ),
    "pmap": (
        "model_params.TransformerLmPmapAdam, lm_cloud.SyntheticDataset",
        {key: value for key, value in SIZES.items() if key != "DIMS_PER_HEAD"},
    ),
}
COSINE = "'linear_rampup_cosine_decay'"
# Base classes that `translate.yml` describes.
DESCRIBED = (
    *("TransformerLmSpmdAdafactor", "TransformerLmPmapAdam", "TransformerLmSpmdAdam"),
    *("TransformerLmSpmdPipelineAdafactor", "TransformerLmSpmdPipelineAdam"),
    *("C4UnsupervisedDataset", "PileUnsupervisedDataset", "LambadaDataset", "SyntheticDataset"),
    *("C4SpmdAdam", "LmCloudSpmd", "LmCloudSpmdAdam"),
)
# Base, and the constants of the class besides those of its base.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((base, {}) for base in BASES),
    ("adam", {"USE_ROTARY_POSITION_EMB": True}),
    ("adam", {"TRAINABLE_POSITION_EMB": True, "TRAINABLE_PE_MAX_SEQ_LEN": 48}),
    (
        "cloud",
        {
            "TRAINABLE_POSITION_EMB": True,
            "USE_ROTARY_POSITION_EMB": True,
            "TRAINABLE_PE_MAX_SEQ_LEN": 32,
        },
    ),
    ("adam", {"USE_GATED_ACTIVATION": True, "ACTIVATION_CLS": "layers.SiLU", "USE_BIAS": True}),
    ("adam", {"ACTIVATION_CLS": "layers.GELU", "COMBINE_QKV": False, "USE_BIAS": True}),
    ("adam", {"ATTEN_LOGIT_CAP": -1.0, "SOFTMAX_CAP_LOGITS": -1.0}),
    ("adam", {"ATTEN_LOGIT_CAP": 0.5, "SOFTMAX_CAP_LOGITS": 0.0}),
    ("adam", {"DROPOUT_PROB": 0.1, "USE_REPEATED_LAYER": True}),
    ("adam", {"DROPOUT_PROB": 0.1, "INPUT_DROPOUT_PROB": 0.2}),
    ("adam", {"CLIP_GRADIENT_NORM_TO_VALUE": 0.0, "WEIGHT_DECAY": 0.0}),
    ("adam", {"CLIP_GRADIENT_NORM_TO_VALUE": 2.0, "ADAM_CLIP_THRESHOLD": 0.0, "ADAM_BETA1": 0.0}),
    ("adam", {"ADAM_BETA2": 0.0, "ADAM_EPSILON": 0.0, "ADAM_CLIP_THRESHOLD": -1.0}),
    ("adam", {"LR_SCHEDULE": COSINE, "ADAM_CLIP_THRESHOLD": -1.0, "LR_COS_WARMUP": 10}),
    ("adam", {"DECAY_END": 500, "LR_LRED_DECAY_END": 5000, "LR_COS_DECAY_END": 50}),
    ("adam", {"INIT_STD": 0.5, "LAYERNORM_EPSILON": 0.5}),
    ("adam", {"PACKED_INPUT": False}),
    ("adafactor", {"USE_BIAS": True, "DECAY_END": 5000, "CLIP_GRADIENT_NORM_TO_VALUE": 0.0}),
    ("adafactor", {"LR_SCHEDULE": COSINE, "ADAM_BETA2": 0.5, "WEIGHT_DECAY": 0.5}),
    ("cloud", {"CLIP_GRADIENT_NORM_TO_VALUE": 1.0, "DECAY_END": 5000, "ADAM_BETA1": 0.5}),
    ("adam", {"COMBINE_QKV": False, "DCN_MESH_SHAPE": [1, 1, 1], "LR_LRED_MIN_RATIO": 0.5}),
    ("pipeline", {"USE_BIAS": True, "USE_ROTARY_POSITION_EMB": True}),
    ("pmap", {"DROPOUT_PROB": 0.1, "INPUT_DROPOUT_PROB": 0.2, "DECAY_END": 5000}),
    (
        "pmap",
        {"DROPOUT_PROB": 0.1, "INPUT_DROPOUT_PROB": 0.2, "USE_REPEATED_LAYER": True},
    ),
    ("pmap", {"SOFTMAX_CAP_LOGITS": 0.5, "FPROP_DTYPE": "jnp.bfloat16", "DIMS_PER_HEAD": 8}),
    ("pmap", {"COMBINE_QKV": True, "USE_ROTARY_POSITION_EMB": True, "USE_BIAS": True}),
    ("pmap", {"CLIP_GRADIENT_NORM_TO_VALUE": 1.0, "ADAM_EPSILON": 0.5, "NORM_POLICY": "'post'"}),
)


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return values that follow from the name of a weight."""
    return np.float32(0.2) * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
        shape, np.float32
    )


def packed_batch() -> py_utils.NestedMap:
    """Return two rows of two documents each, of which the last four tokens are padding."""
    length = SIZES["MAX_SEQ_LEN"]
    batch = reference.batch_of(reference.draw_tokens()[0, :2])
    second = np.arange(length) >= 12
    padding = np.arange(length) >= length - 4
    batch.segment_ids[:] = np.where(padding, 0, 1 + second)
    batch.segment_pos[:] = np.arange(length) - 12 * second
    batch.weights[:], batch.paddings[:] = 1.0 - padding, padding
    return batch


def loss_of(task: Any) -> tuple[float, dict[str, tuple[int, ...]]]:
    """Return the loss of the packed batch with the values of `draw`, and the shapes of those."""
    model = pax_fiddle.instantiate(task.model)
    batch = packed_batch()
    declared = model.abstract_init_with_metadata(batch)["params"]
    items = py_utils.NestedMap.FromNestedDict(declared).FlattenItems()
    weights, shapes = py_utils.NestedMap(), {}
    for name, weight in items:
        path, shape = name.replace(".", "/"), (*(weight.repeat_prefix or ()), *weight.shape)
        weights.Set(name, draw(path, shape))
        shapes[path] = shape
    context = base_layer.JaxContext.HParams(do_eval=True, summary_verbosity=0)
    with base_layer.JaxContext.new_context(hparams=context):
        predictions = model.apply({"params": weights}, batch, method=model.compute_predictions)
        metrics, _ = model.apply({"params": weights}, predictions, batch, method=model.compute_loss)
    return float(metrics["total_loss"][0]), shapes


def sum_of_deviations(task: Any) -> float:
    """Return the sum of the initial standard deviations of all weights, times their sizes."""
    _, rows = reference.weights_of(pax_fiddle.instantiate(task.model), SIZES["MAX_SEQ_LEN"])
    return sum(
        copies * math.prod(prefix) * math.prod(shape) * std
        for _, copies, prefix, shape, _, _, std in rows
    )


def record(base: str, constants: dict[str, Any]) -> dict[str, Any]:
    """Return the source of a class, and what paxml builds from it."""
    bases, fields = BASES[base]
    body = "\n".join(f"  {key} = {value}" for key, value in {**fields, **constants}.items())
    source = f"{HEAD}\nclass Mine({bases}):\n{body}\n"
    module: dict[str, Any] = {}
    exec(source, module)
    experiment = module["Mine"]()
    task = experiment.task()
    settings = reference.settings_of(experiment, task)
    loss, shapes = loss_of(task)
    kept = ("learner", "optimizer", "learning_rates", "model")
    return {
        "source": source,
        "loss": loss,
        "weights": shapes,
        "deviations": sum_of_deviations(task),
        **{key: settings[key] for key in kept},
    }


def constants_of(cls: type) -> dict[str, str]:
    """Return the text of each constant; that of a class or of a member of an enum is its name."""
    values = {key: getattr(cls, key) for key in sorted(dir(cls)) if key.isupper()}
    return {
        key: getattr(value, "__name__", getattr(value, "name", str(value)))
        for key, value in values.items()
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    reference.install_contrib()
    from paxml.contrib.gpu.scripts_gpu import tasks
    from paxml.tasks.lm import model_params
    from paxml.tasks.lm.params import c4, lm_cloud

    modules = (model_params, c4, lm_cloud, tasks)
    classes = {
        name: constants_of(value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and name in DESCRIBED
    }
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(classes[name])}" for name in DESCRIBED)
    Path(sys.argv[1], "base_classes.json").write_text("{\n" + text + "\n}\n")
    cases = {}
    for base, constants in CASES:
        name = " ".join([base, *(f"{key}={value}" for key, value in constants.items())])
        cases[name] = record(base, constants)
        print(f"{cases[name]['loss']:.6f} {name}", flush=True)
    lines = [f" {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items()]
    Path(sys.argv[1], "translations.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
