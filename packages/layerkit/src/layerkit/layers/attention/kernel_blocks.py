"""Sizes of the blocks of the Pallas kernels of attention, by kind of device.

They affect speed and memory of the chip, not results. The field `kernel_blocks` of attention layers
replaces all of them. None of these numbers was measured in this project; each has its source:

- GPUs: tokamax (`ops/attention/pallas_triton.py`) selects blocks of at most 64 by 64 with 4 warps
  and 2 stages for a kernel of the same method on all GPUs. Larger ones do not fit the registers of
  a program, and exact products of float32 blocks are unrolled, which takes minutes to compile.
- TPUs: MaxText (`configs/base.yml`, `sa_block_*`) has 512 by 512 in all passes.
- TPU v6e: MaxText (`benchmarks/maxtext_trillium_model_configs.py`) has more queries for Llama 2, 3
  and GPT-3: 1024 forward, 2048 backward.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp


class KernelBlocks(NamedTuple):
    """Numbers of (queries, keys) in a block of each pass.

    Attributes:
      forward: Blocks of the forward pass.
      query_gradient: Blocks of the gradient of queries.
      key_gradients: Blocks of the gradients of keys and values.
    """

    forward: tuple[int, int]
    query_gradient: tuple[int, int]
    key_gradients: tuple[int, int]


_ALL_TPUS = KernelBlocks((512, 512), (512, 512), (512, 512))
# By the start of JAX's `device_kind`.
_TPU_KINDS = {"TPU v6": KernelBlocks((1024, 512), (2048, 512), (2048, 512))}


def gpu_blocks(
    most: tuple[int, int] | None, *, lengths: tuple[int, int], dtype: Any, largest_dim: int
) -> tuple[int, int]:
    """Return the number of (queries, keys) in a block of all passes on GPUs.

    Args:
      most: Largest numbers, powers of two; None for the default.
      lengths: Numbers of (queries, keys) in a row, which the blocks divide.
      dtype: Dtype of queries, keys and values.
      largest_dim: Size of a head of keys or of values, the larger of the two.
    """
    if most is None:
        size = 64 if largest_dim <= 128 and jnp.dtype(dtype) != jnp.float32 else 32
        most = (size, size)
    return math.gcd(lengths[0], most[0]), math.gcd(lengths[1], most[1])


def tpu_blocks(
    most: tuple[int, int] | None, *, lengths: tuple[int, int], device_kind: str
) -> KernelBlocks:
    """Return the blocks on TPUs.

    Args:
      most: Largest numbers of (queries, keys) in all passes, powers of two; None for the default
        of the device.
      lengths: Numbers of (queries, keys) in a row, multiples of 128, which the blocks divide.
      device_kind: JAX's name of the kind of device.
    """
    largest = _ALL_TPUS if most is None else KernelBlocks(most, most, most)
    if most is None:
        for kind, blocks in _TPU_KINDS.items():
            largest = blocks if device_kind.startswith(kind) else largest
    return KernelBlocks(
        *(
            (max(128, math.gcd(lengths[0], queries)), max(128, math.gcd(lengths[1], keys)))
            for queries, keys in largest
        )
    )
