"""Preparation of Lingvo, with or without its native ops.

All modules of Lingvo import its native ops, whose binary (Lingvo 0.14.2) needs glibc 2.38. If the
ops do not load, a substitute module replaces them: inputs of tf.data work, and a call of a native
op raises an error that says what is missing. If they load, the op that reads files is called after
checks, since it aborts the process on invalid arguments; see `native_reads`.

Call `prepare` before the first import of Lingvo; the adaptors call it themselves.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import importlib.util
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from layerkit_inputs.base.errors import MissingExtraError
from layerkit_inputs.lingvo.native_reads import (
    NativeRead,
    NativeReadError,
    check_native_read,
)

INSTALL = (
    "pip install 'tensorflow==2.21.*' sympy matplotlib, then pip install --no-deps lingvo==0.14.2"
)
"""Installation of the smallest tested set; Lingvo's dependencies include Beam and Jupyter."""

_OPS = "lingvo.core.ops"
_LOCK = threading.Lock()


class NativeOpsError(OSError):
    """An error about a call of a native op of Lingvo, which could not be loaded."""


@dataclasses.dataclass
class NativeReads:
    """Record of the native reads while an input was made; see `watch_native_reads`."""

    checked: list[NativeRead] = dataclasses.field(default_factory=list)
    error: Exception | None = None


_WATCHER: contextvars.ContextVar[NativeReads | None] = contextvars.ContextVar(
    "lingvo_native_reads", default=None
)


@contextlib.contextmanager
def watch_native_reads() -> Iterator[NativeReads]:
    """Record native reads and their errors, which TensorFlow wraps in a traced function."""
    reads = NativeReads()
    token = _WATCHER.set(reads)
    try:
        yield reads
    finally:
        _WATCHER.reset(token)


def prepare() -> Any:
    """Make Lingvo importable on this machine; further calls do nothing.

    Accelerators are hidden from TensorFlow, since JAX uses them.

    Returns:
      The module `tensorflow`.

    Raises:
      MissingExtraError: Lingvo or TensorFlow is not installed.
      RuntimeError: Eager execution of TensorFlow is off.
    """
    with _LOCK:
        missing = [name for name in ("tensorflow", "lingvo") if not importlib.util.find_spec(name)]
        if missing:
            raise MissingExtraError(
                f"Lingvo inputs need the packages {' and '.join(missing)}: {INSTALL}"
            )
        tensorflow = importlib.import_module("tensorflow")
        if not tensorflow.executing_eagerly():
            raise RuntimeError(
                "Lingvo inputs need TensorFlow's eager execution, which is disabled. Remove "
                "disable_eager_execution() or disable_v2_behavior()."
            )
        with contextlib.suppress(RuntimeError):  # TensorFlow has already initialized the devices
            tensorflow.config.set_visible_devices([], "GPU")
        _install_ops(tensorflow.errors.NotFoundError)
        return tensorflow


def native_ops_problem() -> str | None:
    """Return why Lingvo's native ops cannot be used on this machine, or None if they can."""
    prepare()
    ops = sys.modules[_OPS]
    return ops.problem if isinstance(ops, _MissingOps) else None


def _install_ops(not_found: type[Exception]) -> None:
    loaded = sys.modules.get(_OPS)
    if isinstance(loaded, _MissingOps) or isinstance(
        getattr(loaded, "gen_x_ops", None), _CheckedOps
    ):
        return
    try:
        ops = importlib.import_module(_OPS)
    except not_found as error:
        sys.modules[_OPS] = _MissingOps(why_ops_do_not_load(str(error)))
    else:
        # GenericInput looks up the op by this name in each call.
        ops.gen_x_ops = _CheckedOps(ops.gen_x_ops)  # type: ignore[attr-defined]


def why_ops_do_not_load(loader_message: str) -> str:
    """Return a description for users of an error message of the dynamic loader."""
    needed = re.search(r"version `GLIBC_([\d.]+)' not found", loader_message)
    if needed is None:
        return (
            f"they do not load: {loader_message.strip().splitlines()[0]}. Install matching "
            f"versions of Lingvo and TensorFlow: {INSTALL}"
        )
    here = (os.confstr("CS_GNU_LIBC_VERSION") or "another C library").removeprefix("glibc ")
    return (
        f"they need glibc {needed[1]} or newer, and this machine has {here} (Ubuntu 24.04 and "
        "Debian 13 are new enough)"
    )


class _MissingOps(types.ModuleType):
    """A substitute of `lingvo.core.ops` in which each op raises an error when it is called."""

    def __init__(self, problem: str) -> None:
        super().__init__(_OPS)
        self.problem = problem
        spec = importlib.util.find_spec("lingvo.core")
        assert spec is not None and spec.submodule_search_locations
        # The folder also holds Python modules, which stay importable.
        self.__path__ = [str(Path(next(iter(spec.submodule_search_locations))) / "ops")]
        self.gen_x_ops = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (Path(self.__path__[0]) / f"{name}.py").exists():
            raise AttributeError(name)
        return self._op(name)

    def _op(self, name: str) -> Callable[..., Any]:
        def fail(*unused_args: Any, **unused_arguments: Any) -> Any:
            error = NativeOpsError(
                f"this input calls {name}, one of Lingvo's native ops, which cannot be used here: "
                f"{self.problem}. Use an input of tf.data, such as those of DefineTFDataInput and "
                "TFDataSequenceInputGenerator."
            )
            _record_error(error)
            raise error

        return fail


class _CheckedOps:
    """The native ops of Lingvo, with checks before those that read files."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def generic_input(self, **arguments: Any) -> Any:
        """Check the arguments and call the op."""
        _check(arguments)
        return self._ops.generic_input(**arguments)

    def generic_input_v2_create(self, **arguments: Any) -> Any:
        """Check the arguments and call the op."""
        _check(arguments)
        return self._ops.generic_input_v2_create(**arguments)


def _check(arguments: dict[str, Any]) -> None:
    try:
        read = check_native_read(arguments)
    except NativeReadError as error:
        _record_error(error)
        raise
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher.checked.append(read)


def _record_error(error: Exception) -> None:
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher.error = error
