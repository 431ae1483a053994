"""Errors of platforms that JAX cannot start, in processes with JAX_PLATFORMS."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PROCESS = """
import sys
from layerkit_runner.errors import UsageError
from layerkit_runner.distributed.devices import start_devices
try:
    start_devices()
except UsageError as error:
    sys.exit(f"failed: {error}")
"""


def start(platforms: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROCESS],
        env={**os.environ, "JAX_PLATFORMS": platforms},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("platforms", "module", "remedy"),
    [
        pytest.param("cuda", "jax_cuda13_plugin", "jax[cuda13]", marks=pytest.mark.slow),
        ("tpu", "libtpu", "jax[tpu]"),
        pytest.param("tpu,cpu", "libtpu", "jax[tpu]", marks=pytest.mark.slow),
    ],
)
def test_platform_without_its_plugin_names_what_to_install(
    platforms: str, module: str, remedy: str
):
    if importlib.util.find_spec(module) or importlib.util.find_spec("jax_cuda12_plugin"):
        pytest.skip(f"{module} is installed here")
    error = start(platforms).stderr
    message = error[error.index("failed: ") :]
    assert f"JAX_PLATFORMS={platforms!r}" in message
    assert module in message
    assert remedy in message
    assert len(message.splitlines()) == 1


def test_misspelled_platform_names_the_nearest():
    error = start("cpuu").stderr
    message = error[error.index("failed: ") :]
    assert "JAX_PLATFORMS='cpuu'" in message
    assert "did you mean 'cpu'" in message.lower()
    assert len(message.splitlines()) == 1
