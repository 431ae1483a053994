"""What `runner` does once the command line is understood: one function per mode."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from layerkit_runner.command_line.flag_table import FOLLOWING_MODES, ONCE_MODES
from layerkit_runner.command_line.flags import RunOptions
from layerkit_runner.configuration.resolve import ResolvedExperiment
from layerkit_runner.errors import StorageError, UsageError

if TYPE_CHECKING:
    from layerkit_runner.processes.distributed import JoinedProcess

_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


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
    from layerkit_runner import checkpoints
    from layerkit_runner.modes import export as export_mode
    from layerkit_runner.modes import inference as inference_modes
    from layerkit_runner.modes import train as train_mode
    from layerkit_runner.processes.distributed import joined
    from layerkit_runner.xla_flags import (
        check_no_automatic_profile,
        set_compiler_flags,
        set_gpu_memory_share,
    )

    if mode == "train":
        check_no_automatic_profile()
    set_compiler_flags(options)
    set_gpu_memory_share()
    infer = inference_modes.run_inference
    modes: dict[str, Callable[[ResolvedExperiment, RunOptions], int]] = {
        "train": train_mode.run_train,
        **{name: functools.partial(infer, name) for name in (*FOLLOWING_MODES, *ONCE_MODES)},
        "export": export_mode.run_export,
    }
    with joined(options) as process, _watched(process, mode):
        try:
            return modes[mode](resolved, options)
        except (
            BackendRefusal,
            checkpoints.LayoutVersionError,
            checkpoints.NewerManifestError,
            checkpoints.ProcessCountError,
        ) as error:
            raise UsageError(f"{resolved.name}: {error}") from error
        except checkpoints.SaveTimeoutError as error:
            # Its threads may never end, and the interpreter would wait for them.
            print(f"runner: {error}", file=sys.stderr, flush=True)
            process.tell_failure(str(error))
            os._exit(StorageError.exit_code)
        except OSError as error:
            if isinstance(error, checkpoints.SaveError) or error.errno in _FULL_OR_READ_ONLY:
                raise StorageError(str(error)) from error
            raise


def _watched(process: JoinedProcess, mode: str) -> contextlib.AbstractContextManager[None]:
    from layerkit_runner.processes.watchdog import watched

    # An export is a few long strokes, which say nothing in between.
    seconds = None if mode == "export" else process.options.hung_step_timeout_secs
    return watched(
        seconds,
        process=str(process.identity),
        log=process.log_file,
        tell_others=process.tell_failure,
    )
