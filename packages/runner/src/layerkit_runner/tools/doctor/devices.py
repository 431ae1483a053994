"""Checks of the devices, with JAX: whether they compute correctly and reach each other."""

from __future__ import annotations

import functools
import glob
import os
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from layerkit_runner.files.text import size_text
from layerkit_runner.tools.doctor import Finding, Problem

# The driver creates these folders, whether JAX uses the devices or not.
_NVIDIA_GPUS = "/proc/driver/nvidia/gpus/*"
_MATRIX = 256
_BYTES = 64 << 20
_BYTES_ON_CPU = 1 << 20
_RUNS = 5


def check_devices() -> Finding:
    """Report kind, number and memory of the devices, and multiply matrices on each of them."""
    devices = jax.local_devices()
    platform, kind = devices[0].platform, devices[0].device_kind
    draw = np.random.default_rng(0)
    left, right = (draw.integers(-1, 2, (_MATRIX, _MATRIX)).astype(np.float32) for _ in range(2))
    expected = left @ right  # integers up to 256, which bfloat16 inputs give exactly
    records, problems = [], list(_unused_gpus(platform))
    for device in devices:
        stats = device.memory_stats() or {}
        memory = {key: stats.get(key) for key in ("bytes_in_use", "bytes_limit")}
        records.append({"id": device.id, "kind": device.device_kind, **memory})
        if not np.array_equal(_product(*jax.device_put((left, right), device)), expected):
            what = f"Device {device.id} multiplies matrices wrongly."
            problems.append(Problem(what, "Remove it and have it examined."))
    lines = [f"{len(devices)} × {kind} ({platform}), JAX {jax.__version__}"]
    limits = [record["bytes_limit"] for record in records if record["bytes_limit"] is not None]
    if limits:
        used = max(record["bytes_in_use"] or 0 for record in records)
        lines.append(f"{size_text(min(limits))} of memory each, {size_text(used)} in use")
    return Finding(lines, {"platform": platform, "devices": records}, problems)


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return the product of `[n, n]` matrices in bfloat16, accumulated in float32."""
    left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def _unused_gpus(platform: str) -> Iterator[Problem]:
    count = len(glob.glob(_NVIDIA_GPUS)) if platform == "cpu" else 0
    chosen = os.environ.get("JAX_PLATFORMS")
    if count and chosen:
        what = f"This machine has {count} NVIDIA GPU(s), and JAX_PLATFORMS={chosen} hides them."
        yield Problem(what, "Unset JAX_PLATFORMS to use them.", fails=False)
    elif count:
        what = f"This machine has {count} NVIDIA GPU(s), and JAX sees only the CPU."
        to_do = "pip install 'layerkit-runner[cuda]', and check CUDA_VISIBLE_DEVICES."
        yield Problem(what, to_do)


def check_collectives() -> Finding:
    """Sum numbers over all devices, and report the result and the speed of the fastest run."""
    devices = jax.local_devices()
    count = len(devices)
    if count == 1:
        return Finding(["one device, so none to check"], {"num_devices": 1})
    mesh = Mesh(np.asarray(devices), ("all",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("all"))
    size = (_BYTES_ON_CPU if devices[0].platform == "cpu" else _BYTES) // 4
    # Row i is filled with i + 1, on device i.
    row_numbers = np.arange(1.0, count + 1)[:, None]
    numbers = jax.jit(lambda: jnp.broadcast_to(row_numbers, (count, size)), out_shardings=rows)()
    psum = functools.partial(jax.lax.psum, axis_name="all")
    total = jax.jit(jax.shard_map(psum, mesh=mesh, in_specs=rows.spec, out_specs=PartitionSpec()))
    shards = total(numbers).addressable_shards
    is_right = all(np.all(np.asarray(shard.data) == row_numbers.sum()) for shard in shards)
    seconds = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        total(numbers).block_until_ready()
        seconds.append(time.perf_counter() - began)
    # Each device sends at least these bytes, as `--mode=plan` counts them.
    speed = 8 * size * (count - 1) / count / min(seconds)
    values = {"num_devices": count, "psum": {"is_right": is_right, "bytes_per_second": speed}}
    line = f"psum over {count} devices: {'correct' if is_right else 'WRONG'}, {size_text(speed)}/s"
    to_do = "For NVIDIA GPUs try NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1."
    problem = Problem(f"psum over the {count} devices gives wrong numbers.", to_do)
    return Finding([line], values, [] if is_right else [problem])


CHECKS = {"devices": check_devices, "collectives": check_collectives}
