"""Print devices, driver and package versions as a line of JSON, for `accelerators.py`."""

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
from accelerator_case import target_of

from layerkit.ops.attention.cudnn import find_missing_cudnn
from layerkit_runner.errors import UsageError
from layerkit_runner.tools.plan.targets import target_devices

_DISTRIBUTIONS = (
    "layerkit",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "flax",
    "optax",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect the figures."""
    result = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def environment(target: str | None, num_devices: int) -> dict[str, Any]:
    """Return devices, driver and versions, or `reason` if the devices cannot be used.

    Args:
      target: Devices of another machine, such as "h100" or "v5p:2x2x1". None means the local ones.
      num_devices: Number of devices.
    """
    more: dict[str, Any] = {}
    try:
        if target is not None:
            devices = target_devices(target_of(target, num_devices))
        else:
            devices = [device for device in jax.devices() if device.platform in ("gpu", "tpu")]
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
        "has_cudnn": not find_missing_cudnn(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.date.today().isoformat(),
    }


def _driver() -> str | None:
    """Return driver, power limit and maximum clock of the first GPU, printed by `nvidia-smi`."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    fields = "driver_version,power.limit,clocks.max.sm"
    query = [command, f"--query-gpu={fields}", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else None


def main() -> None:
    """Print the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="devices of another machine, such as h100")
    parser.add_argument("--devices", type=int, default=1, help="number of devices")
    args = parser.parse_args()
    print(json.dumps(environment(args.target, args.devices)))


if __name__ == "__main__":
    main()
