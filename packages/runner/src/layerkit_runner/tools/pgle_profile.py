"""Convert a captured trace to a profile that guides the scheduler of NVIDIA GPUs (PGLE).

    runner --exp=… --job_log_dir=DIR --fdl.task.train.profiler_capture_step=50
    python -m layerkit_runner.tools.pgle_profile DIR/profile/step_00000050 steps.pb
    runner --exp=… --job_log_dir=NEW --pgle_profile=steps.pb

The profile holds the time of each operation on the device, by which the latency hiding scheduler
places collectives. Capture the trace without `--xla_flags_preset=gpu_latency_hiding`, so that
collectives do not overlap other operations, and again after a change of the model, the mesh or JAX.

Exit codes: 0 done, 2 the command line is wrong, or the trace has no timings of GPU operations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from etils import epath

from layerkit_runner.errors import UsageError
from layerkit_runner.files.text import megabytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
      arguments: Words after the program's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="pgle_profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", help="folder of a captured trace")
    parser.add_argument("profile", help="file to write")
    options = parser.parse_args(arguments)
    try:
        content = read_profile(epath.Path(options.trace))
        epath.Path(options.profile).write_bytes(content)
    except (UsageError, OSError) as error:
        print(f"pgle_profile: {error}", file=sys.stderr)
        return UsageError.exit_code
    print(f"{options.profile}: {megabytes(len(content))}; use it with --pgle_profile")
    return 0


def read_profile(trace: epath.Path) -> bytes:
    """Return the profile of a trace, a serialized `ProfiledInstructionsProto`.

    Args:
      trace: Folder written by `layerkit_runner.observers.step_profiler`, or another folder for
        TensorBoard's profile tab.

    Raises:
      UsageError: The folder has not exactly one trace, or the trace has no timings of GPU
        operations.
    """
    sessions = sorted({path.parent for path in trace.glob("plugins/profile/*/*.xplane.pb")})
    if len(sessions) != 1:
        raise UsageError(
            owner=str(trace),
            field="number of traces",
            value=len(sessions),
            expected="1 folder with plugins/profile/*/*.xplane.pb",
        )
    # Loads JAX, which is slow.
    from jax.experimental import profiler

    content = profiler.get_profiled_instructions_proto(str(sessions[0]))
    if not content:
        raise UsageError("no timings of GPU operations in the trace", owner=str(trace))
    return content


if __name__ == "__main__":
    sys.exit(main())
