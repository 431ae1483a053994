"""What a compiled step needs besides its arguments and results."""

from __future__ import annotations

from typing import Any


def temporary_bytes(stats: Any, *, platform: str) -> int:
    """Bytes of gradients, activations and workspace on a device, at the moment of the peak.

    The compiler of TPUs counts temporaries that are never there together: 31 GB of them, beside 6
    GB of arguments, in a step that it fits into 33 GB. What counts is what its peak leaves them.
    Others allocate them for the whole step.

    Args:
      stats: What `memory_analysis()` of a compiled function returned.
      platform: Of the devices that it was compiled for.
    """
    others = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    if platform != "tpu" or stats.peak_memory_in_bytes < others:  # some runtimes tell no peak
        return int(stats.temp_size_in_bytes)
    return int(stats.peak_memory_in_bytes - others)
