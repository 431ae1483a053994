"""Lingvo made ready: its native ops where this machine can load them, else the rest without them.

Lingvo's modules all import its native ops, whose binary (Lingvo 0.14.2) needs glibc 2.38. Where
they do not load, a stand-in takes their place: inputs made of tf.data then work, and the first call
of a native op is an error that says what is missing. Where they load, the op that reads files is
called through checks, since what it does not like ends the process; see `native_reads`.

Call `prepare` before the first import of Lingvo; the adaptors do it themselves, later.
"""

from __future__ import annotations

import contextlib
import contextvars
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

from layerkit_inputs.extras import MissingExtraError
from layerkit_inputs.lingvo_adaptor.native_reads import (
    NativeRead,
    NativeReadError,
    check_native_read,
)

INSTALL = (
    "pip install 'tensorflow==2.21.*' sympy matplotlib, then pip install --no-deps lingvo==0.14.2"
)
"""The smallest set that was tested; Lingvo's own dependencies bring Beam, Jupyter and more."""

_OPS = "lingvo.core.ops"
_LOCK = threading.Lock()


class NativeOpsError(OSError):
    """A native op of Lingvo was called where they cannot be loaded."""


class NativeReads:
    """What happened in the native ops while an input was made: see `watch_native_reads`."""

    def __init__(self) -> None:
        self.checked: list[NativeRead] = []
        self.error: Exception | None = None


_WATCHER: contextvars.ContextVar[NativeReads | None] = contextvars.ContextVar(
    "lingvo_native_reads", default=None
)


@contextlib.contextmanager
def watch_native_reads() -> Iterator[NativeReads]:
    """Takes note of native reads; TensorFlow wraps errors of a traced function, here they stay."""
    reads = NativeReads()
    token = _WATCHER.set(reads)
    try:
        yield reads
    finally:
        _WATCHER.reset(token)


def prepare() -> Any:
    """Makes `import lingvo...` work on this machine; may be called again.

    TensorFlow is left the CPU alone, since the accelerators belong to JAX.

    Returns:
      The module tensorflow.

    Raises:
      MissingExtraError: Lingvo or TensorFlow is not installed; the message tells how to do it.
      RuntimeError: TensorFlow's eager execution is off.
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
                "Lingvo inputs need TensorFlow's eager execution, which this program has turned "
                "off; remove disable_eager_execution() or disable_v2_behavior()."
            )
        with contextlib.suppress(RuntimeError):  # TensorFlow is in use already, on what it found
            tensorflow.config.set_visible_devices([], "GPU")
        _install_ops(tensorflow.errors.NotFoundError)
        return tensorflow


def native_ops_problem() -> str | None:
    """Why Lingvo's native ops cannot be used on this machine; None where they can."""
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
        # GenericInput looks the op up by this name each time it is called.
        ops.gen_x_ops = _CheckedOps(ops.gen_x_ops)  # type: ignore[attr-defined]


def why_ops_do_not_load(loader_message: str) -> str:
    """What to tell a user, from what the dynamic loader said."""
    needed = re.search(r"version `GLIBC_([\d.]+)' not found", loader_message)
    if needed is None:
        return (
            f"they do not load: {loader_message.strip().splitlines()[0]}. Lingvo and TensorFlow "
            f"must fit each other: {INSTALL}"
        )
    here = (os.confstr("CS_GNU_LIBC_VERSION") or "another C library").removeprefix("glibc ")
    return (
        f"they need glibc {needed[1]} or newer, and this machine has {here} (Ubuntu 24.04 and "
        "Debian 13 are new enough)"
    )


class _MissingOps(types.ModuleType):
    """Stands in for `lingvo.core.ops`: has every op, and each is an error when called."""

    def __init__(self, problem: str) -> None:
        super().__init__(_OPS)
        self.problem = problem
        spec = importlib.util.find_spec("lingvo.core")
        assert spec is not None and spec.submodule_search_locations
        # The folder also holds plain Python modules, which stay importable.
        self.__path__ = [str(Path(next(iter(spec.submodule_search_locations))) / "ops")]
        self.gen_x_ops = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (Path(self.__path__[0]) / f"{name}.py").exists():
            raise AttributeError(name)
        return self._op(name)

    def _op(self, name: str) -> Callable[..., Any]:
        def refuse(*unused_args: Any, **unused_arguments: Any) -> Any:
            error = NativeOpsError(
                f"this input calls {name}, one of Lingvo's native ops, which cannot be used here: "
                f"{self.problem}. Inputs that read by tf.data, such as those of DefineTFDataInput "
                "and TFDataSequenceInputGenerator, work."
            )
            _note_error(error)
            raise error

        return refuse


class _CheckedOps:
    """The generated ops; those that read files are called only after a check."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def generic_input(self, **arguments: Any) -> Any:
        """The op, after the check."""
        _check(arguments)
        return self._ops.generic_input(**arguments)

    def generic_input_v2_create(self, **arguments: Any) -> Any:
        """The op, after the check."""
        _check(arguments)
        return self._ops.generic_input_v2_create(**arguments)


def _check(arguments: dict[str, Any]) -> None:
    try:
        read = check_native_read(arguments)
    except NativeReadError as error:
        _note_error(error)
        raise
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher.checked.append(read)


def _note_error(error: Exception) -> None:
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher.error = error
