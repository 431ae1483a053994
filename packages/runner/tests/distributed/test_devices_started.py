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
    ("platforms", "reason"), [("tpu", "tpu"), pytest.param("cpuu", "cpuu", marks=pytest.mark.slow)]
)
def test_platform_that_jax_cannot_start_is_an_error_of_one_line(platforms: str, reason: str):
    if importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is installed here")
    error = start(platforms).stderr
    message = error[error.index("failed: ") :]
    assert f"JAX_PLATFORMS={platforms}: JAX " in message
    assert reason in message.partition("cannot start")[2]
    assert len(message.splitlines()) == 1
