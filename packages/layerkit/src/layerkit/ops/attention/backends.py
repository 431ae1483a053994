"""Selection of the attention backend by the properties of a call.

`xla` is array code that supports every call on every platform and holds the logits `[batch, heads,
queries, keys]` in memory. The fused kernels never hold them (Dao et al., 2022, arXiv:2205.14135)
and support some calls only: `cudnn` is NVIDIA's kernel; `tokamax` is a library of kernels for
GPUs; `pallas` is one kernel for GPUs, whose end `layerkit.ops.triton` states, and one for TPUs.
`BACKENDS` is their table; see `layerkit.ops.implementations`. docs/attention_backends.md shows what
the tests prove of each row.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, get_args

import jax.numpy as jnp

from layerkit.config.checks import check_choice
from layerkit.ops import implementations
from layerkit.ops.implementations import (
    GPU_PLATFORMS,
    HOPPER,
    Implementation,
    ampere_or_later,
    check_supported,
    select,
)

BackendName = Literal["auto", "xla", "cudnn", "tokamax", "pallas"]
BACKEND_NAMES = get_args(BackendName)


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The properties of one attention that decide which backends support it.

    Attributes:
      platform: JAX's name of the platform that runs it: `cpu`, `gpu`, `cuda` or `tpu`.
      device_kind: JAX's name of the kind of device, such as `NVIDIA H100 80GB HBM3`.
      compute_capability: That of a CUDA device, such as `9.0`; "" if unknown.
      dtype: Dtype of queries.
      has_mixed_dtypes: True if keys or values have another dtype.
      head_dim: Size of a head of queries and keys.
      value_dim: Size of a head of values.
      num_queries: Queries per row.
      num_keys: Keys per row.
      is_causal: True if later keys are masked.
      is_in_row_order: True if positions are known to be the order of the row.
      window: Number of positions back that a query sees, itself included; None for all.
      reach: Largest numbers of tokens before and after a query that it sees; None if unknown.
      chunk: Number of positions of the mask's chunks; None for none.
      has_segments: True if rows hold several documents or padding.
      segments_are_runs: False if padding or another document may split a document.
      has_prefix: True if all queries of a row see a prefix of it.
      bias_dtype: Dtype of the bias of the logits; None if there is no bias.
      has_distance_bias: True if the bias is a `DistanceBias`.
      has_sinks: True if each head has an attention sink, a logit that takes probability and adds
        no value.
      has_logit_cap: True if logits are capped by tanh.
      has_dropout: True if probabilities are dropped.
      zeroes_empty_rows: True if a query that sees no key reads 0; otherwise it reads the mean of
        all values.
      num_length_shards: Number of devices over which the length of a row is split.
      uses_ring: True if keys and values of split rows are passed around a ring of devices.
      split_problem: Reason why rows and heads cannot be split over the devices; "" if they can.
    """

    platform: str
    dtype: Any
    head_dim: int
    value_dim: int
    num_queries: int
    num_keys: int
    device_kind: str = ""
    compute_capability: str = ""
    has_mixed_dtypes: bool = False
    is_causal: bool = False
    is_in_row_order: bool = True
    window: int | None = None
    reach: tuple[int, int] | None = None
    chunk: int | None = None
    has_segments: bool = False
    segments_are_runs: bool = True
    has_prefix: bool = False
    bias_dtype: Any = None
    has_distance_bias: bool = False
    has_sinks: bool = False
    has_logit_cap: bool = False
    has_dropout: bool = False
    zeroes_empty_rows: bool = False
    num_length_shards: int = 1
    uses_ring: bool = False
    split_problem: str = ""

    @property
    def queries_per_part(self) -> int:
        """Queries in one call of a kernel; a single query is on every device."""
        return max(1, self.num_queries // (self.num_length_shards * self._chunks_per_shard))

    @property
    def keys_per_part(self) -> int:
        """Keys in one call of a kernel."""
        shards = self.num_length_shards * self._chunks_per_shard if self.uses_ring else 1
        return max(1, self.num_keys // shards)

    @property
    def _chunks_per_shard(self) -> int:
        # A causal ring cuts each shard in two; see `layerkit.ops.attention.ring`.
        is_cut = self.uses_ring and self.is_causal and self.is_self_attention
        return 2 if is_cut and self.num_queries % (2 * self.num_length_shards) == 0 else 1

    @property
    def is_self_attention(self) -> bool:
        """True if query i and key i are known to be the same token, which thus sees itself."""
        return self.is_in_row_order and self.num_queries == self.num_keys

    @property
    def may_have_empty_rows(self) -> bool:
        """True if a query may see no key."""
        has_mask = self.is_causal or self.has_segments or self.window is not None
        return has_mask and not self.is_self_attention


def select_backend(name: str, call: AttentionCall) -> Implementation[AttentionCall]:
    """Return the row that runs a call: the named one, or for `auto` the first that can; log why.

    Args:
      name: One of `BACKEND_NAMES`.
      call: The attention.

    Raises:
      UnsupportedBackendError: The named backend does not support the call, or is not installed.
      ConfigError: The name is unknown.
    """
    check_choice(None, BACKEND_NAMES, backend=name)
    if call.uses_ring:
        check_supported(
            unmet_requirements("xla", call),
            operation="attention",
            alternative="context_parallel='all_gather' or 'ulysses'",
            field="context_parallel",
            value="ring",
        )
    place = {"operation": "attention backend", "field": "backend"}
    return select(BACKENDS, name, call, platform=call.platform, **place)


def unmet_requirements(name: str, call: AttentionCall) -> list[str]:
    """Return what a backend, such as `cudnn`, requires of a call that does not have it.

    Each entry is a noun phrase. The list is empty if the backend supports the call.
    """
    return implementations.unmet_requirements(BACKENDS, name, call, platform=call.platform)


def _half_precision(call: AttentionCall) -> dict[str, bool]:
    dtype = jnp.dtype(call.dtype)
    is_unmet = dtype not in (jnp.bfloat16, jnp.float16)
    return {f"bfloat16 or float16 instead of {dtype.name}": is_unmet}


def _bias_by_distance(call: AttentionCall) -> dict[str, bool]:
    is_split = call.num_length_shards > 1
    return {
        "no bias, or one by distance (DistanceBias)": (
            call.bias_dtype is not None and not call.has_distance_bias
        ),
        "rows that are not split over devices with a bias, or context_parallel='ulysses'": (
            call.has_distance_bias and is_split
        ),
    }


def _zeroed_empty_rows(call: AttentionCall) -> dict[str, bool]:
    reads_zero = call.zeroes_empty_rows or call.has_sinks
    requirement = "zero_fully_masked_rows=True, since a query that sees no key reads 0"
    return {requirement: call.may_have_empty_rows and not reads_zero}


def _fused_requirements(call: AttentionCall) -> dict[str, bool]:
    return {
        f"keys and values in the dtype of queries, {jnp.dtype(call.dtype).name}": (
            call.has_mixed_dtypes
        ),
        "no prefix": call.has_prefix,
        # Fused kernels could drop probabilities by random bits of their own only. The results of a
        # run would then depend on the backend.
        "no dropout": call.has_dropout,
        f"an even split over devices ({call.split_problem})": call.split_problem != "",
    }


def _same_tokens(call: AttentionCall) -> dict[str, bool]:
    requirement = "as many keys as queries, the same tokens in row order, where keys are masked"
    return {requirement: call.may_have_empty_rows}


def _whole_rows(call: AttentionCall) -> dict[str, bool]:
    requirement = "rows that are not split over devices, or context_parallel='ulysses'"
    return {requirement: call.num_length_shards > 1}


def _xla_requirements(call: AttentionCall) -> dict[str, bool]:
    return _ring_requirements(call) if call.uses_ring else {}


def _ring_requirements(call: AttentionCall) -> dict[str, bool]:
    queries, keys = call.num_queries, call.num_keys
    return {
        "no bias": call.bias_dtype is not None,
        "no dropout": call.has_dropout,
        f"rows that can be split instead of {queries} queries and {keys} keys": (
            queries == 1 or keys == 1
        ),
        **_zeroed_empty_rows(call),
    }


def _cudnn_requirements(call: AttentionCall) -> dict[str, bool]:
    dtype, bias_dtype = jnp.dtype(call.dtype), call.bias_dtype
    has_bias = bias_dtype is not None
    queries, keys, head_dim = call.num_queries, call.num_keys, call.head_dim
    return {
        **ampere_or_later(call.compute_capability),
        **_half_precision(call),
        # Hopper supports 256, but a plan for other machines does not name the chip.
        f"heads of a multiple of 8 and at most 128 instead of {head_dim}": (
            head_dim % 8 != 0 or head_dim > 128
        ),
        f"as many queries as keys when causal instead of {queries} and {keys}": (
            call.is_causal and queries != keys
        ),
        "positions that are known to be in row order when causal": (
            call.is_causal and not call.is_in_row_order
        ),
        f"heads of values as large as those of keys instead of {call.value_dim} and {head_dim}": (
            head_dim != call.value_dim
        ),
        "no window unless causal": call.window is not None and not call.is_causal,
        # cuDNN supports both since 9.10.2.
        "no bias with a window": has_bias and call.window is not None,
        f"a bias of {dtype.name} instead of {bias_dtype}, which would be rounded": (
            has_bias and jnp.dtype(bias_dtype) != dtype
        ),
        # JAX requires them for the gradient of a bias, and passes an empty one where there is none.
        f"even lengths instead of {queries} and {keys}": queries % 2 + keys % 2 > 0,
        "no sinks": call.has_sinks,
        "no segments or padding": call.has_segments,
        "no logit cap": call.has_logit_cap,
        **_whole_rows(call),
        **_fused_requirements(call),
    }


def _tokamax_requirements(call: AttentionCall) -> dict[str, bool]:
    kind, sizes = call.device_kind, (call.head_dim, call.value_dim)
    is_blackwell = re.match(r"NVIDIA G?B\d{3}", kind) is not None
    return {
        f"a Hopper or Blackwell GPU instead of {kind}": (
            not is_blackwell and not HOPPER.match(kind)
        ),
        **_half_precision(call),
        f"heads of multiples of 8 and at most 256 instead of {sizes[0]} and {sizes[1]}": (
            max(sizes) > 256 or any(size % 8 for size in sizes)
        ),
        # Its backward pass holds blocks of both in shared memory.
        f"values no larger than keys, 320 together, on {kind} instead of {sizes[1]}": (
            is_blackwell and (sum(sizes) > 320 or sizes[1] > sizes[0])
        ),
        f"lengths of a multiple of 64 instead of {call.num_queries} and {call.num_keys}": (
            call.num_queries % 64 + call.num_keys % 64 > 0
        ),
        "documents that are runs of tokens (AttentionMask.segments_are_runs)": (
            not call.segments_are_runs
        ),
        **_same_tokens(call),
        **_whole_rows(call),
        **_fused_requirements(call),
    }


def _no_distance_bias(call: AttentionCall) -> dict[str, bool]:
    from layerkit.ops import triton

    requirement = "no bias by distance, of which it makes an array for all pairs"
    return {requirement: call.has_distance_bias and not triton.find_missing_triton()}


def _pallas_gpu_requirements(call: AttentionCall) -> dict[str, bool]:
    dtype, sizes = jnp.dtype(call.dtype), (call.head_dim, call.value_dim)
    queries, keys = call.queries_per_part, call.keys_per_part
    return {
        **ampere_or_later(call.compute_capability),
        f"a float dtype instead of {dtype.name}": (
            dtype not in (jnp.bfloat16, jnp.float16, jnp.float32)
        ),
        f"heads of at most 256 instead of {sizes[0]} and {sizes[1]}": max(sizes) > 256,
        f"lengths of a multiple of 16 instead of {queries} and {keys}": (
            queries % 16 != 0 or keys % 16 != 0
        ),
        **_bias_by_distance(call),
        **_zeroed_empty_rows(call),
        **_fused_requirements(call),
    }


def _pallas_tpu_requirements(call: AttentionCall) -> dict[str, bool]:
    dtype = jnp.dtype(call.dtype)
    queries, keys = call.queries_per_part, call.keys_per_part
    is_masked = call.is_causal or call.window is not None
    return {
        f"bfloat16 or float32 instead of {dtype.name}": dtype not in (jnp.bfloat16, jnp.float32),
        "no window in a ring": call.uses_ring and call.window is not None,
        f"lengths of a multiple of 128 instead of {queries} and {keys}": (
            queries % 128 != 0 or keys % 128 != 0
        ),
        "positions that are known to be in row order with a causal mask or a window": (
            is_masked and not call.is_in_row_order
        ),
        **_same_tokens(call),
        **_bias_by_distance(call),
        **_fused_requirements(call),
    }


# The functions are subclasses of `FusedAttention`. Those of `pallas` and `xla` are also a
# `layerkit.ops.attention.ring.PartAttention`; that of `xla` is used in rings alone.
BACKENDS: tuple[Implementation[AttentionCall], ...] = (
    Implementation(
        name="cudnn",
        function="layerkit.ops.attention.cudnn.CudnnAttention",
        requires=_cudnn_requirements,
        platforms=GPU_PLATFORMS,
        probe="layerkit.ops.attention.cudnn.find_missing_cudnn",
    ),
    Implementation(
        name="tokamax",
        function="layerkit.ops.attention.tokamax.TokamaxAttention",
        requires=_tokamax_requirements,
        requires_of_auto=_no_distance_bias,
        platforms=GPU_PLATFORMS,
        probe="layerkit.ops.attention.tokamax.find_missing_tokamax",
    ),
    Implementation(
        name="pallas",
        function="layerkit.ops.triton.flash_gpu.FlashAttention",
        requires=_pallas_gpu_requirements,
        # It computes products of float32 without tensor cores, and takes minutes to compile.
        requires_of_auto=_half_precision,
        platforms=GPU_PLATFORMS,
        probe="layerkit.ops.triton.find_missing_triton",
    ),
    Implementation(
        name="pallas",
        function="layerkit.ops.attention.pallas.flash_tpu.SplashAttention",
        requires=_pallas_tpu_requirements,
        platforms=("tpu",),
    ),
    Implementation(
        name="xla",
        function="layerkit.ops.attention.blockwise.BlockwiseAttention",
        requires=_xla_requirements,
    ),
)
