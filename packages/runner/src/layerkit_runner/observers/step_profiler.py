"""Profiler traces of a few training steps, for TensorBoard's profile tab or xprof.

The field `task.train.profiler_capture_step` requests a trace; so does the signal SIGUSR2, at any
time, for the next steps of the process. All processes of a job write to one session:

    DIR/profile/step_00000010/plugins/profile/step_00000010/process_0000.xplane.pb
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
from layerkit_runner.files.text import size_text

CAPTURE_SIGNAL = signal.SIGUSR2
STEP_EVENT = "train"
"""Name of the event of a step on the host, whose `step_num` is the number of the step."""


class StepProfiler:
    """A context manager that captures traces of training steps, and handles the signal.

    `capture_step` begins a trace, on processes with `captures_by_step`; None waits for the signal.
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
        """Store the settings; see the class for the arguments."""
        self._directory = directory
        self._capture_step = capture_step if captures_by_step else None
        self._num_steps = num_steps
        self._report = report
        self._is_requested = False
        # First step and local folder of the capture under way.
        self._capture: tuple[int, tempfile.TemporaryDirectory[str]] | None = None
        self._previous: Any = None

    def __enter__(self) -> StepProfiler:
        """Handle the signal, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():

            def request(*_: Any) -> None:
                self._is_requested = True

            self._previous = signal.signal(CAPTURE_SIGNAL, request)
        return self

    def __exit__(self, *exception: Any) -> None:
        """Restore the signal handler, and end a capture without writing it."""
        if self._previous is not None:
            signal.signal(CAPTURE_SIGNAL, self._previous)
        if self._capture is not None:
            jax.profiler.stop_trace()
            self._capture[1].cleanup()
            self._capture = None

    def starts_before(self, step: int) -> bool:
        """Return whether a capture should start with `step`."""
        return self._capture is None and (self._is_requested or step == self._capture_step)

    def start(self, step: int) -> None:
        """Start a capture with `step`; earlier steps must have ended."""
        self._is_requested = False
        # In a local folder, since the tracer cannot write to a store, and names files by host.
        traced = tempfile.TemporaryDirectory(prefix="profile")
        try:
            jax.profiler.start_trace(traced.name)
            self._capture = (step, traced)
        except RuntimeError as error:  # another trace of this process is active
            self._report(f"no profile of step {step}: {error}")
            traced.cleanup()

    def ends_after(self, step: int) -> bool:
        """Return whether `step` is the last one of the active capture."""
        return self._capture is not None and step >= self._capture[0] + self._num_steps - 1

    def stop(self, step: int) -> None:
        """End the capture and write it; `step` must have ended."""
        if self._capture is None:
            return
        (first, traced), self._capture = self._capture, None
        name, steps = f"step_{first:08d}", f"steps {first} to {step}"
        folder = self._directory / "profile" / name
        with traced:
            try:
                jax.profiler.stop_trace()
                session = folder / "plugins" / "profile" / name
                size = _move_trace(epath.Path(traced.name), session)
                self._report(
                    f"profile of {steps} ({size_text(size)}) in {folder};"
                    f" view it with: tensorboard --logdir={folder.parent}"
                )
            except (OSError, RuntimeError) as error:  # training continues
                self._report(f"cannot write the profile of {steps}: {error}")


def _move_trace(traced: epath.Path, session: epath.Path) -> int:
    size = 0
    for kind in ("xplane.pb", "trace.json.gz"):
        for path in traced.glob(f"plugins/profile/*/*.{kind}"):
            content = path.read_bytes()
            atomic_write(session / f"process_{jax.process_index():04d}.{kind}", content)
            size += len(content)
    return size


@contextlib.contextmanager
def profiler_server(port: int | None) -> Iterator[None]:
    """Serve traces to xprof or TensorBoard at a port of all interfaces; None serves nothing."""
    if port is None:
        yield
        return
    if port > 65535:
        raise UsageError(field="--jax_profiler_port", value=port, expected="a port below 65536")
    try:  # JAX itself would only log a line.
        socket.create_server(("", port)).close()
    except OSError as error:
        expected = f"a free port, different for each process of a machine ({error})"
        raise UsageError(field="--jax_profiler_port", value=port, expected=expected) from error
    jax.profiler.start_server(port)
    try:
        yield
    finally:
        jax.profiler.stop_server()
