"""The C library's allocator, set up for steps that run on the CPU.

XLA allocates the temporaries of each step on the CPU anew. glibc returns blocks of this size to the
kernel when they are freed, so that every step waits for the kernel to map and clear them again.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform

# Parameters of `mallopt` in <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = -1
_ACCELERATOR_PLUGINS = ("jax_plugins", "libtpu")


def keep_freed_memory() -> bool:
    """Let the process keep freed memory for the next step, if JAX will compute on the CPU.

    Call this before JAX or NumPy is imported. The resident memory stays at its maximum. False with
    another C library, if an accelerator may be used, or if the environment sets the allocator.
    """
    if platform.libc_ver()[0] != "glibc" or not _computes_on_cpu():
        return False
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    return all(library.mallopt(name, value) for name, value in settings)


def _computes_on_cpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(map(importlib.util.find_spec, _ACCELERATOR_PLUGINS))
