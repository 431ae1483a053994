"""A trace of a few training steps, for TensorBoard's profile tab or xprof.

It is requested by a field (`task.train.profiler_capture_step`) or, at any time, by the signal
SIGUSR2, whose process captures its next steps. Without a capture it costs a comparison a step.

    DIR/profile/step_00000010/plugins/profile/step_00000010/process_0000.xplane.pb

`tensorboard --logdir=DIR/profile` or `xprof DIR/profile/step_00000010` shows it. Files are named by
process, so that all processes of a job write to one session.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath

from layerkit_runner.errors import UsageError
from layerkit_runner.files.atomic_write import atomic_write
from layerkit_runner.files.byte_sizes import megabytes

CAPTURE_SIGNAL = signal.SIGUSR2
STEP_EVENT = "train"
"""Name of the host's part of a step in a trace; its `step_num` is the number of the step."""


class StepProfiler:
    """Captures traces of training steps; catches the signal while it is entered.

    Args:
      directory: Folder of the job.
      capture_step: First step of the capture; None captures only on the signal.
      num_steps: Number of steps of a capture.
      captures_by_step: Whether this process takes part in the capture at `capture_step`.
      report: Takes a line for people.
    """

    def __init__(
        self,
        directory: epath.Path,
        *,
        capture_step: int | None,
        num_steps: int,
        captures_by_step: bool,
        report: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._capture_step = capture_step if captures_by_step else None
        self._num_steps = num_steps
        self._report = report
        self._is_requested = False
        self._first: int | None = None  # of the capture under way
        self._traced: tempfile.TemporaryDirectory[str] | None = None
        self._previous: Any = None

    def __enter__(self) -> StepProfiler:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(CAPTURE_SIGNAL, self._request)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._previous is not None:
            signal.signal(CAPTURE_SIGNAL, self._previous)
        if self._first is not None:
            jax.profiler.stop_trace()
            self._release()

    def starts_before(self, step: int) -> bool:
        """Return whether a capture should start now, with `step` as its first."""
        return self._first is None and (self._is_requested or step == self._capture_step)

    def start(self, step: int) -> None:
        """Start a capture with the step `step`; earlier steps must have ended."""
        self._is_requested = False
        # To a folder of this machine: the tracer cannot write to a store, and names files by host.
        self._traced = tempfile.TemporaryDirectory(prefix="profile")
        try:
            jax.profiler.start_trace(self._traced.name)
        except RuntimeError as error:  # another trace of this process is under way
            self._report(f"no profile of step {step}: {error}")
            self._release()
            return
        self._first = step

    def ends_after(self, step: int) -> bool:
        """Return whether `step` is the last one of the capture under way."""
        return self._first is not None and step >= self._first + self._num_steps - 1

    def stop(self, step: int) -> None:
        """End the capture after `step`, which must have ended, and write it."""
        if self._first is None or self._traced is None:
            return
        name = f"step_{self._first:08d}"
        folder = self._directory / "profile" / name
        try:
            jax.profiler.stop_trace()
            session = folder / "plugins" / "profile" / name
            size = _move_trace(epath.Path(self._traced.name), session)
            self._report(
                f"profile of steps {self._first} to {step} ({megabytes(size)}) in {folder};"
                f" look at it with: tensorboard --logdir={folder.parent}"
            )
        except (OSError, RuntimeError) as error:
            # A trace that cannot be written must not end the training.
            self._report(f"profile of steps {self._first} to {step} is lost: {error}")
        finally:
            self._release()

    def _release(self) -> None:
        self._first = None
        if self._traced is not None:
            self._traced.cleanup()
        self._traced = None

    def _request(self, *_: Any) -> None:
        self._is_requested = True


def _move_trace(traced: epath.Path, session: epath.Path) -> int:
    """Copy the files of a trace to the job's folder; return their bytes."""
    size = 0
    for kind in ("xplane.pb", "trace.json.gz"):
        for path in traced.glob(f"plugins/profile/*/*.{kind}"):
            content = path.read_bytes()
            atomic_write(session / f"process_{jax.process_index():04d}.{kind}", content)
            size += len(content)
    return size


@contextlib.contextmanager
def profiler_server(port: int | None) -> Iterator[None]:
    """Serve traces to xprof or TensorBoard at a port; None does nothing.

    Everyone who reaches the port, on any network of this machine, can ask for a trace.

    Raises:
      UsageError: There is no such port, or it is taken. JAX itself would only log a line.
    """
    if port is None:
        yield
        return
    if port > 65535:
        raise UsageError(f"--jax_profiler_port={port}: there are no ports above 65535")
    try:
        with socket.create_server(("", port)):
            pass
    except OSError as error:
        raise UsageError(
            f"--jax_profiler_port={port}: {error}; each process on a machine needs one of its own"
        ) from error
    jax.profiler.start_server(port)
    try:
        yield
    finally:
        jax.profiler.stop_server()
