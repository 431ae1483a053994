"""What `runner` does once the command line is understood: one function per mode."""

from __future__ import annotations

from typing import Any

from layerkit_runner.errors import UsageError
from layerkit_runner.flags import RunOptions
from layerkit_runner.resolve import ResolvedExperiment


def run(mode: str, resolved: ResolvedExperiment, options: RunOptions) -> int:
    """Runs one job and returns its exit code.

    Each mode imports what it needs, so that planning does not wait for what only training uses.
    """
    if mode == "plan":
        from layerkit_runner.plan.plan_mode import run_plan

        return run_plan(resolved, options)
    if options.job_log_dir is None:
        raise UsageError(f"--mode={mode} needs --job_log_dir=DIR")
    if mode == "train":
        from layerkit_runner.train_mode import run_train

        return run_train(resolved, options)
    from layerkit_runner.inference_modes import run_decode_once, run_eval

    modes: dict[str, Any] = {"eval": run_eval, "decode_once": run_decode_once}
    return modes[mode](resolved, options)
