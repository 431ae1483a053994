"""StepProfiler: a trace of a few training steps, for TensorBoard's profile tab or xprof.

Asked for by a field (`task.train.profiler_capture_step`) or, while the run goes on, by the signal
SIGUSR2, whose process captures its next steps. Outside of a capture it costs a comparison a step.

    DIR/profile/step_00000010/plugins/profile/step_00000010/process_0000.xplane.pb

`tensorboard --logdir=DIR/profile` or `xprof DIR/profile/step_00000010` shows it. Files are named by
process, so that those of a job meet in one session.
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
"""What the host's part of a step is called in a trace; its `step_num` says which."""


class StepProfiler:
    """Captures traces of training steps; catches the signal while it is entered.

    Args:
      directory: The job's folder.
      capture_step: The first step of the capture that was asked for; None for none.
      num_steps: How many steps a capture takes.
      captures_by_step: Whether this process takes part in the capture that starts at
        `capture_step`; one that gets the signal captures in any case.
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
        self._is_asked = False
        self._first: int | None = None  # of the capture under way
        self._traced: tempfile.TemporaryDirectory[str] | None = None
        self._previous: Any = None

    def __enter__(self) -> StepProfiler:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(CAPTURE_SIGNAL, self._ask)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._previous is not None:
            signal.signal(CAPTURE_SIGNAL, self._previous)
        if self._first is not None:
            jax.profiler.stop_trace()
            self._let_go()

    def starts_before(self, step: int) -> bool:
        """Whether a capture should start now, with `step` as its first."""
        return self._first is None and (self._is_asked or step == self._capture_step)

    def start(self, step: int) -> None:
        """Starts a capture whose first step is `step`; those before it should have ended."""
        self._is_asked = False
        # Traced to this machine: the tracer itself writes to no store, and names files by host.
        self._traced = tempfile.TemporaryDirectory(prefix="profile")
        try:
            jax.profiler.start_trace(self._traced.name)
        except RuntimeError as error:  # another trace of this process is under way
            self._report(f"no profile of step {step}: {error}")
            self._let_go()
            return
        self._first = step

    def ends_after(self, step: int) -> bool:
        """Whether `step` is the last one of the capture under way."""
        return self._first is not None and step >= self._first + self._num_steps - 1

    def stop(self, step: int) -> None:
        """Ends the capture after `step`, which should have ended, and writes it."""
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
            # What was asked for is training; a trace that cannot be kept must not end it.
            self._report(f"profile of steps {self._first} to {step} is lost: {error}")
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._first = None
        if self._traced is not None:
            self._traced.cleanup()
        self._traced = None

    def _ask(self, *_: Any) -> None:
        self._is_asked = True


def _move_trace(traced: epath.Path, session: epath.Path) -> int:
    """Copies the files of a trace to where they stay; returns their bytes."""
    size = 0
    for kind in ("xplane.pb", "trace.json.gz"):
        for path in traced.glob(f"plugins/profile/*/*.{kind}"):
            content = path.read_bytes()
            atomic_write(session / f"process_{jax.process_index():04d}.{kind}", content)
            size += len(content)
    return size


@contextlib.contextmanager
def profiler_server(port: int | None) -> Iterator[None]:
    """Lets xprof or TensorBoard ask this process for a trace at any time; None does nothing.

    Whoever reaches the port, on any network of this machine, can ask.

    Raises:
      UsageError: there is no such port, or it is taken, of which JAX itself only logs a line.
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
