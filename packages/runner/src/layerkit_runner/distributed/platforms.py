"""The platform that JAX runs on: started here, so that a wrong one is reported in a sentence."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import jax

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError

# What JAX_PLATFORMS may name, the module that JAX needs for it, and how to install that.
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "cpu": ((), ""),
    "cuda": (_GPU_PLUGINS, "pip install 'jax[cuda13]'"),
    "gpu": ((*_GPU_PLUGINS, "jax_rocm7_plugin"), "pip install 'jax[cuda13]'"),
    "rocm": (("jax_rocm7_plugin", "jax_rocm60_plugin"), "pip install jax-rocm7-plugin"),
    "tpu": (("libtpu",), "pip install 'jax[tpu]'"),
}


def start_devices() -> None:
    """Let JAX start its devices.

    Raises:
      UsageError: It cannot, with what is missing and what to do.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise UsageError(_refusal(os.environ.get("JAX_PLATFORMS"), error)) from error


def _refusal(platforms: str | None, error: Exception) -> str:
    names = [name.strip() for name in (platforms or "").split(",") if name.strip()]
    known = {*_NEEDS, *_registered()}
    for name in names:
        if name not in known:
            return (
                f"JAX_PLATFORMS={platforms}: unknown platform {name!r}{near_names(name, known)}"
                f" Expected one of {', '.join(sorted(known))}."
            )
    version = importlib.metadata.version("jax")
    missing = [name for name in names if not _is_installed(name)]
    for name in missing:
        modules, command = _NEEDS[name]
        return (
            f"JAX_PLATFORMS={platforms}: JAX {version} is installed without its plugin for {name}"
            f" ({' or '.join(modules)}). Install it ({command}), or set JAX_PLATFORMS=cpu."
        )
    # An AssertionError says nothing: the plugin is there and found no device.
    reason = f": {error}" if str(error) else ", since it finds none"
    where = f"JAX_PLATFORMS={platforms}: " if platforms else ""
    return (
        f"{where}JAX {version} cannot start its devices{reason.splitlines()[0]}. Run `runner"
        " doctor` to check this machine, or set JAX_PLATFORMS=cpu."
    )


def _is_installed(platform: str) -> bool:
    modules, _ = _NEEDS.get(platform, ((), ""))
    return not modules or any(importlib.util.find_spec(module) for module in modules)


def _registered() -> set[str]:
    """Return the platforms of installed plugins, also those that JAX does not come with."""
    # Not public, and nothing public tells them before the devices are started.
    from jax._src import xla_bridge

    return set(getattr(xla_bridge, "_backend_factories", {})) - {"interpreter"}
