"""Turns a captured trace into a profile that guides the scheduler of NVIDIA GPUs (PGLE).

    runner --exp=… --job_log_dir=DIR --fdl.task.train.profiler_capture_step=50
    python -m layerkit_runner.tools.pgle_profile DIR/profile/step_00000050 steps.pb
    runner --exp=… --job_log_dir=NEW --pgle_profile=steps.pb

Of a trace of steps it keeps how long each operation took on the device, by which the latency hiding
scheduler then places collectives. Capture it without `--xla_flags_preset=gpu_latency_hiding`, so
that collectives are timed alone, and again after any change of the model, the mesh or JAX.

Exit codes: 0 done, 2 the command line is wrong, or the trace holds nothing of use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from etils import epath

from layerkit_runner.errors import UsageError
from layerkit_runner.files.byte_sizes import megabytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says, and returns the exit code.

    Args:
      arguments: its words, without the program's name; those of this process by default.
    """
    parser = argparse.ArgumentParser(
        prog="pgle_profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", help="the folder of a captured profile")
    parser.add_argument("profile", help="the file to write")
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
    """The profile that is in a trace, a serialized `ProfiledInstructionsProto`.

    Args:
      trace: A folder that `layerkit_runner.observers.step_profiler` wrote, or any other of
        TensorBoard's profile tab.

    Raises:
      UsageError: there is not exactly one trace, or it holds no timings of GPU operations.
    """
    sessions = sorted({path.parent for path in trace.glob("plugins/profile/*/*.xplane.pb")})
    if len(sessions) != 1:
        raise UsageError(
            f"{trace} holds {len(sessions)} traces (plugins/profile/*/*.xplane.pb); expected one"
        )
    # Loads JAX, for which a mistake need not wait.
    from jax.experimental import profiler

    content = profiler.get_profiled_instructions_proto(str(sessions[0]))
    if not content:
        raise UsageError(f"{trace} holds no timings of GPU operations")
    return content


if __name__ == "__main__":
    sys.exit(main())
