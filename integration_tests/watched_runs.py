"""Experiments for subprocesses, with early stopping, custom metrics and several programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from layerkit.config import Config, assigned_fields
from layerkit.config.nested_map import NestedMap
from layerkit.models import LanguageModel
from layerkit_experiments.lm.lm_cloud import LmCloudSpmdTest
from layerkit_inputs.synthetic.random_tokens import SyntheticInput
from layerkit_runner.optim.early_stopping import StoppingRule
from layerkit_runner.run.programs.train_program import TrainProgram
from layerkit_runner.step.task_metrics import Max, Mean


class Told(StoppingRule):
    """A rule that is true on process 0 only, to test that all processes agree."""

    at_step: int

    def should_stop(self, metrics: Mapping[str, float], step: int) -> bool:
        assert "train/loss" in metrics
        return jax.process_index() == 0 and step >= self.at_step


class Reporting(LanguageModel):
    """A language model that reports its ids as a histogram and as images."""

    def compute_predictions(self, batch: NestedMap) -> Any:
        ids = batch.ids.astype(jnp.float32)
        self.add_summary("ids", ids, kind="histogram")
        self.add_summary("picture", ids[:, None, :, None] / 256, kind="image")
        return super().compute_predictions(batch)


class Watched(LmCloudSpmdTest):
    """An experiment that evaluates its training batches and stops early."""

    NUM_LAYERS = 1
    MODEL_DIMS = 16
    HIDDEN_DIMS = 32
    NUM_HEADS = 2
    VOCAB_SIZE = 64
    MAX_SEQ_LEN = 16
    FPROP_DTYPE = "float32"
    EVAL_INTERVAL_STEPS = 1
    STOP_AT: int = 3

    def task(self) -> Config:
        task = super().task()
        task.model = Reporting.HParams.config(lm_tpl=task.model.lm_tpl)
        task.train.eval_skip_train = False
        task.early_stopping = Told.HParams.config(at_step=self.STOP_AT)
        task.metrics = {
            "mean_xent": Mean.HParams.config(
                value="outputs/per_token_xent", weight="batch/weights"
            ),
            "worst_xent": Max.HParams.config(
                value="outputs/per_token_xent", weight="batch/weights"
            ),
        }
        return task


class TakingTurns(Watched):
    """An experiment that alternates two steps on short rows with one step on longer rows."""

    MAX_STEPS = 8
    STOP_AT = 100
    CHECKPOINT_EVERY_N_STEPS = 2

    def task(self) -> Config:
        task = super().task()
        task.early_stopping = None
        task.metrics = None
        return task

    def datasets(self) -> list[Config]:
        short, *_ = super().datasets()
        long = short.clone().set(name="long", seq_length=2 * self.MAX_SEQ_LEN)
        return [short.set(name="short"), long]

    def train_programs(self) -> list[Config]:
        return [
            Config(TrainProgram, dataset="short", steps=2),
            Config(TrainProgram, dataset="long"),
        ]


class BadLabels(TakingTurns):
    """An experiment that fails after consecutive skipped steps; see `SyntheticWithBadLabels`."""

    MAX_SKIPPED: int = 2

    def task(self) -> Config:
        task = super().task()
        task.train.max_consecutive_skipped_steps = self.MAX_SKIPPED
        return task

    def datasets(self) -> list[Config]:
        short, long = super().datasets()
        return [SyntheticWithBadLabels.HParams.config(**assigned_fields(short)), long]


class SyntheticWithBadLabels(SyntheticInput):
    """An input with one label outside the vocabulary on the last host, from the third batch on."""

    def get_next(self) -> NestedMap:
        batch = super().get_next()
        is_last_host = self.infeed_host_index == self.num_infeed_hosts - 1
        if is_last_host and self._num_delivered >= 2:
            batch.labels = batch.labels.copy()
            batch.labels[-1, 0] = 10**6
        return batch
