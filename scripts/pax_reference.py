"""Record weights, settings and runs of paxml 1.4.0 for the experiments that this repository names.

Runs under Python 3.10 with paxml 1.4.0 and without this repository's packages (`nox -s
pax_reference`):

    python scripts/pax_reference.py weights FOLDER
    python scripts/pax_reference.py runs FOLDER

`weights` writes FOLDER/weights.json: for each experiment its weights by abstract initialization
(name, layers, shape, initializer, standard deviation by the rule of Praxis) and its settings of
training. Experiments of later versions come from `later_pax.py`. `runs` trains a reduced form of
one experiment of each kind by paxml's own training step, and writes FOLDER/NAME.npz: initial
weights, batches, losses, rates and gradient norms.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# Two devices, for pmap.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_layer, pax_fiddle, py_utils
from praxis.layers import models
from sentencepiece import SentencePieceTrainer

ROOT = Path(__file__).resolve().parent.parent
CATALOGUE = ROOT / "packages/experiments/src/layerkit_experiments/catalogue.json"
# Modules of paxml, by those of this repository.
MODULES = {
    "lm.lm_cloud": "paxml.tasks.lm.params.lm_cloud",
    "lm.c4": "paxml.tasks.lm.params.c4",
    "lm.c4_multislice": "paxml.tasks.lm.params.c4_multislice",
    "lm.optimal_scaling": "paxml.tasks.lm.params.optimal_scaling",
    "lm.bert": "paxml.tasks.lm.params.bert",
    "lm.nvidia": "paxml.tasks.lm.params.nvidia",
    "lm.boolq": "paxml.contrib.gpu.scripts_gpu.configs",
    "lm.pile": "paxml.contrib.gpu.scripts_gpu.configs",
}
# Steps at which learning rates are compared: within the warmups, in the decays, and after them.
STEPS = (0, 1, 50, 115, 265, 266, 636, 1000, 4000, 4001, 60_000, 200_000, 300_000, 600_000)
# Rows of the abstract batch; a multiple of every number of microbatches.
ROWS = 768


def install_contrib() -> None:
    """Provide what paxml's experiments for GPUs import and no weight depends on.

    These are a LanguageModel with more metrics, which no wheel contains, and writers of data sets.
    """
    for data in ("tfds_lambada", "tfds_pile"):
        name = f"paxml.contrib.gpu.scripts_gpu.{data}"
        sys.modules.setdefault(name, types.ModuleType(name))
    # The modules of the data sets encode a few words when they are imported.
    vocabulary = io.BytesIO()
    words = ["yes no true false"] * 20
    SentencePieceTrainer.train(  # The smallest vocabulary that holds the letters and answers.
        sentence_iterator=iter(words),
        model_writer=vocabulary,
        vocab_size=14,
        user_defined_symbols=["yes", "no"],
        minloglevel=2,
    )
    file = Path(tempfile.mkdtemp()) / "vocab.model"
    file.write_bytes(vocabulary.getvalue())
    os.environ["VOCAB_PATH"] = str(file)
    name = "praxis.contrib.gpu.scripts_gpu.models"
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(parts[end - 1]))

    class CustomMetricsLM(models.LanguageModel):
        eval_task: str | None = None
        boolq_yn_tokens: Any = None

    sys.modules[name].CustomMetricsLM = CustomMetricsLM


def experiments() -> dict[str, type]:
    """Return the classes of paxml, and of later versions, by the names of this repository."""
    result = {name: find_class(name) for name in json.loads(CATALOGUE.read_text())}
    return {name: cls for name, cls in result.items() if cls is not None}


def find_class(name: str) -> type | None:
    """Return the class of paxml, or of a later version, that has a name of this repository."""
    from later_pax import EXPERIMENTS

    module, _, cls = name.rpartition(".")
    if module not in MODULES:
        return None
    later = {each.__name__: each for each in EXPERIMENTS}
    return getattr(importlib.import_module(MODULES[module]), cls, later.get(cls))


def batch_specs(rows: int, length: int) -> py_utils.NestedMap:
    """Return the shapes and dtypes of a packed batch."""
    dtypes = {
        **dict.fromkeys(("ids", "labels", "segment_ids", "segment_pos"), jnp.int32),
        **dict.fromkeys(("weights", "paddings"), jnp.float32),
    }
    return py_utils.NestedMap(
        {name: jax.ShapeDtypeStruct((rows, length), dtype) for name, dtype in dtypes.items()}
    )


def standard_deviation(weight: base_layer.WeightHParams) -> float:
    """Return the standard deviation of the values that `base_layer.init_var` draws."""
    method, scale = weight.init.method, weight.init.scale
    if method == "constant":
        return 0.0
    if method == "gaussian":
        return scale
    if method == "uniform":
        return scale / math.sqrt(3.0)
    if method == "xavier":
        fan_in, fan_out = base_layer.get_fan_in_fan_out(
            weight.shape, weight.fan_in_axes, weight.fan_out_axes
        )
        # Uniform on ±limit.
        return scale * math.sqrt(6.0 / (fan_in + fan_out)) / math.sqrt(3.0)
    raise NotImplementedError(f"no rule for the initializer {method!r}")


def weights_of(model: base_layer.BaseLayer, length: int) -> tuple[int, list[list[Any]]]:
    """Return the number of weights, and a row for each: see `write_weights`."""
    batch = batch_specs(ROWS, length)
    batch.eval_sample_weights = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    declared = model.abstract_init_with_metadata(batch)["params"]
    rows: dict[tuple[Any, ...], list[str]] = {}
    total, layers = 0, set()
    for name, weight in py_utils.NestedMap.FromNestedDict(declared).FlattenItems():
        total += math.prod(weight.full_shape)
        name = name.replace(".", "/")
        layers.update(re.findall(r"x_layers_\d+", name))
        key = (
            re.sub(r"x_layers_\d+", "x_layers_*", name),
            tuple(weight.repeat_prefix or ()),
            tuple(weight.shape),
            weight.init.method,
            weight.init.scale,
            standard_deviation(weight),
        )
        rows.setdefault(key, []).append(name)
    result: list[list[Any]] = []
    for (name, *rest), names in rows.items():
        if "*" in name and len(names) < len(layers):  # as experts in every second layer
            result.extend([each, 1, *rest] for each in names)
        else:
            result.append([name, len(names), *rest])
    return total, result


def task_on_its_mesh(experiment: Any) -> Any:
    """Return the task with the schedule of the number of devices of its mesh."""
    devices = devices_of(experiment) or jax.device_count()
    with mock.patch.object(jax, "device_count", return_value=devices):
        return experiment.task()


def length_of(experiment: Any) -> int:
    """Return the length of a row; that of MLPerf's rows of BERT, which are stored."""
    return getattr(experiment, "MAX_SEQ_LEN", 512)


