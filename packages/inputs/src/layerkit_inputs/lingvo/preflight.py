"""Preparation of Lingvo, with or without its native ops.

All modules of Lingvo import its native ops, whose binary (Lingvo 0.14.2) needs glibc 2.38. If the
ops do not load, a substitute module replaces them: inputs of tf.data work, and a call of a native
op raises an error that says what is missing.

Call `prepare` before the first import of Lingvo; the adaptors call it themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerkit_inputs.base.errors import MissingExtraError

INSTALL = (
    "pip install 'tensorflow==2.21.*' sympy matplotlib, then pip install --no-deps lingvo==0.14.2"
)
"""Installation of the smallest tested set; Lingvo's dependencies include Beam and Jupyter."""

_OPS = "lingvo.core.ops"


class NativeOpsError(OSError):
    """An error about a call of a native op of Lingvo, which could not be loaded."""


def prepare() -> Any:
    """Make Lingvo importable on this machine; further calls do nothing.

    Accelerators are hidden from TensorFlow, since JAX uses them.

    Returns:
      The module `tensorflow`.

    Raises:
      MissingExtraError: Lingvo or TensorFlow is not installed.
    """
    if not all(map(importlib.util.find_spec, ("tensorflow", "lingvo"))):
        raise MissingExtraError("Lingvo inputs need Lingvo and TensorFlow", hint=INSTALL)
    tensorflow = importlib.import_module("tensorflow")
    with contextlib.suppress(RuntimeError):  # TensorFlow has already initialized the devices
        tensorflow.config.set_visible_devices([], "GPU")
    try:
        importlib.import_module(_OPS)
    except tensorflow.errors.NotFoundError as error:
        sys.modules[_OPS] = _MissingOps(error.message.partition("\n")[0])
    return tensorflow


class _MissingOps(types.ModuleType):
    """A substitute of `lingvo.core.ops` in which each op raises an error when it is called."""

    def __init__(self, problem: str) -> None:
        super().__init__(_OPS)
        self.problem = problem
        core = importlib.import_module("lingvo.core")
        # The folder also holds Python modules, which stay importable.
        self.__path__ = [str(Path(core.__path__[0], "ops"))]
        self.gen_x_ops = self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or Path(self.__path__[0], f"{name}.py").exists():
            raise AttributeError(name)

        def fail(*unused_args: Any, **unused_arguments: Any) -> Any:
            raise NativeOpsError(
                f"{name}, one of Lingvo's native ops, does not load here ({self.problem}). Use an "
                "input of tf.data, such as those of DefineTFDataInput."
            )

        return fail
