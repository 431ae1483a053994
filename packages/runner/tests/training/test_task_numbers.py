"""Numbers that no run can want, set by their paths: each is refused when its part is built."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from layerkit.config import Config, Partial
from layerkit_runner import BaseExperiment, UsageError
from layerkit_runner.config.overrides import parse_override
from layerkit_runner.config.resolve import resolve
from layerkit_runner.optim import schedules
from layerkit_runner.optim.early_stopping import EarlyStopping
from layerkit_runner.optim.learner import AuxiliaryOptimizer, Learner
from layerkit_runner.optim.optimizers import adam_with_update_cap
from layerkit_runner.optim.weight_patterns import VariationalNoise
from layerkit_runner.partitioning import SpmdPartitioner
from layerkit_runner.trainer.job import build_parts
from layerkit_runner.training.train_hparams import TrainHParams

NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def experiment(tiny: SimpleNamespace) -> type[BaseExperiment]:
    class Numbers(BaseExperiment):
        def task(self) -> Config:
            auxiliary = AuxiliaryOptimizer.HParams.config(
                name="slow", weights=(".*/b",), optimizer=Partial(optax.sgd)
            )
            auxiliary.learning_rate = Config(
                schedules.linear_warmup_cosine_decay,
                0.1,
                warmup_steps=10,
                decay_start=10,
                decay_end=100,
            )
            learner = {
                "optimizer": Partial(adam_with_update_cap),
                "learning_rate": 0.1,
                "auxiliary_optimizers": [auxiliary],
            }
            return tiny.task_config(learner=learner).set(
                vn=VariationalNoise.HParams.config(scale=0.1),
                early_stopping=EarlyStopping.HParams.config(metric="heldout/loss"),
                loss_weights={"loss": 1.0},
            )

        def datasets(self) -> list[Config]:
            return []

        def partitioner(self) -> Config:
            return SpmdPartitioner.HParams.config()

    return Numbers


RATE = "must be a finite number from 0, or a schedule"
FINITE = "must be a finite number from 0"
OPTIMIZER = "task.train.learner.optimizer"
SCHEDULE = "task.train.learner.auxiliary_optimizers.0.learning_rate"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("task.train.learner.learning_rate", "nan", f"Learner.learning_rate=nan {RATE}"),
        ("task.train.learner.learning_rate", "inf", f"Learner.learning_rate=inf {RATE}"),
        ("task.train.learner.learning_rate", "-0.1", f"Learner.learning_rate=-0.1 {RATE}"),
        ("task.train.learner.learning_rate", "fast", f"Learner.learning_rate='fast' {RATE}"),
        (
            "task.train.learner.clip_global_norm",
            "-1",
            "Learner.clip_global_norm=-1.0 must be positive, or None for no clipping",
        ),
        (
            "task.train.learner.clip_per_tensor_norm",
            "nan",
            "Learner.clip_per_tensor_norm=nan must be positive, or None for no clipping",
        ),
        (
            "task.train.learner.skip_step_gradient_norm_value",
            "nan",
            "Learner.skip_step_gradient_norm_value=nan must be positive, or None for no such limit",
        ),
        (
            "task.train.learner.ema_decay",
            "nan",
            "Learner.ema_decay=nan must be between 0 and 1, such as 0.9999, or None for no averaged"
            " weights",
        ),
        (f"{OPTIMIZER}.b1", "1", "adam_with_update_cap: b1=1.0 must be from 0 to below 1"),
        (f"{OPTIMIZER}.b2", "nan", "adam_with_update_cap: b2=nan must be from 0 to below 1"),
        (f"{OPTIMIZER}.eps", "-1e-6", f"adam_with_update_cap: eps=-1e-06 {FINITE}"),
        (f"{OPTIMIZER}.weight_decay", "inf", f"adam_with_update_cap: weight_decay=inf {FINITE}"),
        (
            f"{OPTIMIZER}.update_rms_cap",
            "0",
            "adam_with_update_cap: update_rms_cap=0.0 must be positive, or None for no cap",
        ),
        (f"{SCHEDULE}.peak", "nan", f"schedule: peak=nan {FINITE}"),
        (f"{SCHEDULE}.peak", "-1", f"schedule: peak=-1.0 {FINITE}"),
        (f"{SCHEDULE}.min_ratio", "nan", "schedule: min_ratio=nan must be from 0 to 1"),
        (
            f"{SCHEDULE}.warmup_steps",
            "-1",
            "schedule: 0 <= warmup_steps=-1 <= decay_start=10 < decay_end=100 does not hold. A"
            " shorter run needs a shorter warmup, such as warmup_steps=10, decay_start=10.",
        ),
        (
            "task.train.random_seed",
            str(2**63),
            f"task.train.random_seed={2**63} must fit into 64 bits",
        ),
        ("task.train.num_train_steps", "0", "task.train.num_train_steps=0 must be at least 1"),
        (
            "task.train.gradient_accumulation_steps",
            "-2",
            "task.train.gradient_accumulation_steps=-2 must be at least 1",
        ),
        (
            "task.train.save_keep_interval_hours",
            "inf",
            "task.train.save_keep_interval_hours=inf must be more than 0 and at most 23999999999,"
            " or None",
        ),
        (
            "task.train.decode_start_after_n_steps",
            "-1",
            "task.train.decode_start_after_n_steps=-1 must be at least 0",
        ),
        ("task.loss_weights.loss", "nan", "task.loss_weights['loss']=nan must be a finite number"),
        ("task.summary_verbosity", "-1", "task.summary_verbosity=-1 must be at least 0"),
        (
            "task.vn.scale",
            "inf",
            "task.vn.scale=inf must be positive and finite; for no noise, vn=None",
        ),
        ("task.vn.start_step", "-1", "task.vn.start_step=-1 must be at least 0"),
        ("task.early_stopping.patience", "0", "task.early_stopping.patience=0 must be at least 1"),
        ("task.early_stopping.min_delta", "inf", f"task.early_stopping.min_delta=inf {FINITE}"),
    ],
)
def test_a_number_set_by_its_path_is_refused(
    experiment: type[BaseExperiment], path: str, text: str, message: str
):
    with pytest.raises(UsageError) as caught:
        build_parts(resolve(experiment(), [parse_override(path, text)]))
    assert str(caught.value).removeprefix(f"{__name__}.{experiment.__qualname__}: ") == message


def test_the_same_without_overrides_is_built(experiment: type[BaseExperiment]):
    build_parts(resolve(experiment()))


COSINE = {"warmup_steps": 10, "decay_start": 10, "decay_end": 100, "min_ratio": 0.1}
BEYOND = "must be at most 2147483647, the last step that a run counts"


# What no path can set, as the type of the field refuses it there, and the other schedules.
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: schedules.linear_warmup_exponential_decay(INFINITE, **COSINE),
            f"schedule: peak=inf {FINITE}",
        ),
        (
            lambda: schedules.linear_warmup_polynomial_decay(-1, **COSINE),
            f"schedule: peak=-1 {FINITE}",
        ),
        (
            lambda: schedules.linear_warmup_polynomial_decay(1, **COSINE, power=INFINITE),
            "schedule: power=inf must be above 0 and finite",
        ),
        (
            lambda: schedules.linear_warmup_cosine_decay(
                1, **{**COSINE, "decay_start": 2**31, "decay_end": 2**32}
            ),
            f"schedule: decay_start={2**31} {BEYOND}",
        ),
        (
            lambda: schedules.linear_warmup_sqrt_decay(NAN, warmup_steps=1),
            f"schedule: peak=nan {FINITE}",
        ),
        (
            lambda: schedules.linear_warmup_sqrt_decay(1, warmup_steps=NAN),  # type: ignore[arg-type]
            "schedule: warmup_steps=nan must be at least 1",
        ),
        (
            lambda: schedules.linear_warmup_sqrt_decay(1, warmup_steps=2**31),
            f"schedule: warmup_steps={2**31} {BEYOND}",
        ),
        (
            lambda: schedules.piecewise_constant(boundaries=[3], values=[1, NAN]),
            f"schedule: values[1]=nan {FINITE}",
        ),
        (
            lambda: schedules.piecewise_constant(boundaries=[2**31], values=[1, 2]),
            f"schedule: boundaries[0]={2**31} {BEYOND}",
        ),
        (
            lambda: schedules.cycle([optax.constant_schedule(1)], boundaries=[NAN]),  # type: ignore[list-item]
            "schedule: boundaries=(nan,) must rise from above 0",
        ),
        (
            lambda: schedules.transformer(warmup_steps=1, model_dims=8, scale=NAN),
            f"schedule: scale=nan {FINITE}",
        ),
        (
            lambda: VariationalNoise(scale=1, start_step=NAN),  # type: ignore[arg-type]
            "task.vn.start_step=nan must be at least 0",
        ),
        (
            lambda: EarlyStopping(metric="heldout/loss", patience=NAN),  # type: ignore[arg-type]
            "task.early_stopping.patience=nan must be at least 1",
        ),
        (
            lambda: TrainHParams(learner=None, eval_interval_steps=NAN),  # type: ignore[arg-type]
            "task.train.eval_interval_steps=nan must be at least 1",
        ),
        (
            lambda: TrainHParams(learner=None, save_keep_steps=[NAN]),  # type: ignore[list-item]
            "task.train.save_keep_steps=(nan,) must hold no negative step",
        ),
    ],
)
def test_a_number_given_in_python_is_refused(make: Callable[[], Any], message: str):
    with pytest.raises((UsageError, ValueError)) as caught:
        make()
    assert str(caught.value) == message


@pytest.mark.parametrize("rate", [0, 0.1, optax.constant_schedule(1.0)])
def test_rates_that_are_right_are_taken(rate: Any):
    assert Learner(optimizer=optax.sgd, learning_rate=rate).learning_rate is rate


@pytest.mark.parametrize("rate", [0, 1e-3, np.float32(1e-3), np.array(1e-3), jnp.bfloat16(1e-3)])
def test_numbers_of_any_kind_are_taken(rate: Any):
    adam_with_update_cap(learning_rate=rate, weight_decay=rate)
    AuxiliaryOptimizer(name="own", weights=["w"], optimizer=optax.adamw, learning_rate=rate)


@pytest.mark.parametrize("rate", [np.array(NAN), jnp.float32(-1), "0.1", np.ones(2)])
def test_rates_of_any_kind_are_looked_at(rate: Any):
    with pytest.raises(ValueError, match=r"learning_rate=.* must be a finite number from 0"):
        AuxiliaryOptimizer(name="own", weights=["w"], optimizer=optax.adamw, learning_rate=rate)


def test_numbers_that_only_a_step_knows_are_left_alone():
    optimizer = optax.inject_hyperparams(adam_with_update_cap)(learning_rate=0.1, b1=0.5)
    params = {"w": jnp.ones(2)}
    jax.jit(optimizer.update)(params, optimizer.init(params), params)
