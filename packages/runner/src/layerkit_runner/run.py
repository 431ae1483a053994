"""What `runner` does once the command line is understood: one function per mode."""

from __future__ import annotations

from collections.abc import Callable

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
    from layerkit.layers.attention.backends import BackendRefusal
    from layerkit_runner import checkpoints, export_mode, inference_modes, train_mode
    from layerkit_runner.processes import joined

    modes: dict[str, Callable[[ResolvedExperiment, RunOptions], int]] = {
        "train": train_mode.run_train,
        "eval": inference_modes.run_eval,
        "decode_once": inference_modes.run_decode_once,
        "export": export_mode.run_export,
    }
    with joined(options):
        try:
            return modes[mode](resolved, options)
        except (
            BackendRefusal,
            checkpoints.LayoutVersionError,
            checkpoints.NewerManifestError,
            checkpoints.ProcessCountError,
        ) as error:
            raise UsageError(f"{resolved.name}: {error}") from error
