"""The processes of one job: how they find one another, and that none waits for one that is gone.

A job on several machines is the same command on each, with `--coordinator_address`,
`--num_processes` and `--process_id`; under Slurm, Open MPI, Kubernetes or on a TPU pod
`--coordinator_address=auto` finds all three. A process that dies or hangs is missed within
`HEARTBEAT_TIMEOUT_SECONDS`, and the others then end as well, since no step can be made without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import jax

from layerkit_runner.errors import UsageError
from layerkit_runner.flags import AUTO_ADDRESS, RunOptions

HEARTBEAT_TIMEOUT_SECONDS = 20

_SECONDS_TO_SPEAK = 2.0


@contextlib.contextmanager
def joined(options: RunOptions) -> Iterator[None]:
    """Joins the other processes where the flags name some; to be entered before JAX is used.

    Where several processes run and this one fails, it says why and ends at once, with the exit code
    of the failure: the others may wait for it in a step, and would wait for long.

    Raises:
      UsageError: the processes cannot find one another.
    """
    if options.coordinator_address is not None:
        _initialize(options)
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        _end(error)


def _end(error: Exception) -> NoReturn:
    if isinstance(error, UsageError):
        print(f"runner: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    if isinstance(error, jax.errors.JaxRuntimeError):
        place = f"process {jax.process_index()} of {jax.process_count()}"
        print(
            f"runner: {place} cannot go on, see the error above. If a connection to another process"
            " was lost, that process has ended, and its own output says why. The same command in"
            " every process goes on from the newest checkpoint.",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
        # The others are ended as soon as this one is gone; they may have something to say as well.
        time.sleep(_SECONDS_TO_SPEAK)
    os._exit(error.exit_code if isinstance(error, UsageError) else 1)


def _initialize(options: RunOptions) -> None:
    is_auto = options.coordinator_address == AUTO_ADDRESS
    try:
        jax.distributed.initialize(
            None if is_auto else options.coordinator_address,
            options.num_processes,
            options.process_id,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"--coordinator_address={options.coordinator_address}: the processes of the job cannot"
            f" find one another: {error}"
        ) from error