def devices_of(experiment: Any) -> int | None:
    """Return the number of devices of the mesh; None for all devices."""
    ici = getattr(experiment, "ICI_MESH_SHAPE", None) or getattr(experiment, "MESH_SHAPE", None)
    dcn = getattr(experiment, "DCN_MESH_SHAPE", None) or [1]
    return None if ici is None else math.prod(ici) * math.prod(dcn)


def settings_of(experiment: Any, task: Any) -> dict[str, Any]:
    """Return the settings of training, with the defaults of paxml filled in."""
    train, learner = task.train, task.train.learner
    optimizer = learner.optimizer
    schedule = pax_fiddle.instantiate(optimizer.lr_schedule)
    lm = task.model.lm_tpl
    stack = lm.stacked_transformer_tpl
    pipeline = None
    if hasattr(stack, "pipeline_stage"):
        pipeline, stack = stack, stack.pipeline_stage
    stack = getattr(stack, "block", stack)
    layer = stack.transformer_layer_params_tpl
    return {
        "train": {
            name: getattr(train, name)
            for name in (
                *("num_train_steps", "save_interval_steps", "save_max_to_keep"),
                *("summary_interval_steps", "eval_interval_steps", "random_seed"),
            )
        },
        "learner": {
            name: getattr(learner, name)
            for name in (
                *("check_valid_step", "enable_skip_step_on_gradient_anomalies"),
                "skip_step_gradient_norm_value",
            )
        },
        "optimizer": {
            "class": fdl.get_callable(optimizer).__name__,
            **{
                name: getattr(optimizer, name)
                for name in (
                    *("beta1", "beta2", "epsilon", "weight_decay", "clip_threshold"),
                    *("clip_gradient_norm_to_value", "decay_method", "decay_adam"),
                )
                if hasattr(optimizer, name)
            },
        },
        "learning_rates": {
            str(step): optimizer.learning_rate * float(schedule.value_at(step)) for step in STEPS
        },
        "model": {
            "fprop_dtype": jnp.dtype(task.model.fprop_dtype or jnp.float32).name,
            "dropout_prob": stack.dropout_prob,
            "input_dropout_prob": stack.input_dropout_prob,
            "atten_logit_cap": layer.tr_atten_tpl.atten_logit_cap,
            "soft_cap_logits": lm.softmax_tpl.soft_cap_logits,
            "scale_sqrt_depth": getattr(lm.softmax_tpl, "scale_sqrt_depth", False),
            "epsilon": layer.ln_tpl.epsilon,
            "activation": fdl.get_callable(layer.tr_fflayer_tpl.activation_tpl).__name__,
            "label_smoothing": getattr(task.model, "label_smoothing_prob", None) or 0.0,
        },
        **({"experts": experts_of(stack)} if stack.moe_layers else {}),
        "mesh": {
            "ici": task.model.ici_mesh_shape,
            "dcn": task.model.dcn_mesh_shape,
        },
        "pipeline": pipeline
        and {
            name: getattr(pipeline, name)
            for name in (
                *("num_pipeline_stages", "circular_repeat"),
                *("num_pipeline_microbatches", "pipeline_microbatch_size"),
            )
        },
        "data": {
            "percore_batch_size": experiment.PERCORE_BATCH_SIZE,
            "max_seq_len": length_of(experiment),
            "splits": len(experiment.datasets()),
        },
    }


