"""Trains, evaluates and decodes; the command line `runner`.

The names below load their modules when they are first used, so that the command line can answer a
mistake without importing JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerkit_runner.config.commands import Command as Command
    from layerkit_runner.config.commands import Mode as Mode
    from layerkit_runner.config.experiment import BaseExperiment as BaseExperiment
    from layerkit_runner.config.overrides import Override as Override
    from layerkit_runner.config.resolve import ResolvedExperiment as ResolvedExperiment
    from layerkit_runner.errors import UsageError as UsageError
    from layerkit_runner.run_options import Flag as Flag
    from layerkit_runner.run_options import RunOptions as RunOptions

# The module of each public name. A function called as its module (`resolve`) cannot be here: once
# the module is imported, Python would find that under the name.
_MODULES = {
    "BaseExperiment": "config.experiment",
    "Command": "config.commands",
    "Flag": "run_options",
    "Mode": "config.commands",
    "Override": "config.overrides",
    "ResolvedExperiment": "config.resolve",
    "RunOptions": "run_options",
    "UsageError": "errors",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
