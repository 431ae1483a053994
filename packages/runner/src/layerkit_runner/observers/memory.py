"""Memory of this process: what its devices hold, and the process itself."""

from __future__ import annotations

import contextlib
import os


def memory_scalars() -> dict[str, float]:
    """Bytes in use, by name; what cannot be known is left out.

    Returns:
      memory/device_bytes_in_use and memory/device_peak_bytes_in_use (since the process began) of
      the fullest of this process's devices, which a CPU does not tell; memory/host_rss_bytes, the
      resident memory of this process, where the system has /proc.
    """
    import jax  # observers are imported without it

    scalars = {}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    for name in ("bytes_in_use", "peak_bytes_in_use"):
        known = [of_device[name] for of_device in stats if name in of_device]
        if known:
            scalars[f"memory/device_{name}"] = float(max(known))
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as statm:
        scalars["memory/host_rss_bytes"] = float(
            int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        )
    return scalars
