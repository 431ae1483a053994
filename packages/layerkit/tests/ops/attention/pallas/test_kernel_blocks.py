"""Default blocks of the Pallas kernels by kind of device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.ops.attention.pallas.flash_tpu import SplashAttention
from layerkit.ops.attention.pallas.kernel_blocks import GpuTile, KernelBlocks, gpu_tiles, tpu_blocks


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("TPU v4", KernelBlocks((512, 512), (512, 512), (512, 512))),
        ("TPU v5p", KernelBlocks((512, 512), (512, 512), (512, 512))),
        ("TPU v6 lite", KernelBlocks((1024, 512), (2048, 512), (2048, 512))),
    ],
)
def test_default_blocks_of_a_tpu_reach_its_kernel(kind, expected):
    query = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16)
    kernel = SplashAttention(1.0, device_kind=kind).kernel(query, query, None)
    sizes = kernel.kwargs["block_sizes"]
    result = KernelBlocks(
        (sizes.block_q, sizes.block_kv),
        (sizes.block_q_dq, sizes.block_kv_dq),
        (sizes.block_q_dkv, sizes.block_kv_dkv),
    )
    assert result == expected


@pytest.mark.parametrize("kind", ["TPU v5p", "TPU v6 lite"])
def test_given_blocks_replace_those_of_the_device(kind):
    blocks = tpu_blocks((256, 128), lengths=(4096, 4096), device_kind=kind)
    assert blocks == KernelBlocks((256, 128), (256, 128), (256, 128))


def test_blocks_divide_the_lengths():
    blocks = tpu_blocks(None, lengths=(1536, 384), device_kind="TPU v6 lite")
    assert blocks == KernelBlocks((512, 128), (512, 128), (512, 128))
    tiles = gpu_tiles(
        None, lengths=(48, 96), dtype=np.float16, largest_dim=64, device_kind="NVIDIA L4"
    )
    assert set(tiles) == {GpuTile(16, 32, stages=2)}


@pytest.mark.parametrize(
    ("dtype", "largest_dim", "size"),
    [(jnp.bfloat16, 128, 64), (jnp.bfloat16, 192, 32), (jnp.float32, 64, 32)],
)
@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "cpu"])
def test_blocks_of_gpus_depend_on_the_size_of_a_head(dtype, largest_dim, size, kind):
    tiles = gpu_tiles(
        None, lengths=(1024, 1024), dtype=dtype, largest_dim=largest_dim, device_kind=kind
    )
    assert set(tiles) == {GpuTile(size, size, stages=2)}


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_hopper_has_blocks_of_its_own_for_each_pass(kind):
    options = {"lengths": (1024, 1024), "device_kind": kind}
    tiles = gpu_tiles(None, dtype=jnp.bfloat16, largest_dim=96, **options)
    assert tiles.query_gradient == GpuTile(128, 64, stages=3)
    assert tiles.query_gradient.warps == 8 and tiles.forward.warps == 4
    # Larger heads, float32 and given blocks do not use them.
    for dim, dtype, most, size in (
        (512, jnp.bfloat16, None, 32),
        (64, jnp.float32, None, 32),
        (64, jnp.bfloat16, (16, 16), 16),
    ):
        tiles = gpu_tiles(most, dtype=dtype, largest_dim=dim, **options)
        assert set(tiles) == {GpuTile(size, size, stages=2)}
