"""Run one mode of the runner."""

from __future__ import annotations

import functools
from collections.abc import Callable

from layerkit.config.checks import require
from layerkit_runner.config.requests import ResolvedExperiment
from layerkit_runner.errors import UsageError
from layerkit_runner.run.job_errors import job_errors
from layerkit_runner.run_options import RunOptions


def run(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Run one job and return its exit code. Only the modules of this mode are imported."""
    from layerkit_runner.distributed.cluster import joined
    from layerkit_runner.distributed.devices import set_compiler_flags, set_gpu_memory_share
    from layerkit_runner.distributed.watchdog import watched

    set_compiler_flags(options)
    set_gpu_memory_share()
    run_mode: Callable[[ResolvedExperiment, RunOptions], int]
    if mode == "train":
        from layerkit_runner.run.training_run import run_train

        run_mode = run_train
    elif mode == "export":
        from layerkit_runner.run.export import run_export

        run_mode = run_export
    else:
        from layerkit_runner.run.inference import run_inference

        run_mode = functools.partial(run_inference, mode)
    # An export reports no progress during its long operations.
    timeout = None if mode == "export" else options.hung_step_timeout_secs
    with (
        joined(options) as process,
        watched(timeout, process=str(process.identity)),
        job_errors(mode, resolved, process),
    ):
        is_valid = mode != "export" or process.identity.num_processes <= 1
        expected = f"one process, not {process.identity.num_processes}"
        require(is_valid, None, "--mode", mode, expected, UsageError)
        return run_mode(resolved, options)
