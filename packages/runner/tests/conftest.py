"""A regression model whose results can be computed by hand, with its inputs and task config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.base.base_layer import BaseLayer
from layerkit.base.base_model import BaseModel, Metrics, WeightedScalar
from layerkit.base.weights import WeightHParams, WeightInit
from layerkit.config import Config, Partial, sub_config_field
from layerkit.config.nested_map import NestedMap
from layerkit.layers.basic.elementwise import Dropout
from layerkit.layers.basic.linears import Linear
from layerkit_inputs.base.indexed_input import IndexedInput
from layerkit_runner.optim.learner import Learner
from layerkit_runner.step.task import SingleTask
from layerkit_runner.step.train_hparams import TrainHParams


class Regression(BaseModel):
    """A model with the weighted loss ½·(x·w − y)² and the auxiliary loss `aux` · mean((x·w)²)."""

    dims: int = 2
    aux: float = 0.0
    dropout_rate: float = 0.0
    linear_tpl: Any = sub_config_field(Linear.HParams)
    counts: bool = False
    init_scale: float = 1.0

    def setup(self) -> None:
        init = WeightInit.Constant(self.init_scale)
        self.create_child(
            "linear", self.linear_tpl, input_dims=self.dims, output_dims=1, weight_init=init
        )
        self.create_child("dropout", Dropout.HParams.config(rate=self.dropout_rate))
        if self.counts:
            self.create_child("counter", Counter.HParams.config())

    def compute_predictions(self, batch: NestedMap) -> jax.Array:
        predicted = self.linear(self.dropout(batch.x))[:, 0]
        if self.aux:
            self.add_aux_loss("square", self.aux * jnp.mean(jnp.square(predicted)))
        if self.counts and self.is_training:
            self.counter(batch.x)
        self.add_summary("mean_prediction", jnp.mean(predicted))
        return predicted

    def compute_loss(self, predictions: jax.Array, batch: NestedMap) -> tuple[Metrics, NestedMap]:
        errors = 0.5 * jnp.square(predictions - batch.y)
        weight = jnp.sum(batch.weights)
        loss = jnp.sum(errors * batch.weights) / jnp.maximum(weight, 1e-9)
        metrics = {"loss": WeightedScalar.of(loss, weight)}
        return metrics, NestedMap(errors=errors, scores=-errors)

    def decode(self, batch: NestedMap) -> NestedMap:
        """Append the first id of each prompt three times."""
        width = batch.ids.shape[1] + 3
        lengths = batch.prompt_lengths + 3
        first = jnp.broadcast_to(batch.ids[:, :1], (batch.ids.shape[0], width))
        padded = jnp.pad(batch.ids, ((0, 0), (0, 3)))
        column = jnp.arange(width)
        ids = jnp.where(column < batch.prompt_lengths[:, None], padded, first)
        ids = jnp.where(column < lengths[:, None], ids, 0)
        return NestedMap(ids=ids, lengths=lengths, log_probs=jnp.full((ids.shape[0], 3), -0.5))


class Counter(BaseLayer):
    """A moving statistic: the running sum of the batch means of the first column."""

    def setup(self) -> None:
        self.create_variable(
            "sum", WeightHParams((), (), init=WeightInit.Constant(0.0)), trainable=False
        )

    def fprop(self, x: jax.Array) -> None:
        self.update_var("sum", self.get_var("sum") + jnp.mean(x[:, 0]))


class Points(IndexedInput):
    """An input whose row n is x = (n mod 5, 1), y = n mod 3, weight 1. x is NaN in bad rows.

    Reading the row `unreadable_row` raises `error`. A batch with the row `wide_row` has a wider x.
    """

    num_rows: int = 7
    bad_rows: Sequence[int] = ()
    unreadable_row: int | None = None
    error: type[Exception] = OSError
    wide_row: int | None = None

    def _num_rows(self) -> int:
        return self.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        if self.unreadable_row in rows:
            raise self.error(f"row {self.unreadable_row}")
        x = np.stack([rows % 5, np.ones_like(rows)], axis=1).astype(np.float32)
        x[np.isin(rows, self.bad_rows)] = np.nan
        x = np.repeat(x, 2, axis=1) if self.wide_row in rows else x
        y = (rows % 3).astype(np.float32)
        return NestedMap(x=x, y=y, weights=np.ones(len(rows), np.float32))


class Prompts(IndexedInput):
    """An input whose prompt n is the id n + 1, repeated n + 1 times."""

    num_rows: int = 3

    def _num_rows(self) -> int:
        return self.num_rows

    def _read_rows(self, rows: np.ndarray) -> NestedMap:
        lengths = (rows + 1).astype(np.int32)
        valid = np.arange(3) < lengths[:, None]
        return NestedMap(
            ids=np.where(valid, rows[:, None] + 1, 0).astype(np.int32), prompt_lengths=lengths
        )

    def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
        return ["".join(str(i) for i in row[:n]) for row, n in zip(ids, lengths, strict=True)]


def task_config(*, learner: dict[str, Any] | None = None, train: Any = None, **model: Any) -> Any:
    """Return the config of a task that trains a Regression, by default by SGD with rate 1."""
    settings = {"optimizer": Partial(optax.sgd), "learning_rate": 1.0, **(learner or {})}
    return SingleTask.HParams.config(
        model=Regression.HParams.config(**model),
        train=TrainHParams.HParams.config(
            learner=Learner.HParams.config(**settings), **(train or {})
        ),
    )


@pytest.fixture(autouse=True)
def without_matplotlib(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide matplotlib, since a loss curve takes longer to draw than the tiny model to train."""
    if "matplotlib" not in request.fixturenames:
        # The module is found without its package once it was imported.
        for name in ("matplotlib", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def matplotlib() -> None:
    """Leave matplotlib importable in this test."""
    pytest.importorskip("matplotlib")


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """Return `task_config` and the classes of this file, which tests cannot import."""
    return SimpleNamespace(
        task_config=task_config,
        Regression=Regression,
        Points=Points,
        Prompts=Prompts,
        Config=Config,
    )