def experts_of(stack: Any) -> dict[str, Any]:
    """Return the settings of the experts of a stack."""
    experts = stack.moe_layer_tpl
    return {
        "activation": fdl.get_callable(experts.activation_tpl).__name__,
        "num_experts": stack.num_experts,
        "num_groups": stack.num_groups,
        **{
            name: getattr(experts, name)
            for name in (
                *("use_gated_activation", "unadjusted_expert_capacity_factor"),
                *("moe_load_balance_loss_weight", "gating_logit_cap"),
            )
        },
    }


def write_weights(folder: Path) -> None:
    """Write a JSON object by names of experiments, with one line for each weight.

    A weight is [name, number of layers with a weight of their own, sizes of axes over layers,
    shape, initializer, its scale, standard deviation]; `*` is the index of a layer.
    """
    entries = []
    for name, cls in experiments().items():
        experiment = cls()
        task = task_on_its_mesh(experiment)
        model = pax_fiddle.instantiate(task.model)
        total, rows = weights_of(model, length_of(experiment))
        entry = {"pax": f"{cls.__module__}.{cls.__name__}", "num_weights": total}
        lines = [f'  "{key}": {json.dumps(value)},' for key, value in entry.items()]
        for key, value in settings_of(experiment, task).items():
            lines.append(f'  "{key}": {json.dumps(value)},')
        lines.append('  "weights": [')
        lines.append(",\n".join(f"   {json.dumps(row)}" for row in rows))
        entries.append("\n".join([f' "{name}": {{', *lines, "  ]\n }"]))
        print(f"{total:>19,} {name}", flush=True)
    (folder / "weights.json").write_text("{\n" + ",\n".join(entries) + "\n}\n")


_EXPERTS = {"NUM_EXPERTS": 4, "NUM_GROUPS": 8}
# Reduced forms: class, fields besides those of SMALL, and whether pmap runs them.
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "LmCloudSpmd": ("lm_cloud.LmCloudSpmdTest", {}, False),
    "LmCloudTransformerAdam": ("lm_cloud.LmCloudTransformerAdamLimitSteps", {}, True),
    "C4SpmdPipelineGpt3": (
        "c4.C4SpmdPipelineGpt3SmallAdam8Replicas",
        {"NUM_LAYERS": 4, "MICROBATCH_SIZE": 4, "TRAINABLE_PE_MAX_SEQ_LEN": 48},
        False,
    ),
    "GLaM64B64EProxy": ("nvidia.GLaM64B64EProxy", {"NUM_LAYERS": 4, **_EXPERTS}, False),
    "Grok_Proxy": (
        "nvidia.Grok_Proxy",
        {"NUM_HEADS": 4, "NUM_KV_HEADS": 2, "DIMS_PER_HEAD": 8, **_EXPERTS},
        False,
    ),
}
SMALL = {
    "NUM_LAYERS": 2,
    "MODEL_DIMS": 32,
    "HIDDEN_DIMS": 64,
    "NUM_HEADS": 2,
    "DIMS_PER_HEAD": 16,
    "VOCAB_SIZE": 64,
    "MAX_SEQ_LEN": 32,
    "FPROP_DTYPE": jnp.float32,
    "LEARNING_RATE": 1e-2,
}
NUM_STEPS, BATCH_SIZE, NUM_SEEDS = 60, 8, 3


def small_task(cls: type, fields: dict[str, Any]) -> Any:
    """Return the task of a reduced experiment, with a schedule that fits into the run."""
    task = type(cls.__name__, (cls,), {**SMALL, **fields})().task()
    task.summary_verbosity = 3  # NVIDIA's experiments report no rates and norms.
    schedule = task.train.learner.optimizer.lr_schedule
    schedule.warmup_steps, schedule.decay_start, schedule.decay_end = 5, 6, 200
    return pax_fiddle.instantiate(task)


