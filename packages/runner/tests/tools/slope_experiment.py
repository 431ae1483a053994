"""A model of one weight, whose runs succeed, crash or take long, depending on its fields."""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, Partial
from layerkit.config.nested_map import NestedMap
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_runner import BaseExperiment
from layerkit_runner.optim.learner import Learner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams


class Slope(BaseExperiment):
    """½·(w·x − 3)² at x = 1 from w = 0: after n steps of SGD w = 3·(1 − (1 − rate)ⁿ)."""

    RATE: float = 0.1
    WIDTH: int = 1
    KIND: str = "plain"
    MAX_STEPS: int = 6
    BATCH_SIZE: int = 1
    # Reading of rows from FIRST_SLOW_ROW on takes so long.
    SECONDS_PER_ROW: float = 0.0
    FIRST_SLOW_ROW: int = 0
    # With a RATE of at least this, reading the data raises an error.
    CRASH_FROM: float | None = None
    # The process kills itself when it opens its data.
    KILL_AT_START: bool = False

    def task(self) -> Config:
        learner = Learner.HParams.config(optimizer=Partial(optax.sgd), learning_rate=self.RATE)
        train = TrainHParams.HParams.config(
            learner=learner,
            num_train_steps=self.MAX_STEPS,
            eval_interval_steps=2,
            save_interval_steps=2,
            summary_interval_steps=1,
        )
        return SingleTask.HParams.config(model=Line.HParams.config(), train=train)

    def datasets(self) -> list[Config]:
        if self.KILL_AT_START and "process.lock" in " ".join(sys.orig_argv):  # not in the sweep
            os.kill(os.getpid(), signal.SIGKILL)
        crashes = self.CRASH_FROM is not None and self.RATE >= self.CRASH_FROM
        return [
            Ones.HParams.config(
                name="train",
                is_training=True,
                batch_size=self.BATCH_SIZE,
                seconds_per_row=self.SECONDS_PER_ROW,
                first_slow_row=self.FIRST_SLOW_ROW,
                crashes=crashes,
            ),
            Ones.HParams.config(
                name="heldout", batch_size=self.BATCH_SIZE, num_rows=max(4, self.BATCH_SIZE)
            ),
        ]


class Line(BaseModel):
    """w·x."""

    def setup(self) -> None:
        self.create_variable("w", WeightHParams((), (), init=WeightInit.Constant(0.0)))

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        return self.theta.w * batch.x

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        errors = 0.5 * jnp.square(predictions - batch.y)
        return {"loss": WeightedScalar.of(jnp.mean(errors), 1.0)}, NestedMap()


class Ones(IndexedInput):
    """An input whose rows are all x = 1, y = 3."""

    seconds_per_row: float = 0.0
    first_slow_row: int = 0
    crashes: bool = False
    num_rows: int = 4

    def _num_rows(self) -> int:
        return 1_000_000 if self.is_training else self.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        if self.crashes:
            raise RuntimeError("the data are gone")
        if self.seconds_per_row and max(rows) >= self.first_slow_row:
            time.sleep(self.seconds_per_row)
        ones = np.ones(len(rows), np.float32)
        return NestedMap(x=ones, y=3 * ones)
