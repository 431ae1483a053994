"""What XLA must be told of a GPU that is not here, to compile for it.

On a machine with GPUs it asks the driver; elsewhere it takes the same answers as the text of a
`GpuTargetConfigProto`. Figures are those that CUDA reports (`cudaDeviceProp`), which NVIDIA's
tuning guides print too: multiprocessors, registers, shared memory and caches of each architecture.
"""

from __future__ import annotations

import dataclasses

from layerkit_runner.tools.plan.hardware import DeviceKind

_KIB = 2**10
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class _Chip:
    """An NVIDIA chip.

    Attributes:
      compute_capability: Major and minor.
      multiprocessors: Of the product, which has fewer than the silicon.
      float32_units: Of a multiprocessor.
      shared_memory: Bytes of a multiprocessor.
      shared_memory_of_block: Most bytes that one block may ask for.
      l2_bytes: Of its second cache.
      clock_ghz: At most.
    """

    compute_capability: tuple[int, int]
    multiprocessors: int
    float32_units: int
    shared_memory: int
    shared_memory_of_block: int
    l2_bytes: int
    clock_ghz: float


_AMPERE = _Chip((8, 0), 108, 64, 164 * _KIB, 163 * _KIB, 40 * _MIB, 1.41)
_HOPPER = _Chip((9, 0), 132, 128, 228 * _KIB, 227 * _KIB, 50 * _MIB, 1.98)
_BLACKWELL = _Chip((10, 0), 148, 128, 228 * _KIB, 227 * _KIB, 132_644_864, 1.965)

_CHIPS = {
    "a100": _AMPERE,
    "a100-40gb": _AMPERE,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _BLACKWELL,
}


def target_config(kind: DeviceKind) -> str:
    """The text of XLA's description of a GPU of the table."""
    chip = _CHIPS[kind.name]
    major, minor = chip.compute_capability
    assert kind.memory_bandwidth is not None
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * _KIB,
        "shared_memory_per_core": chip.shared_memory,
        "shared_memory_per_block_optin": chip.shared_memory_of_block,
        "threads_per_core_limit": 2048,
        "core_count": chip.multiprocessors,
        "fpus_per_core": chip.float32_units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": round(kind.memory_bandwidth),
        "l2_cache_size": chip.l2_bytes,
        "clock_rate_ghz": chip.clock_ghz,
        "device_memory_size": kind.memory_bytes,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "cuda_compute_capability": f"{{ major: {major} minor: {minor} }}",
    }
    fields = " ".join(f"{name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{ {fields} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 2 }\n"
        "runtime_version { major: 12 minor: 9 patch: 0 }\n"
        f'device_description_str: "{kind.device_kind}"\n'
    )
