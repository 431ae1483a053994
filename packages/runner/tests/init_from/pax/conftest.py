"""Checkpoints that Paxml wrote, and runs with the models that it trained.

`scripts/record_pax_checkpoints.py` wrote the folder `recorded`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from layerkit.config import Config, Partial
from layerkit.config.nested_map import NestedMap
from layerkit.layers import (
    GELU,
    PositionalEmbedding,
    StackedTransformer,
    StackedTransformerRepeated,
)
from layerkit.layers.transformer.pipelined_transformer import PipelinedTransformer
from layerkit.models import LanguageModel
from layerkit_runner.init_from import InitFrom, Source, plan_first_state
from layerkit_runner.init_from.pax.paxml_folders import find, open_arrays
from layerkit_runner.optim.learner import Learner
from layerkit_runner.optim.optimizers import adam_with_update_cap
from layerkit_runner.optim.schedules import linear_warmup_exponential_decay
from layerkit_runner.partitioning import Partitioner, SpmdPartitioner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams
from layerkit_runner.step.train_state import FirstState

RECORDED = Path(__file__).parent / "recorded"
VOCAB, LENGTH = 32, 8
STACKS = {
    "stacked": StackedTransformerRepeated.HParams.config(),
    "unstacked": StackedTransformer.HParams.config(),
    "pipelined": PipelinedTransformer.HParams.config(num_stages=2, microbatch_size=2),
}
# Reads the whole state of an optimizer and its step.
WHOLE_STATE = {"opt_state_rules": [(r".*", r"\g<0>")], "load_step": True}


def model(stack: str, *, num_layers: int) -> Any:
    """The decoder of Pax's lm_cloud, with its biases and scales."""
    config = LanguageModel.HParams.config()
    lm = config.lm_tpl
    lm.set(
        vocab_size=VOCAB,
        model_dims=8,
        hidden_dims=16,
        num_layers=num_layers,
        num_heads=2,
        dim_per_head=4,
        stack_tpl=STACKS[stack].clone(),
        position_tpl=PositionalEmbedding.HParams.config(),
    )
    lm.softmax_tpl.set(logit_soft_cap=30.0, scale_by_sqrt_dims=True, use_bias=True)
    layer = lm.stack_tpl.layer_tpl
    layer.attention_tpl.set(logit_cap=50.0, per_dim_scale=True)
    layer.feed_forward_tpl.set(activation_tpl=GELU.HParams.config(), has_bias=True)
    return config


def run_of(
    stack: str,
    *,
    num_layers: int = 2,
    mesh: tuple[int, int, int] = (1, 1, 1),
    edit: Mapping[str, Any] | None = None,
    optimizer: Config | None = None,
    draw: Sequence[str] = (),
    **source: Any,
) -> tuple[Partitioner, SingleTask]:
    """A started partitioner, and a task with Pax's learner that starts from a source.

    `edit` sets fields of the model by their path; `optimizer` replaces Adam.
    """
    config = model(stack, num_layers=num_layers)
    for path, value in (edit or {}).items():
        *parents, field = path.split(".")
        setattr(functools.reduce(getattr, parents, config), field, value)
    learner = Learner.HParams.config(
        optimizer=optimizer or Partial(adam_with_update_cap, b2=0.99, weight_decay=1e-3),
        learning_rate=Config(
            linear_warmup_exponential_decay,
            0.02,
            warmup_steps=8,
            decay_start=12,
            decay_end=40,
            min_ratio=0.1,
        ),
        clip_global_norm=5.0,
    )
    task = SingleTask.HParams.config(
        model=config, train=TrainHParams.HParams.config(learner=learner)
    ).Instantiate()
    task.initial_weights = InitFrom(sources=[Source(**source)], draw=draw)
    partitioner = SpmdPartitioner(ici_mesh_shape=list(mesh))
    partitioner.start(jax.devices()[: int(np.prod(mesh))])
    partitioner.bind(task)
    return partitioner, task


@dataclasses.dataclass(frozen=True)
class Pax:
    """The recorded checkpoints and what Paxml trained after them.

    Attributes:
      folder: Folder of the unpacked checkpoints, one for each case.
      losses: Losses of the steps after each checkpoint.
      ids: Token ids of these steps, `[steps, batch, length + 1]`.
      step: Step of the checkpoints.
      whole_state: Fields of a `Source` that also read the optimizer and the step.
    """

    folder: Path
    losses: dict[str, list[float]]
    ids: np.ndarray
    step: int
    whole_state: dict[str, Any]

    def array(self, case: str, name: str) -> np.ndarray:
        """An array of a recorded checkpoint, by its name."""
        _, step_folder = find(epath.Path(self.folder / case)).choose(None)
        arrays = open_arrays(step_folder)
        return arrays.read(name, arrays.by_name[name])

    def plan(self, case: str, stack: str = "stacked", **options: Any) -> Callable[[], FirstState]:
        """Plan the first state of a run that starts from a checkpoint; see `run_of`."""
        return plan_first_state(*run_of(stack, folder=str(self.folder / case), **options))

    def train(self, stack: str, **options: Any) -> list[float]:
        """The losses of as many steps as Paxml took."""
        partitioner, task = run_of(stack, **options)
        state = plan_first_state(partitioner, task)().state
        step = partitioner.train_step_fn(task)
        losses = []
        for tokens in self.ids:
            state, (metrics, *_) = step(state, partitioner.put_batch(batch_of(tokens)))
            losses.append(float(metrics["loss"].value))
        return losses


def batch_of(tokens: np.ndarray) -> NestedMap:
    shape = tokens[:, 1:].shape
    return NestedMap(
        ids=jnp.asarray(tokens[:, :-1], jnp.int32),
        labels=jnp.asarray(tokens[:, 1:], jnp.int32),
        weights=jnp.ones(shape),
    )


@pytest.fixture(scope="session")
def pax(tmp_path_factory: pytest.TempPathFactory) -> Pax:
    folder = tmp_path_factory.mktemp("pax")
    for path in RECORDED.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder / path.stem)
    text = json.loads((RECORDED / "training.json").read_text())
    step = text["steps_before"]
    return Pax(folder, text["losses"], np.array(text["ids"])[step:], step, WHOLE_STATE)
