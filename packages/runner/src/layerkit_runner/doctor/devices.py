"""The devices: which there are, whether they compute, attend and reach each other.

Each check compares with what NumPy or arithmetic says, since a device that computes wrongly is
worse than one that does not compute.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from layerkit.layers.attention.backends import BACKEND_NAMES, obstacles
from layerkit.layers.attention.dot_product import describe_call, dot_product_attention
from layerkit.layers.masks import AttentionMask
from layerkit_runner.byte_sizes import size_text
from layerkit_runner.doctor.finding import Finding, Problem
from layerkit_runner.doctor.machine import num_nvidia_gpus

_MATRIX = 256
_FAST_MATRIX = 8192
_FAST_PRODUCTS = 10
# Of the fastest: what lies below runs hot, or shares itself with somebody else.
_SLOW_SHARE = 0.8

_LENGTH, _HEADS, _HEAD_DIM = 256, 2, 128
# Of bfloat16 and float32 against float64.
_TOLERANCES = {"bfloat16": 3e-2, "float32": 1e-3}

_COLLECTIVE_BYTES = 64 << 20
_COLLECTIVE_BYTES_ON_CPU = 1 << 20
_COLLECTIVE_RUNS = 5


def check_devices(options: Mapping[str, Any]) -> Finding:
    """Kind, number and memory of the devices that JAX has."""
    del options
    devices = jax.local_devices()
    memory = [_device_memory(device) for device in devices]
    kinds = sorted({device.device_kind for device in devices})
    platform = devices[0].platform
    lines = [f"{len(devices)} × {', '.join(kinds)} ({platform}), JAX {jax.__version__}"]
    limits = [limit for _, limit in memory if limit is not None]
    if limits:
        used = max(used or 0 for used, _ in memory)
        lines.append(f"{size_text(min(limits))} of memory each, {size_text(used)} in use")
    else:
        lines.append("memory: that of the host")
    records = [
        {"id": device.id, "kind": device.device_kind, "bytes_in_use": used, "bytes_limit": limit}
        for device, (used, limit) in zip(devices, memory, strict=True)
    ]
    values = {"platform": platform, "devices": records}
    return Finding(lines, values, list(_unused_hardware(platform)))


def _device_memory(device: Any) -> tuple[int | None, int | None]:
    stats = device.memory_stats() or {}
    return stats.get("bytes_in_use"), stats.get("bytes_limit")


def _unused_hardware(platform: str) -> Iterator[Problem]:
    gpus = num_nvidia_gpus()
    if platform != "cpu" or not gpus:
        return
    asked = os.environ.get("JAX_PLATFORMS")
    if asked:
        yield Problem(
            f"This machine has {gpus} NVIDIA GPU(s), and JAX_PLATFORMS={asked} hides them.",
            "unset JAX_PLATFORMS, unless that is meant.",
            fails=False,
        )
        return
    yield Problem(
        f"This machine has {gpus} NVIDIA GPU(s), and JAX has the CPU alone.",
        "pip install 'layerkit-runner[cuda]', and look whether CUDA_VISIBLE_DEVICES is empty.",
    )


def check_arithmetic(options: Mapping[str, Any]) -> Finding:
    """A product of matrices on every device, compared entry by entry; on accelerators its speed."""
    del options
    draw = np.random.default_rng(0)
    left, right = (draw.integers(-1, 2, (_MATRIX, _MATRIX)).astype(np.float32) for _ in range(2))
    expected = left @ right  # whole numbers up to 256, which bfloat16 inputs give exactly
    wrong, speeds = [], {}
    for device in jax.local_devices():
        on_device = jax.device_put((left, right), device)
        if not np.array_equal(np.asarray(_product(*on_device)), expected):
            wrong.append(device.id)
        if device.platform != "cpu":
            speeds[device.id] = _tflops(device)
    problems = [
        Problem(
            f"Device {number} multiplies matrices wrongly.",
            "Take it out of use, and have it examined.",
        )
        for number in wrong
    ]
    fastest = max(speeds.values(), default=0.0)
    problems += [
        Problem(
            f"Device {number} makes {speed:.0f} TFLOP/s where another one makes {fastest:.0f}; a"
            " step waits for the slowest.",
            "Look whether another program uses it, or whether it is throttled.",
            fails=False,
        )
        for number, speed in speeds.items()
        if speed < _SLOW_SHARE * fastest
    ]
    count = jax.local_device_count()
    lines = [f"products of matrices are right on {count - len(wrong)} of {count} device(s)"]
    if speeds:
        slowest = min(speeds.values())
        lines.append(f"bfloat16 products of {_FAST_MATRIX}²: {slowest:.0f} TFLOP/s or more on each")
    values = {"wrong_devices": wrong, "tflops": {str(k): v for k, v in speeds.items()}}
    return Finding(lines, values, problems)


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """`[n, n]` × `[n, n]`, of bfloat16, added up in float32."""
    left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def _tflops(device: Any) -> float:
    square = jax.device_put(jnp.zeros((_FAST_MATRIX, _FAST_MATRIX), jnp.bfloat16), device)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _FAST_PRODUCTS, lambda _, y: x @ y, x)

    chain(square).block_until_ready()
    began = time.perf_counter()
    chain(square).block_until_ready()
    seconds = time.perf_counter() - began
    return float(2 * _FAST_MATRIX**3 * _FAST_PRODUCTS / seconds / 1e12)


def check_attention(options: Mapping[str, Any]) -> Finding:
    """Which attention backends run here, each tried forward and backward on one device."""
    del options
    lines, values, problems = [], {}, []
    for name in BACKEND_NAMES:
        if name == "auto":
            continue
        why = _attention_obstacles(name)
        if why:
            lines.append(f"{name}: not here, {'; '.join(why)}")
            values[name] = {"runs": False, "why": why}
            continue
        try:
            forward, backward = _attention_errors(name)
        except Exception as error:  # whatever a compiler or driver comes up with
            first = (str(error).strip().splitlines() or [""])[0]
            lines.append(f"{name}: does not run")
            values[name] = {"runs": False, "why": [first]}
            problems.append(_attention_problem(f"{name} fails: {type(error).__name__}: {first}"))
            continue
        tolerance = _TOLERANCES[_attention_dtype().name]
        values[name] = {"runs": True, "forward_error": forward, "backward_error": backward}
        lines.append(f"{name}: runs; off by {forward:.1g} forward, {backward:.1g} backward")
        if not max(forward, backward) <= tolerance:
            problems.append(
                _attention_problem(f"{name} computes other numbers than it should, see above.")
            )
    return Finding(lines, values, problems)


def _attention_problem(what: str) -> Problem:
    return Problem(
        f"Attention backend {what}",
        "Use another one: --fdl.ATTENTION_BACKEND=xla, or the field `backend` of the attention.",
    )


def _attention_dtype() -> Any:
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def _attention_arrays() -> list[np.ndarray]:
    """Queries, keys, values and a gradient, `[batch, length, heads, head_dim]`."""
    draw = np.random.default_rng(0)
    shape = (1, _LENGTH, _HEADS, _HEAD_DIM)
    drawn = [jnp.asarray(draw.normal(size=shape), _attention_dtype()) for _ in range(4)]
    return [np.asarray(array, np.float64) for array in drawn]


def _attention_obstacles(name: str) -> list[str]:
    shape = jax.ShapeDtypeStruct((1, _LENGTH, _HEADS, _HEAD_DIM), _attention_dtype())
    return obstacles(
        name, describe_call(shape, shape, shape, mask=AttentionMask.causal_mask(1, _LENGTH))
    )


def _attention_errors(name: str) -> tuple[float, float]:
    """How far outputs and gradients are from those of NumPy, relative to the largest of them."""
    arrays = _attention_arrays()
    query, key, value, gradient = (jnp.asarray(array, _attention_dtype()) for array in arrays)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        mask = AttentionMask.causal_mask(1, _LENGTH)
        return dot_product_attention(
            query, key, value, mask=mask, scale=_HEAD_DIM**-0.5, backend=name
        )

    @jax.jit
    def both(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, pull_back(gradient)

    out, gradients = both(query, key, value)
    expected, expected_gradients = attention_by_numpy(*arrays)
    pairs = zip(gradients, expected_gradients, strict=True)
    return _error(out, expected), max(_error(found, wanted) for found, wanted in pairs)


def _error(found: Any, wanted: np.ndarray) -> float:
    worst = np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()
    return float(worst)


def attention_by_numpy(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Causal attention and its gradients, as the equations say.

    Args:
      query: `[batch, length, heads, head_dim]`, like the others.
      key: See query.
      value: See query.
      gradient: Of the output.

    Returns:
      The output, and the gradients of queries, keys and values.
    """
    scale, length = query.shape[-1] ** -0.5, query.shape[1]
    logits = scale * np.einsum("bqhd,bkhd->bhqk", query, key)
    logits = np.where(np.tri(length, dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bhqk,bkhd->bqhd", weights, value)
    of_weights = np.einsum("bqhd,bkhd->bhqk", gradient, value)
    mean = (of_weights * weights).sum(axis=-1, keepdims=True)
    of_logits = scale * weights * (of_weights - mean)
    return out, [
        np.einsum("bhqk,bkhd->bqhd", of_logits, key),
        np.einsum("bhqk,bqhd->bkhd", of_logits, query),
        np.einsum("bhqk,bqhd->bkhd", weights, gradient),
    ]


def check_collectives(options: Mapping[str, Any]) -> Finding:
    """A sum over all devices and a gathering from all of them: the results, and how fast."""
    del options
    devices = jax.local_devices()
    if len(devices) == 1:
        return Finding(["one device, which need not reach others"], {"num_devices": 1})
    mesh = Mesh(np.asarray(devices), ("all",), axis_types=(AxisType.Auto,))
    on_cpu = devices[0].platform == "cpu"
    size = (_COLLECTIVE_BYTES_ON_CPU if on_cpu else _COLLECTIVE_BYTES) // 4
    rows = NamedSharding(mesh, PartitionSpec("all"))
    # Row i is all i + 1, made on its own device.
    numbers = jax.jit(
        lambda: jnp.broadcast_to(jnp.arange(1.0, len(devices) + 1)[:, None], (len(devices), size)),
        out_shardings=rows,
    )()
    count = len(devices)
    lines, problems = [], []
    values: dict[str, Any] = {"num_devices": count}
    for name, collective, expected, sent in (
        ("psum", _sum, count * (count + 1) / 2, 8 * size * (count - 1) / count),
        ("all_gather", _gather, np.arange(1, count + 1), 4 * size * (count - 1)),
    ):
        is_right, seconds = _try_collective(collective(mesh), numbers, expected)
        values[name] = {"is_right": is_right, "bytes_per_second": sent / seconds}
        verdict = "right" if is_right else "WRONG"
        lines.append(f"{name} over {count} devices: {verdict}, {size_text(sent / seconds)}/s each")
        if not is_right:
            problems.append(
                Problem(
                    f"{name} over the {count} devices gives wrong numbers.",
                    "For NVIDIA GPUs try NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1, one after the"
                    " other, to find the broken way between them.",
                )
            )
    return Finding(lines, values, problems)


def _sum(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """`[devices, n]` split over devices → `[1, n]` on each of them."""
    return jax.jit(
        jax.shard_map(
            lambda row: jax.lax.psum(row, "all"),
            mesh=mesh,
            in_specs=PartitionSpec("all"),
            out_specs=PartitionSpec(),
        )
    )


def _gather(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """`[devices, n]` split over devices → the whole on each of them."""
    return jax.jit(
        jax.shard_map(
            lambda row: jax.lax.all_gather(row, "all", tiled=True),
            mesh=mesh,
            in_specs=PartitionSpec("all"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def _try_collective(
    collective: Callable[[jax.Array], jax.Array], numbers: jax.Array, expected: Any
) -> tuple[bool, float]:
    """Whether every device has the right result, and the seconds of the fastest run."""
    result = collective(numbers).block_until_ready()
    columns = np.broadcast_to(np.reshape(expected, (-1, 1)), (result.shape[0], 1))
    is_right = all(
        np.array_equal(np.asarray(shard.data), np.broadcast_to(columns, result.shape))
        for shard in result.addressable_shards
    )
    fastest = math.inf
    for _ in range(_COLLECTIVE_RUNS):
        began = time.perf_counter()
        collective(numbers).block_until_ready()
        fastest = min(fastest, time.perf_counter() - began)
    return is_right, fastest
