"""Write the checkpoints of Paxml that the tests of `init_from.pax` read.

Run in an environment of Python 3.10 with Paxml:

    pip install paxml==1.4.0 jaxlib==0.4.26 'scipy<1.13'
    JAX_PLATFORMS=cpu python scripts/record_pax_checkpoints.py \
        packages/runner/tests/init_from/pax/recorded [CASE …]

Small models of Paxml's own experiment classes train for a few steps and are saved by Paxml in each
of its formats. `training.json` has the token ids of every batch, and the losses of the steps after
the save.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from paxml import checkpoints, trainer_lib
from paxml.tasks.lm import model_params
from paxml.tasks.lm.params import lm_cloud
from praxis import base_hyperparams, optimizers, pax_fiddle, py_utils
from praxis.layers import multi_query_attention

BATCH, LENGTH, VOCAB = 4, 8, 32
STEPS_BEFORE, STEPS_AFTER = 6, 20


class Stacked(lm_cloud.LmCloudSpmd):
    """Two layers in one scan."""

    NUM_LAYERS = 2
    MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, DIMS_PER_HEAD = 8, 16, 2, 4
    VOCAB_SIZE, MAX_SEQ_LEN = VOCAB, LENGTH
    FPROP_DTYPE = jnp.float32
    ICI_MESH_SHAPE: ClassVar = [1, 1, 1]
    USE_REPEATED_LAYER = True


class Unstacked(Stacked):
    """Two layers with weights of their own."""

    USE_REPEATED_LAYER = False


class StackedAdafactor(Stacked):
    """Two layers in one scan, with ShardedAdafactor."""

    USE_ADAFACTOR = True


class UnstackedAdafactor(StackedAdafactor):
    """Two layers with weights of their own, with ShardedAdafactor."""

    USE_REPEATED_LAYER = False


class PrimerMultiQuery(Stacked):
    """Two layers with norms on both sides of a branch, and one head of keys and values."""

    def task(self):
        """Return the task with other norms and attention."""
        task = super().task()
        layer = task.model.lm_tpl.stacked_transformer_tpl.block.transformer_layer_params_tpl
        layer.norm_policy = "primer_hybrid"
        layer.tr_atten_tpl = pax_fiddle.Config(
            multi_query_attention.MultiQueryDotProductAttention,
            use_bias=True,
            atten_logit_cap=50.0,
        )
        return task


class Pipelined(lm_cloud.LmCloudSpmdPipeline):
    """Four layers in two stages."""

    NUM_LAYERS, NUM_STAGES, MICROBATCH_SIZE = 4, 2, 2
    MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, DIMS_PER_HEAD = 8, 16, 2, 4
    VOCAB_SIZE, MAX_SEQ_LEN = VOCAB, LENGTH
    FPROP_DTYPE = jnp.float32
    ICI_MESH_SHAPE: ClassVar = [2, 1, 1, 1]


# (experiment, format of the file, type of the checkpoint in Paxml, whether it uses OCDBT)
CASES = {
    "stacked_zarr": (Stacked, "gda", False),
    "stacked_ocdbt": (Stacked, "gda", True),
    "unstacked_flax": (Unstacked, "flax", False),
    "primer_multi_query_ocdbt": (PrimerMultiQuery, "gda", True),
    "pipelined_zarr": (Pipelined, "gda", False),
    "adafactor_stacked_ocdbt": (StackedAdafactor, "gda", True),
    "adafactor_unstacked_flax": (UnstackedAdafactor, "flax", False),
}


def record(directory: Path, names: Sequence[str]) -> None:
    """Train the models of the cases, and write their checkpoints and losses into a folder."""
    ids = np.random.default_rng(20).integers(
        1, VOCAB, (STEPS_BEFORE + STEPS_AFTER, BATCH, LENGTH + 1)
    )
    file = directory / "training.json"
    losses = json.loads(file.read_text())["losses"] if file.exists() else {}
    for name in names or CASES:
        experiment, kind, use_ocdbt = CASES[name]
        losses[name] = _train(
            experiment(), ids, directory / f"{name}.zip", kind=kind, use_ocdbt=use_ocdbt
        )
    text = {"ids": ids.tolist(), "steps_before": STEPS_BEFORE, "losses": losses}
    file.write_text(json.dumps(text) + "\n")


def _train(experiment, ids, path: Path, *, kind: str, use_ocdbt: bool) -> list[float]:
    task_config = experiment.task()
    # Large steps, so that a state that was not restored gives other losses.
    model_params.set_default_adam(
        task_config, 0.02, 1e-3, warmup_steps=8, decay_start=12, decay_end=40
    )
    if getattr(experiment, "USE_ADAFACTOR", False):
        _use_adafactor(task_config.train.learner)
    task_config.train.learner.repeat_prefix_sep = "_"
    task = base_hyperparams.instantiate(task_config)
    first = _batch(ids[0])
    metadata = trainer_lib.create_train_state_metadata(task, first)
    names = task_config.model.mesh_axis_names
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape((1,) * len(names)), names)
    with mesh:
        state, _ = trainer_lib.initialize_model_state(task, jax.random.PRNGKey(0), first)

        @jax.jit
        def step(state, batch):
            state, output = trainer_lib.train_step_single_learner(
                task,
                state,
                jax.random.PRNGKey(7),
                batch,
                fprop_dtype=jnp.float32,
                var_weight_hparams=metadata.var_weight_hparams,
            )
            return state, output.loss

        losses = []
        for number, tokens in enumerate(ids):
            if number == STEPS_BEFORE:
                _save(state, metadata, path, kind=kind, use_ocdbt=use_ocdbt)
            state, loss = step(state, _batch(tokens))
            losses.append(float(loss))
    return losses[STEPS_BEFORE:]


def _use_adafactor(learner) -> None:
    """Replace Adam by the optimizer of Pax's BertSpmd and of NVIDIA's large models."""
    learner.optimizer = pax_fiddle.Config(
        optimizers.ShardedAdafactor,
        decay_method="adam",
        decay_adam=0.99,
        beta1=0.9,
        weight_decay=1e-3,
        clip_gradient_norm_to_value=learner.optimizer.clip_gradient_norm_to_value,
        learning_rate=learner.optimizer.learning_rate,
        lr_schedule=learner.optimizer.lr_schedule,
    )


def _batch(tokens: np.ndarray) -> py_utils.NestedMap:
    shape = (BATCH, LENGTH)
    return py_utils.NestedMap(
        ids=jnp.array(tokens[:, :-1], jnp.int32),
        labels=jnp.array(tokens[:, 1:], jnp.int32),
        paddings=jnp.zeros(shape),
        weights=jnp.ones(shape),
        segment_ids=jnp.ones(shape, jnp.int32),
        segment_pos=jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (BATCH, 1)),
    )


def _save(state, metadata, path: Path, *, kind: str, use_ocdbt: bool) -> None:
    """Save a state by Paxml, and put its files into a zip archive without dates."""
    with tempfile.TemporaryDirectory() as made:
        checkpoints.save_checkpoint(
            state,
            f"{made}/checkpoints",
            checkpoint_type=checkpoints.CheckpointType(kind),
            train_state_unpadded_shape_dtype_struct=metadata.unpadded_global_shapes,
            tensorstore_use_ocdbt=use_ocdbt,
        )
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(Path(made).rglob("*")):
                if file.is_file():
                    entry = zipfile.ZipInfo(str(file.relative_to(made)))
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(entry, file.read_bytes())


if __name__ == "__main__":
    flags.FLAGS(sys.argv[:1])
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    record(folder, sys.argv[2:])
