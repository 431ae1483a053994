"""Removed XLA flags: each is named with its successor, and the installed XLA lacks each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from layerkit_runner.distributed.launchers import SUCCESSORS, check_removed_flags
from layerkit_runner.errors import UsageError

# The flags of NVIDIA's Pax page, of which XLA has removed the second and the third.
PUBLISHED = (
    "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_async_all_gather=true"
    " --xla_gpu_enable_async_reduce_scatter=true --xla_gpu_enable_triton_gemm=false"
)


def test_flags_of_the_published_page_are_named_with_their_successor(raises):
    removed = "--xla_gpu_enable_async_all_gather=true --xla_gpu_enable_async_reduce_scatter=true"
    with raises(UsageError, field="XLA_FLAGS", value=removed) as caught:
        check_removed_flags({"XLA_FLAGS": PUBLISHED})
    assert "--xla_gpu_disable_async_collectives" in str(caught.value)
    kept = " ".join(flag for flag in PUBLISHED.split() if "async" not in flag)
    check_removed_flags({"XLA_FLAGS": kept})
    check_removed_flags({})


@pytest.mark.parametrize("name", ["xla_gpu_enable_async_all_gather", "xla_gpu_graph_level"])
def test_command_line_names_a_removed_flag_before_jax_is_imported(name: str):
    code = (
        "import sys; from layerkit_runner.cli import main;"
        " code = main(['--exp=lm.quickstart.LocalText', '--job_log_dir=unused']);"
        " print('jax' in sys.modules); sys.exit(code)"
    )
    environment = {**os.environ, "XLA_FLAGS": f"--{name}=0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert f"--{name}=0" in done.stderr


def test_installed_xla_lacks_every_flag_of_the_table():
    """XLA names the flags that it does not know when it ends the process."""
    flags = {f"--{name}=true" for name in SUCCESSORS}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(sorted(flags))}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (line,) = (line for line in failed.stderr.splitlines() if "Unknown flags in XLA_FLAGS" in line)
    assert flags <= set(line.split())