def draw_tokens() -> np.ndarray:
    """Return tokens uint8 `[steps, batch, length + 1]`, of which nine in ten follow a cycle."""
    rng = np.random.default_rng(0)
    vocab = SMALL["VOCAB_SIZE"]
    successor = np.empty(vocab, np.uint8)
    order = rng.permutation(vocab)
    successor[order] = np.roll(order, -1)
    tokens = rng.integers(0, vocab, (NUM_STEPS, BATCH_SIZE, SMALL["MAX_SEQ_LEN"] + 1), np.uint8)
    follows = rng.random(tokens.shape) < 0.9
    for place in range(1, tokens.shape[-1]):
        next_token = successor[tokens[..., place - 1]]
        tokens[..., place] = np.where(follows[..., place], next_token, tokens[..., place])
    return tokens


def batch_of(tokens: np.ndarray) -> py_utils.NestedMap:
    """Return the batch of tokens `[batch, length + 1]`, without padding, one document per row."""
    ids = tokens[:, :-1].astype(np.int32)
    return py_utils.NestedMap(
        ids=ids,
        labels=tokens[:, 1:].astype(np.int32),
        weights=np.ones(ids.shape, np.float32),
        paddings=np.zeros(ids.shape, np.float32),
        segment_ids=np.ones(ids.shape, np.int32),
        segment_pos=np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1)),
    )


def train(task: Any, seeds: range, *, is_pmap: bool) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    """Yield, for each seed, the initial weights and the numbers of all steps."""
    from paxml import trainer_lib

    devices = jax.local_device_count() if is_pmap else 1
    specs = batch_specs(BATCH_SIZE // devices, SMALL["MAX_SEQ_LEN"])
    declared = task.model.abstract_init_with_metadata(specs)

    def step(state: Any, key: Any, batch: Any) -> Any:
        state, output = trainer_lib.train_step_single_learner(
            task, state, key, batch, jnp.float32, declared
        )
        return state, (output.loss, output.summary_tensors)

    run = jax.pmap(step, axis_name=base_layer.PMAP_PARALLEL_AXIS_NAME) if is_pmap else jax.jit(step)
    names = {"learning_rate": "lr", "gradient_norm": "raw_grad_norm"}
    for seed in seeds:
        state, _ = trainer_lib.initialize_model_state(
            task, jax.random.PRNGKey(seed), specs, do_init_checkpoint_rules=False
        )
        initial = jax.tree.map(np.asarray, state.mdl_vars["params"])
        key = jax.random.PRNGKey(100 + seed)
        if is_pmap:
            state, key = trainer_lib.replicate_model_state(state), jax.random.split(key, devices)
        numbers: dict[str, list[Any]] = {"loss": [], **{name: [] for name in names}}
        for tokens in draw_tokens():
            batch = batch_of(tokens)
            if is_pmap:
                batch = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), batch)
            state, (loss, summaries) = run(state, key, batch)
            numbers["loss"].append(np.ravel(loss)[0])
            for name, theirs in names.items():
                value = summaries[f"learning/{theirs}_aggregate_scalar"]
                numbers[name].append(np.ravel(value)[0])
        yield initial, {name: np.array(values) for name, values in numbers.items()}


def with_heads(key: str, weight: np.ndarray, run: str, fields: dict[str, Any]) -> np.ndarray:
    """Return a projection of GLaM, whose heads Praxis merges, as Praxis stores those of others."""
    if run != "GLaM64B64EProxy" or ".self_attention." not in key or not key.endswith(".w"):
        return weight
    layers, heads = len(weight), fields.get("NUM_HEADS", SMALL["NUM_HEADS"])
    if ".post." in key:
        weight = weight.reshape(layers, heads, -1, weight.shape[-1])
        return weight.transpose(0, 3, 1, 2)
    return weight.reshape(*weight.shape[:2], heads, -1)


def write_runs(folder: Path) -> None:
    """Write NAME.npz for each reduced experiment.

    An archive holds `tokens`, the weights of the first seed as `params/PATH`, and the numbers of
    its steps; `last_losses` has the mean loss of the last ten steps for each seed.
    """
    for name, (path, fields, is_pmap) in RUNS.items():
        task = small_task(find_class(f"lm.{path}"), fields)
        runs = list(train(task, range(NUM_SEEDS), is_pmap=is_pmap))
        initial, numbers = runs[0]
        weights = py_utils.NestedMap.FromNestedDict(initial).FlattenItems()
        last = np.array([steps["loss"][-10:].mean() for _, steps in runs])
        np.savez_compressed(
            folder / f"{name}.npz",
            tokens=draw_tokens(),
            last_losses=last,
            **numbers,
            **{
                f"params/{key.replace('.', '/')}": with_heads(key, value, name, fields)
                for key, value in weights
            },
        )
        print(f"{name}: loss {numbers['loss'][0]:.4f} to {numbers['loss'][-1]:.4f}, {last}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    install_contrib()
    command, target = sys.argv[1:]
    {"weights": write_weights, "runs": write_runs}[command](Path(target))
