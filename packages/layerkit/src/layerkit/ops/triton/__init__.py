"""Own kernels for NVIDIA GPUs in Pallas' Triton backend: attention and the grouped product.

Their end: JAX deprecated that backend in 0.12 and is to remove it. This folder and its rows in the
tables of implementations go when the bound of JAX in `pyproject.toml` admits a version without the
backend, or earlier, when Tokamax is at least as fast on a GPU in all calls that they run. `auto`
already prefers cuDNN and Tokamax. docs/decisions/0014-kernels-from-libraries.md has the reasons.
"""

from __future__ import annotations

import functools
import importlib.util

import jax


@functools.cache
def find_missing_triton() -> str:
    """Return a sentence if this version of JAX has no Triton backend of Pallas, else ""."""
    if importlib.util.find_spec("jax.experimental.pallas.triton") is not None:
        return ""
    return f"JAX {jax.__version__} has no Triton backend of Pallas"
