"""Peak matrix throughput of the devices that models train on, for model FLOPs utilisation.

Figures are dense (no structured sparsity) bfloat16 FLOP/s of one JAX device. Two kinds older than
bfloat16, V100 and T4, stand with float16. Vendors print the double for GPUs since Ampere, with
sparsity; the halves stand here. Where a TPU chip is two JAX devices, each has half of the chip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# The first pattern that matches the whole device kind wins, so variants stand before their family.
_TERA = 1e12
_PEAKS: tuple[tuple[str, float | None], ...] = (
    # Cloud TPU documentation, "Peak compute per chip (bf16)", one page per version.
    # A v2 or v3 chip (45, 123 TFLOP/s) is two devices; so is a TPU7x chip (2307).
    (r"TPU v2", 22.5 * _TERA),
    (r"TPU v3", 61.5 * _TERA),
    # TPU v4i: Jouppi et al., "Ten Lessons From Three Generations", 2021.
    (r"TPU v4 lite", 138 * _TERA),
    (r"TPU v4", 275 * _TERA),
    (r"TPU v5 lite|TPU v5e", 197 * _TERA),
    (r"TPU v5|TPU v5p", 459 * _TERA),
    (r"TPU v6 lite|TPU v6e", 918 * _TERA),
    (r"TPU7x", 2307 / 2 * _TERA),
    # NVIDIA data sheets and architecture white papers of each product. A slice of a partitioned
    # GPU has less than the whole, so names with MIG are left to the user.
    (r".*\bMIG\b.*", None),
    (r".*\bGB300\b.*", 2500 * _TERA),
    (r".*\bGB200\b.*", 2500 * _TERA),
    (r".*\bB300\b.*", 2250 * _TERA),
    (r".*\bB200\b.*", 2250 * _TERA),
    (r".*\bH200 NVL\b.*", 835.5 * _TERA),
    (r".*\b(GH200|H200)\b.*", 989.4 * _TERA),
    (r".*\bH100 NVL\b.*", 835.5 * _TERA),
    (r".*\bH100 PCIe\b.*", 756 * _TERA),
    (r".*\bH100\b.*", 989.4 * _TERA),
    (r".*\bA100\b.*", 312 * _TERA),
    (r".*\bL40S\b.*", 362 * _TERA),
    (r".*\bL4\b.*", 121 * _TERA),
    (r".*\bV100\b.*", 125 * _TERA),  # float16
    (r".*\bT4\b.*", 65 * _TERA),  # float16
)


def peak_flops(device_kind: str, *, overrides: Mapping[str, float] | None = None) -> float | None:
    """Dense bfloat16 FLOP/s of one device, or None where nothing reliable is known (any CPU).

    Args:
      device_kind: as `jax.Device.device_kind` says it.
      overrides: figures by exact device kind; they go before the table.

    >>> peak_flops('NVIDIA H100 80GB HBM3')
    989400000000000.0
    >>> peak_flops('cpu') is None
    True
    """
    if overrides is not None and device_kind in overrides:
        return overrides[device_kind]
    for pattern, peak in _PEAKS:
        if re.fullmatch(pattern, device_kind):
            return peak
    return None
