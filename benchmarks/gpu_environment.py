"""The GPUs that the figures of `gpu.py` are of, their driver, and versions; as a line of JSON."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from typing import Any

import jax

from layerkit.layers.attention.cudnn import has_cudnn
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.devices import target_devices
from layerkit_runner.tools.plan.targets import parse_target

_DISTRIBUTIONS = (
    "layerkit",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "flax",
    "optax",
)


def versions() -> dict[str, str]:
    """Of Python and of what is installed of that which decides the numbers."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(target: str | None, num_devices: int) -> dict[str, Any]:
    """What the figures are of: devices, driver, versions; or `reason`, why there can be none.

    Args:
      target: A kind of GPU that need not be here; None for those that are.
      num_devices: How many of that kind.
    """
    more: dict[str, Any] = {}
    try:
        if target is not None:
            devices = target_devices(parse_target(f"{target}x{num_devices}"))
        else:
            devices = _gpus()
    except UsageError as error:
        return {"reason": str(error)}
    if target is None and devices:
        more["memory_limit_bytes"] = (devices[0].memory_stats() or {}).get("bytes_limit")
        more["runtime"] = " ".join(devices[0].client.platform_version.split())
        more["driver"] = _driver()
    return {
        "devices": [device.device_kind for device in devices],
        "here": target is None,
        **more,
        "has_cudnn": has_cudnn(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.date.today().isoformat(),
    }


def _gpus() -> list[jax.Device]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


def _driver() -> str | None:
    """Driver, power limit and highest clock of the first GPU, as `nvidia-smi` says them."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    fields = "driver_version,power.limit,clocks.max.sm"
    query = [command, f"--query-gpu={fields}", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return found.stdout.strip().splitlines()[0] if found.stdout.strip() else None


def main() -> None:
    """Prints the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a kind of GPU that need not be here")
    parser.add_argument("--devices", type=int, default=1, help="of that kind")
    args = parser.parse_args()
    print(json.dumps(environment(args.target, args.devices)))


if __name__ == "__main__":
    main()
