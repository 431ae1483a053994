"""Starting JAX's devices, with one sentence about what is wrong if it cannot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import jax

from layerkit.near_names import near_names
from layerkit_runner.errors import UsageError

# By value of JAX_PLATFORMS: the modules of which JAX needs one, and how to install it.
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
      UsageError: JAX cannot start them; it names what is missing and what to do.
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
    for name in names:
        modules, command = _NEEDS.get(name, ((), ""))
        if modules and not any(map(importlib.util.find_spec, modules)):
            return (
                f"JAX_PLATFORMS={platforms}: JAX {version} is installed without its plugin for"
                f" {name} ({' or '.join(modules)}). Install it ({command}), or set"
                " JAX_PLATFORMS=cpu."
            )
    # An AssertionError says nothing: the plugin is there and found no device.
    reason = f": {error}" if str(error) else ", since it finds none"
    where = f"JAX_PLATFORMS={platforms}: " if platforms else ""
    return (
        f"{where}JAX {version} cannot start its devices{reason.splitlines()[0]}. Run `runner"
        " doctor` to check this machine, or set JAX_PLATFORMS=cpu."
    )


def _registered() -> set[str]:
    """Return the platforms of installed plugins, also those that JAX does not come with."""
    # Not public, and nothing public tells them before the devices are started.
    from jax._src import xla_bridge

    return set(getattr(xla_bridge, "_backend_factories", {})) - {"interpreter"}
