"""Freed memory stays in the process, and the environment's own settings win."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# Two arrays of a step in each of 50 turns, as XLA allocates them.
PROGRAM = """
import json, resource, sys
from layerkit_runner.distributed.host_memory import keep_freed_memory
assert "numpy" not in sys.modules and "jax" not in sys.modules
was_set = keep_freed_memory()
import numpy as np
def turn():
    one = np.ones(2**23, np.uint8)
    other = np.ones(2**22, np.uint8)
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    turn()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps({"was_set": was_set, "faults": faults}))
"""


def run(**variables: str) -> dict[str, Any]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "JAX_"))}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def test_memory_of_a_step_is_not_mapped_again():
    kept, default = run(JAX_PLATFORMS="cpu"), run(JAX_PLATFORMS="cuda")
    assert (kept["was_set"], default["was_set"]) == (True, False)
    # 50 turns of 12 MB are 150,000 pages of 4 KB, or 300 of 2 MB.
    assert kept["faults"] < 50 < default["faults"]


@pytest.mark.parametrize(
    "variable", ["MALLOC_TRIM_THRESHOLD_=1000000", "GLIBC_TUNABLES=glibc.malloc.arena_max=2"]
)
def test_settings_of_the_environment_win(variable: str):
    name, _, value = variable.partition("=")
    assert not run(JAX_PLATFORMS="cpu", **{name: value})["was_set"]
