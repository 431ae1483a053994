"""TrainHParams: how a task is trained, and how often it is evaluated, decoded and saved."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from layerkit.config import Configurable, instance_field
from layerkit.near_names import near_names
from layerkit_runner.optim.learner import Learner

_PRNG_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
_AT_LEAST_ONE = (
    "num_train_steps",
    "summary_interval_steps",
    "eval_interval_steps",
    "decode_interval_steps",
    "save_interval_steps",
    "save_max_to_keep",
    "save_keep_interval_steps",
    "save_best_to_keep",
    "max_inflight_steps",
    "max_consecutive_skipped_steps",
    "gradient_accumulation_steps",
    "weight_summary_interval_steps",
    "profiler_capture_step",
    "profiler_num_steps",
    "profiler_max_num_hosts",
)
_MOST_HOURS = datetime.timedelta.max // datetime.timedelta(hours=1)


class TrainHParams(Configurable):
    """How a task is trained.

    Attributes:
      learner: Optimizer, learning rate and clipping.
      num_train_steps: Where training ends.
      random_seed: Of the weights and of all random numbers of the steps.
      prng_impl: Generator of those numbers: `threefry2x32`, whose numbers are the same on every
        mesh and device; `rbg` or `unsafe_rbg`, which accelerators draw faster, and other numbers
        on another kind of device or mesh (see `jax.random.key`).
      summary_interval_steps: How often metrics are written.
      eval_interval_steps: How often held-out data are evaluated; None only at the end.
      eval_at_end: Whether held-out data are evaluated after the last step.
      eval_skip_train: Whether evaluations leave out the training data; False evaluates the next
        training batch as well, under the name `train`.
      decode_interval_steps: How often decode data are run; None only at the end.
      decode_start_after_n_steps: Before so many steps nothing is decoded.
      save_interval_steps: How often a checkpoint is written.
      save_max_to_keep: Newest checkpoints that are kept; None keeps all.
      save_keep_interval_hours: Besides those, one checkpoint per so many hours stays for good;
        None keeps none besides.
      save_keep_interval_steps: Checkpoints of the multiples of this step count are written and stay
        for good; None keeps none besides.
      save_keep_steps: Checkpoints of these steps are written and stay for good.
      save_best_metric: Checkpoints that are best by this metric of an evaluation, written
        `DATASET/METRIC` as in `heldout/loss`, stay until better ones come; None keeps none besides.
      save_best_mode: `min` if a lower value of that metric is better, `max` if a higher one is.
      save_best_to_keep: How many of the best stay.
      save_step_zero: Whether a checkpoint is written before the first step.
      max_inflight_steps: Steps that may be under way on the device before the host waits.
      max_consecutive_skipped_steps: How many steps in a row may be skipped, because loss or
        gradient is not finite or the gradient is too large, before training stops with exit code
        65. Before any step was valid the limit is 10 at most. None for no limit.
      gradient_accumulation_steps: Into how many microbatches a batch is divided, whose gradients
        are added up one after another before the one update; less memory, the same numbers.
      eval_use_ema_states: Whether evaluation uses the averaged weights (`learner.ema_decay`).
      decode_use_ema_states: Whether decoding does.
      variable_norm_summary: Whether `learning/var_norm` is reported, the norm of the trained
        weights before the step.
      weight_summary_interval_steps: How often a norm and a histogram of every weight are written;
        None never.
      profiler_capture_step: The first of the steps that are traced into DIR/profile; None traces
        none, unless the signal SIGUSR2 asks for it.
      profiler_num_steps: How many steps a trace takes.
      profiler_max_num_hosts: Processes that take part in it, from process 0 on; None for all.

    Raises:
      ValueError: a number out of range, or fields that contradict each other.
    """

    learner: Any = instance_field(Learner)
    num_train_steps: int = 10_000_000
    random_seed: int = 1234
    prng_impl: str = "threefry2x32"
    summary_interval_steps: int = 100
    eval_interval_steps: int | None = 100
    eval_at_end: bool = True
    eval_skip_train: bool = True
    decode_interval_steps: int | None = None
    decode_start_after_n_steps: int = 0
    save_interval_steps: int = 5000
    save_max_to_keep: int | None = 10
    save_keep_interval_hours: float | None = None
    save_keep_interval_steps: int | None = None
    save_keep_steps: Sequence[int] = ()
    save_best_metric: str | None = None
    save_best_mode: str = "min"
    save_best_to_keep: int = 1
    save_step_zero: bool = False
    max_inflight_steps: int = 2
    max_consecutive_skipped_steps: int | None = 100
    gradient_accumulation_steps: int = 1
    eval_use_ema_states: bool = False
    decode_use_ema_states: bool = False
    variable_norm_summary: bool = True
    weight_summary_interval_steps: int | None = None
    profiler_capture_step: int | None = None
    profiler_num_steps: int = 3
    profiler_max_num_hosts: int | None = 1

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.prng_impl not in _PRNG_IMPLS:
            raise ValueError(
                f"task.train.prng_impl={self.prng_impl!r} must be one of {', '.join(_PRNG_IMPLS)}"
                f"{near_names(self.prng_impl, _PRNG_IMPLS)}"
            )
        for name in ("eval_use_ema_states", "decode_use_ema_states"):
            if getattr(self, name) and self.learner.ema_decay is None:
                raise ValueError(
                    f"task.train.{name}=True needs averaged weights; set"
                    " task.train.learner.ema_decay, such as 0.9999"
                )
        self._check_best()

    def _check_numbers(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and not value >= 1:  # nor is NaN
                raise ValueError(f"task.train.{name}={value} must be at least 1")
        if not -(2**63) <= self.random_seed < 2**63:
            raise ValueError(f"task.train.random_seed={self.random_seed} must fit into 64 bits")
        hours = self.save_keep_interval_hours
        if hours is not None and not 0 < hours <= _MOST_HOURS:
            raise ValueError(
                f"task.train.save_keep_interval_hours={hours} must be more than 0 and at most"
                f" {_MOST_HOURS}, or None"
            )
        if not self.decode_start_after_n_steps >= 0:
            raise ValueError(
                f"task.train.decode_start_after_n_steps={self.decode_start_after_n_steps} must be"
                " at least 0"
            )
        if not all(step >= 0 for step in self.save_keep_steps):
            raise ValueError(
                f"task.train.save_keep_steps={tuple(self.save_keep_steps)} must hold no negative"
                " step"
            )

    def _check_best(self) -> None:
        if self.save_best_mode not in ("min", "max"):
            raise ValueError(
                f"task.train.save_best_mode={self.save_best_mode!r} must be 'min' or 'max'"
            )
        if self.save_best_metric is None:
            for name, default in (("save_best_mode", "min"), ("save_best_to_keep", 1)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"task.train.{name}={getattr(self, name)!r} tells nothing without a metric;"
                        " set task.train.save_best_metric, such as 'heldout/loss'"
                    )
