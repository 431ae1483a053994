"""Sizes of the blocks of the Pallas kernels of attention, by kind of device.

They affect speed and memory of the chip, not results. The field `kernel_blocks` of attention layers
replaces all of them. The sources of the defaults:

- Hopper GPUs: measured on an H200 with causal rows of 2048 and 4096 tokens in bfloat16
  (benchmarks/README.md, Attention on GPUs). They are the fastest of 15 combinations of block,
  warps and stages, with heads of 64, 128 and 256.
- Other GPUs: tokamax (`ops/attention/pallas_triton.py`) selects blocks of at most 64 by 64 with 4
  warps and 2 stages for a kernel of the same method. Larger ones do not fit the registers of a
  program, and exact products of float32 blocks are unrolled, which takes minutes to compile.
- TPUs: MaxText (`configs/base.yml`, `sa_block_*`) has 512 by 512 in all passes.
- TPU v6e: MaxText (`benchmarks/maxtext_trillium_model_configs.py`) has more queries for Llama 2, 3
  and GPT-3: 1024 forward, 2048 backward.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp

from layerkit.ops.implementations import HOPPER

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FusedAttention:
    """The options of a fused kernel of attention, of which a kernel may read some only.

    Attributes:
      scale: Factor of the products of queries and keys.
      logit_cap: Bound of the logits, which tanh squeezes into ±logit_cap; None for no bound.
      blocks: Largest number of (queries, keys) in a block, powers of two; None for the default of
        this module.
      device_kind: JAX's name of the kind of device, for the default blocks.
      interpret: True to run the kernels in interpret mode on any device, for tests.
    """

    scale: float
    logit_cap: float | None = None
    blocks: tuple[int, int] | None = None
    device_kind: str = ""
    interpret: bool = False


class Passes(NamedTuple, Generic[T]):
    """A value for each pass of attention.

    Attributes:
      forward: Value of the forward pass.
      query_gradient: Value of the gradient of queries.
      key_gradients: Value of the gradients of keys and values.
    """

    forward: T
    query_gradient: T
    key_gradients: T


KernelBlocks = Passes[tuple[int, int]]
"""Numbers of (queries, keys) in a block of each pass."""


_ALL_TPUS = KernelBlocks((512, 512), (512, 512), (512, 512))
# By the start of JAX's `device_kind`.
_TPU_KINDS = {"TPU v6": KernelBlocks((1024, 512), (2048, 512), (2048, 512))}


class GpuTile(NamedTuple):
    """The block of a pass on a GPU, and how Triton compiles its loop.

    Attributes:
      queries: Queries in a block.
      keys: Keys in a block.
      stages: Number of blocks that are loaded ahead.
    """

    queries: int
    keys: int
    stages: int = 2

    @property
    def warps(self) -> int:
        """The number of warps of a program, whose registers hold the sums of a block."""
        return 4 if max(self.queries, self.keys) <= 64 else 8


# By the largest size of a head.
_HOPPER_TILES = {
    64: Passes(*[GpuTile(64, 64, stages=3)] * 3),
    128: Passes(GpuTile(64, 64, stages=3), GpuTile(128, 64, stages=3), GpuTile(64, 64)),
    256: Passes(GpuTile(64, 32), GpuTile(64, 64), GpuTile(64, 32)),
}


def gpu_tiles(
    most: tuple[int, int] | None,
    *,
    lengths: tuple[int, int],
    dtype: Any,
    largest_dim: int,
    device_kind: str,
) -> Passes[GpuTile]:
    """Return the blocks on GPUs.

    Args:
      most: Largest numbers of (queries, keys) in all passes, powers of two; None for the default
        of the device.
      lengths: Numbers of (queries, keys) in a row, which the blocks divide.
      dtype: Dtype of queries, keys and values.
      largest_dim: Size of a head of keys or of values, the larger of the two.
      device_kind: JAX's name of the kind of device.
    """
    in_float32 = jnp.dtype(dtype) == jnp.float32
    size = 64 if largest_dim <= 128 and not in_float32 else 32
    tiles = Passes(*[GpuTile(*(most or (size, size)))] * 3)
    if most is None and not in_float32 and HOPPER.match(device_kind):
        fitting = [dim for dim in _HOPPER_TILES if dim >= largest_dim]
        tiles = _HOPPER_TILES[min(fitting)] if fitting else tiles
    return Passes(
        *(
            tile._replace(
                queries=math.gcd(lengths[0], tile.queries), keys=math.gcd(lengths[1], tile.keys)
            )
            for tile in tiles
        )
    )


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
