"""Print how much code of the project a short training run imports and calls before its first step.

Two figures of a three-step quickstart that runs in this process:

- the modules of the four packages that are imported when the run ends;
- the files and functions of the four packages that are entered between the resolved experiment and
  the end of step 1, on any thread. Code that runs because a module is imported is not counted.

    python scripts/startup_trace.py
    python scripts/startup_trace.py --list      # also name the modules and files
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

PACKAGES = ("layerkit", "layerkit_inputs", "layerkit_runner", "layerkit_experiments")


class EnteredFunctions:
    """A recorder of the project's functions that are called while it is active.

    Attributes:
      functions: (file relative to its `src` folder, qualified name) of each function.
    """

    def __init__(self) -> None:
        """Create an inactive recorder."""
        self.functions: set[tuple[str, str]] = set()
        self._files: dict[CodeType, str | None] = {}
        self._is_active = False

    def start(self) -> None:
        """Record calls on this thread, and on threads that start from now on."""
        self._is_active = True
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        """Stop recording."""
        self._is_active = False
        threading.setprofile(None)
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not self._is_active or not code.co_flags & inspect.CO_OPTIMIZED:
            return  # the body of a module or a class has no CO_OPTIMIZED
        if code not in self._files:
            package, _, path = code.co_filename.rpartition("/src/")
            self._files[code] = path if package and path.split("/")[0] in PACKAGES else None
        path = self._files[code]
        if path is not None and not _is_importing(frame):
            self.functions.add((path, code.co_qualname))


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame runs because a module is imported."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def trace_quickstart(folder: str) -> EnteredFunctions:
    """Train three steps in `folder`; return the functions called up to the end of step 1."""
    from layerkit_runner import cli
    from layerkit_runner.observers import Progress
    from layerkit_runner.run import run_mode as run_module

    entered = EnteredFunctions()
    run, report_step = run_module.run, Progress.progress

    def traced_run(*args: Any) -> int:
        entered.start()
        return run(*args)

    def first_report(self: Progress, step: int) -> None:
        entered.stop()
        report_step(self, step)

    replaced: Callable[..., Any] = traced_run
    run_module.run, Progress.progress = replaced, first_report  # type: ignore[method-assign]
    flags = ["--exp=lm.quickstart.LocalText", "--fdl.MAX_STEPS=3", f"--job_log_dir={folder}"]
    if cli.main(flags) != 0:
        raise RuntimeError("the quickstart failed")
    return entered


def main() -> None:
    """Run the quickstart and print both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the modules and files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        entered = trace_quickstart(folder)
    modules = sorted(name for name in sys.modules if name.split(".")[0] in PACKAGES)
    files = sorted({path for path, _ in entered.functions})
    if arguments.list:
        print("\n".join([*modules, *files]))
    print(f"project modules imported: {len(modules)}")
    print(
        f"entered up to the end of step 1: {len(files)} files, {len(entered.functions)} functions"
    )


if __name__ == "__main__":
    main()
