"""TrainHParams: length, seed, intervals, checkpoints and optimizer of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from layerkit.config import Conditions, Configurable, instance_field
from layerkit.config.checks import (
    check_choice,
    check_integers,
    check_positive,
    check_sizes,
    require,
)
from layerkit.config.hparams import check_fields
from layerkit_runner.optim.learner import Learner

_OWNER = "task.train"
_PRNG_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
_INTEGERS = ("int", "int | None")
# The other integers are at least 1.
_MAY_BE_ZERO = ("random_seed", "decode_random_seed", "decode_start_after_n_steps")


def summary_interval(num_train_steps: int) -> int:
    """Return the summary interval of a run in which nothing sets it: a hundredth, at most 100."""
    return max(1, min(100, num_train_steps // 100))


class TrainHParams(Configurable):
    """The settings of a training run.

    Attributes:
      learner: Optimizer, learning rate and clipping.
      num_train_steps: Number of steps after which training ends.
      random_seed: Seed of the weights and of all random numbers of the steps.
      prng_impl: Generator of the random numbers. The numbers of `threefry2x32` are the same on
        every mesh and device. `rbg` and `unsafe_rbg` are faster on accelerators, and their numbers
        depend on the device kind and mesh (see `jax.random.key`).
      summary_interval_steps: Number of steps between two reports of metrics; None for 100, or a
        hundredth of the steps of a shorter run.
      eval_interval_steps: Number of steps between two evaluations of held-out data; None evaluates
        at the end only.
      eval_at_end: True if held-out data are evaluated after the last step.
      eval_skip_train: True if evaluations leave out the training data; False also evaluates the
        next training batch, under the name `train`.
      decode_interval_steps: Number of steps between two decodings; None decodes at the end only.
      decode_start_after_n_steps: Number of steps before the first decoding. The last step is
        decoded even if it comes earlier.
      decode_random_seed: Seed of the random numbers of decoding, the same at every step, so that
        samples differ only by the weights. None uses different numbers at each step.
      save_interval_steps: Number of steps between two checkpoints.
      save_max_to_keep: Number of newest checkpoints to keep; None keeps all.
      save_keep_interval_hours: Number of hours between two checkpoints that are kept permanently;
        None disables this rule.
      save_keep_interval_steps: Number of steps between two checkpoints that are written and kept
        permanently; None disables this rule.
      save_keep_steps: Steps whose checkpoints are written and kept permanently.
      save_best_metric: Metric of an evaluation, as `DATASET/METRIC` such as `heldout/loss`, whose
        best checkpoints are kept until better ones exist; None disables this rule.
      save_best_mode: `min` if a lower value of that metric is better, `max` if a higher one is.
      save_best_to_keep: Number of best checkpoints to keep.
      save_step_zero: True if a checkpoint is written before the first step.
      max_inflight_steps: Number of steps that may be dispatched to the device before the host
        waits.
      max_consecutive_skipped_steps: Number of consecutive skipped steps after which training stops
        with exit code 65; None for no limit. Before the first valid step the limit is at most 10.
        A step is skipped if its loss or gradient is not finite, or its gradient is too large.
      max_skipped_steps_fraction: Largest fraction of skipped steps among all steps of a run. Beyond
        it training stops with exit code 65; None for no limit.
      max_rollbacks: Number of rollbacks of a run (`learner.on_spike`, `learner.on_nonfinite`). The
        next one stops training with exit code 65; None for no limit.
      gradient_accumulation_steps: Number of microbatches that a batch is divided into. Their
        gradients are accumulated before the update. This takes less memory, and the update equals
        that of the whole batch up to rounding, except for losses that balance experts, statistics
        of BatchNorm and capacities of experts.
      exact_aux_losses: True if losses that balance experts are also those of the whole batch with
        several microbatches, at the cost of one more forward pass. False averages the losses of the
        microbatches. Groups of a fixed number (`num_groups`) are always those of a microbatch.
      eval_use_ema_states: True if evaluation uses the averaged weights (`learner.ema_decay`).
      decode_use_ema_states: True if decoding uses the averaged weights.
      variable_norm_summary: True if `learning/var_norm`, the norm of the trained weights before the
        step, is reported.
      weight_summary_interval_steps: Number of steps between two reports of the norm and histogram
        of every weight; None for no reports.
      profiler_capture_step: First of the steps that are traced into DIR/profile; None traces none,
        except after the signal SIGUSR2.
      profiler_num_steps: Number of steps of a trace.
      profiler_max_num_hosts: Number of processes that are traced, from process 0 on; None for all.
    """

    learner: Annotated[Any, Learner] = instance_field(Learner)
    num_train_steps: int = 10_000_000
    random_seed: int = 1234
    prng_impl: str = "threefry2x32"
    summary_interval_steps: int | None = None
    eval_interval_steps: int | None = 100
    eval_at_end: bool = True
    eval_skip_train: bool = True
    decode_interval_steps: int | None = None
    decode_start_after_n_steps: int = 0
    decode_random_seed: int | None = None
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
    max_skipped_steps_fraction: float | None = 0.5
    max_rollbacks: int | None = 10
    gradient_accumulation_steps: int = 1
    exact_aux_losses: bool = False
    eval_use_ema_states: bool = False
    decode_use_ema_states: bool = False
    variable_norm_summary: bool = True
    weight_summary_interval_steps: int | None = None
    profiler_capture_step: int | None = None
    profiler_num_steps: int = 3
    profiler_max_num_hosts: int | None = 1

    used_only_if: ClassVar[Conditions] = {
        "save_best_mode": "save_best_metric",
        "save_best_to_keep": "save_best_metric",
    }

    @property
    def steps_per_summary(self) -> int:
        """Number of steps between two reports of metrics."""
        every = self.summary_interval_steps
        return summary_interval(self.num_train_steps) if every is None else every

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self, owner=_OWNER)
        counts = (f.name for f in dataclasses.fields(TrainHParams) if f.type in _INTEGERS)
        sizes = {name: getattr(self, name) for name in counts if name not in _MAY_BE_ZERO}
        check_sizes(_OWNER, **sizes)
        steps = {f"save_keep_steps[{i}]": step for i, step in enumerate(self.save_keep_steps)}
        steps["decode_start_after_n_steps"] = self.decode_start_after_n_steps
        check_integers(_OWNER, minimum=0, **steps)
        for name in ("random_seed", "decode_random_seed"):
            seed = getattr(self, name) or 0
            require(-(2**63) <= seed < 2**63, _OWNER, name, seed, "a signed 64-bit integer")
        check_positive(_OWNER, save_keep_interval_hours=self.save_keep_interval_hours)
        fraction = self.max_skipped_steps_fraction or 0
        require(
            0 <= fraction <= 1, _OWNER, "max_skipped_steps_fraction", fraction, "0 to 1, or None"
        )
        limit, half = self.max_consecutive_skipped_steps, self.learner.spike_window // 2
        # Only then does a level that lasts empty the window before it ends the run.
        is_above = self.learner.on_spike != "skip" or limit is None or limit > half
        expected = f"more than {half}, half of learner.spike_window, or None"
        require(is_above, _OWNER, "max_consecutive_skipped_steps", limit, expected)
        check_choice(_OWNER, _PRNG_IMPLS, prng_impl=self.prng_impl)
        check_choice(_OWNER, ("min", "max"), save_best_mode=self.save_best_mode)
        for name in ("eval_use_ema_states", "decode_use_ema_states"):
            averages = getattr(self, name)
            expected = "False unless learner.ema_decay is set, such as to 0.9999"
            is_kept = not averages or self.learner.ema_decay is not None
            require(is_kept, _OWNER, name, averages, expected)
