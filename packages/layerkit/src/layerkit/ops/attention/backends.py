"""Selection of the attention backend by a pure function that reports the reason.

`xla` is array code that supports every call on every platform and holds the logits `[batch, heads,
queries, keys]` in memory. The fused kernels never hold them (Dao et al., 2022, arXiv:2205.14135)
and support some calls only: `cudnn` is NVIDIA's kernel; `pallas` is one kernel for GPUs and one for
TPUs. The tables below list the requirements of each. A backend that is selected by name raises if
one is not met; `auto` selects the first kernel of the platform whose requirements are all met, and
`xla` if there is none. docs/attention_backends.md shows the table that the tests prove.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax.numpy as jnp

from layerkit.config.checks import check_choice
from layerkit.errors import ConfigError

BackendName = Literal["auto", "xla", "cudnn", "pallas"]
BACKEND_NAMES = get_args(BackendName)

# JAX's names of the platforms of live and of planned devices with NVIDIA's kernels.
GPU_PLATFORMS = ("gpu", "cuda")

# Kernels that `auto` tries, the fastest first.
_KERNELS_OF_PLATFORM = {"tpu": ("pallas",), **dict.fromkeys(GPU_PLATFORMS, ("cudnn", "pallas"))}


class UnsupportedBackendError(ConfigError):
    """A backend, or a kind of context parallelism, that does not support the requested attention.

    `expected` lists every requirement that is not met.
    """


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The properties of one attention that decide which backends support it.

    Attributes:
      platform: JAX's name of the platform that runs it: `cpu`, `gpu`, `cuda` or `tpu`.
      dtype: Dtype of queries, keys and values.
      head_dim: Size of a head of queries and keys.
      value_dim: Size of a head of values.
      num_queries: Queries per row.
      num_keys: Keys per row.
      is_causal: True if later keys are masked.
      is_in_row_order: True if positions are known to be the order of the row.
      window: Number of positions back that a query sees, itself included; None for all.
      has_segments: True if rows hold several documents or padding.
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
      has_cudnn: True if JAX finds cuDNN.
    """

    platform: str
    dtype: Any
    head_dim: int
    value_dim: int
    num_queries: int
    num_keys: int
    is_causal: bool = False
    is_in_row_order: bool = True
    window: int | None = None
    has_segments: bool = False
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
    has_cudnn: bool = True

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


@dataclasses.dataclass(frozen=True)
class Backend:
    """A selected backend.

    Attributes:
      name: `xla`, `cudnn` or `pallas`.
      reason: Reason of the selection.
    """

    name: str
    reason: str

    def describe(self) -> str:
        """Return one log line: `attention backend: xla (auto: cpu has no fused kernel)`."""
        return f"attention backend: {self.name} ({self.reason})"


def select_backend(name: str, call: AttentionCall) -> Backend:
    """Return the backend that runs a call.

    `auto` selects cuDNN or else Pallas on GPUs, and Pallas on TPUs, if they support the call, and
    `xla` otherwise.

    Args:
      name: One of `BACKEND_NAMES`.
      call: The attention.

    Raises:
      UnsupportedBackendError: The named backend does not support the call.
      ConfigError: The name is unknown.
    """
    check_choice(None, BACKEND_NAMES, backend=name)
    if call.uses_ring:
        option = {"context_parallel": "ring"}
        _check_supported("xla", call, option, "context_parallel='all_gather' or 'ulysses'")
    if name == "auto":
        return _select_for_platform(call)
    _check_supported(name, call, {"backend": name}, "backend='xla' or 'auto'")
    return Backend(name, "as requested")


def unmet_requirements(name: str, call: AttentionCall) -> list[str]:
    """Return what a backend, `xla`, `cudnn` or `pallas`, requires of a call that does not have it.

    Each entry is a noun phrase. The list is empty if the backend supports the call.
    """
    return _unmet(_requirements(name, call), call)


def _unmet(requirements: tuple[_Requirement, ...], call: AttentionCall) -> list[str]:
    dtype = jnp.dtype(call.dtype).name
    return [text.format(call=call, dtype=dtype) for fails, text in requirements if fails(call)]


def _check_supported(
    name: str, call: AttentionCall, option: dict[str, str], alternative: str
) -> None:
    unmet = unmet_requirements(name, call)
    if unmet:
        ((field, value),) = option.items()
        raise UnsupportedBackendError(
            "unsupported attention",
            field=field,
            value=value,
            expected="; ".join(unmet),
            hint=f"Use {alternative}.",
        )


def _select_for_platform(call: AttentionCall) -> Backend:
    kernels = _KERNELS_OF_PLATFORM.get(call.platform)
    if kernels is None:
        return Backend("xla", f"auto: {call.platform} has no fused kernel")
    reasons: list[str] = []
    for name in kernels:
        unmet = unmet_requirements(name, call)
        if name == "pallas" and call.platform in GPU_PLATFORMS:
            # It computes products of float32 without tensor cores, and takes minutes to compile.
            unmet += _unmet((_HALF_PRECISION,), call)
        if not unmet:
            reason = "; ".join(reasons) or f"{name} supports this call on {call.platform}"
            return Backend(name, f"auto: {reason}")
        reasons.append(f"{name} requires {'; '.join(unmet)}")
    return Backend("xla", f"auto: {'; '.join(reasons)}")


# (whether a call fails the requirement, a noun phrase that names the requirement)
_Requirement = tuple[Callable[[AttentionCall], bool], str]

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)

_NO_BIAS: _Requirement = (lambda call: call.bias_dtype is not None, "no bias")
_BIAS_BY_DISTANCE: tuple[_Requirement, ...] = (
    (
        lambda call: call.bias_dtype is not None and not call.has_distance_bias,
        "no bias, or one by distance (DistanceBias)",
    ),
    (
        lambda call: call.has_distance_bias and call.num_length_shards > 1,
        "rows that are not split over devices with a bias, or context_parallel='ulysses'",
    ),
)
_NO_DROPOUT: _Requirement = (lambda call: call.has_dropout, "no dropout")
_ZEROED_EMPTY_ROWS: _Requirement = (
    lambda call: call.may_have_empty_rows and not call.zeroes_empty_rows and not call.has_sinks,
    "zero_fully_masked_rows=True, since a query that sees no key reads 0",
)

_RING_REQUIREMENTS: tuple[_Requirement, ...] = (
    _NO_BIAS,
    _NO_DROPOUT,
    (
        lambda call: call.num_queries == 1 or call.num_keys == 1,
        "rows that can be split instead of {call.num_queries} queries and {call.num_keys} keys",
    ),
    _ZEROED_EMPTY_ROWS,
)

# Fused kernels could drop probabilities by random bits of their own only. The results of a run
# would then depend on the backend.
_FUSED_REQUIREMENTS: tuple[_Requirement, ...] = (
    (lambda call: call.has_prefix, "no prefix"),
    _NO_DROPOUT,
    (lambda call: call.split_problem != "", "an even split over devices ({call.split_problem})"),
)

_HALF_PRECISION: _Requirement = (
    lambda call: jnp.dtype(call.dtype) not in (jnp.bfloat16, jnp.float16),
    "bfloat16 or float16 instead of {dtype}",
)

_CUDNN_REQUIREMENTS: tuple[_Requirement, ...] = (
    (lambda call: call.platform not in GPU_PLATFORMS, "a GPU instead of {call.platform}"),
    (
        lambda call: call.platform in GPU_PLATFORMS and not call.has_cudnn,
        "an installed cuDNN",
    ),
    _HALF_PRECISION,
    (
        # Hopper supports 256, but a plan for other machines does not name the chip.
        lambda call: call.head_dim % 8 != 0 or call.head_dim > 128,
        "heads of a multiple of 8 and at most 128 instead of {call.head_dim}",
    ),
    (
        lambda call: call.is_causal and call.num_queries != call.num_keys,
        "as many queries as keys when causal instead of {call.num_queries} and {call.num_keys}",
    ),
    (
        lambda call: call.is_causal and not call.is_in_row_order,
        "positions that are known to be in row order when causal",
    ),
    (
        lambda call: call.head_dim != call.value_dim,
        "heads of values as large as those of keys instead of {call.value_dim} and {call.head_dim}",
    ),
    (
        lambda call: call.window is not None and not call.is_causal,
        "no window unless causal",
    ),
    (
        lambda call: (
            call.bias_dtype is not None and jnp.dtype(call.bias_dtype) != jnp.dtype(call.dtype)
        ),
        "a bias of {dtype} instead of {call.bias_dtype}, which would be rounded",
    ),
    (
        lambda call: call.bias_dtype is not None and (call.num_queries % 2 + call.num_keys % 2 > 0),
        "even lengths with a bias instead of {call.num_queries} and {call.num_keys}",
    ),
    (lambda call: call.has_sinks, "no sinks"),
    (lambda call: call.has_segments, "no segments or padding"),
    (lambda call: call.has_logit_cap, "no logit cap"),
    (
        lambda call: call.num_length_shards > 1,
        "rows that are not split over devices, or context_parallel='ulysses'",
    ),
    *_FUSED_REQUIREMENTS,
)

_PALLAS_PLATFORM: _Requirement = (
    lambda call: call.platform not in (*GPU_PLATFORMS, "tpu"),
    "a GPU or a TPU instead of {call.platform}",
)

_PALLAS_GPU_REQUIREMENTS: tuple[_Requirement, ...] = (
    _PALLAS_PLATFORM,
    (lambda call: jnp.dtype(call.dtype) not in _FLOATS, "a float dtype instead of {dtype}"),
    (
        lambda call: max(call.head_dim, call.value_dim) > 256,
        "heads of at most 256 instead of {call.head_dim} and {call.value_dim}",
    ),
    (
        lambda call: call.queries_per_part % 16 != 0 or call.keys_per_part % 16 != 0,
        "lengths of a multiple of 16 instead of {call.queries_per_part} and {call.keys_per_part}",
    ),
    *_BIAS_BY_DISTANCE,
    _ZEROED_EMPTY_ROWS,
    *_FUSED_REQUIREMENTS,
)

_PALLAS_TPU_REQUIREMENTS: tuple[_Requirement, ...] = (
    _PALLAS_PLATFORM,
    (
        lambda call: jnp.dtype(call.dtype) not in (jnp.bfloat16, jnp.float32),
        "bfloat16 or float32 instead of {dtype}",
    ),
    (lambda call: call.uses_ring and call.window is not None, "no window in a ring"),
    (
        lambda call: call.queries_per_part % 128 != 0 or call.keys_per_part % 128 != 0,
        "lengths of a multiple of 128 instead of {call.queries_per_part} and {call.keys_per_part}",
    ),
    (
        lambda call: (call.is_causal or call.window is not None) and not call.is_in_row_order,
        "positions that are known to be in row order with a causal mask or a window",
    ),
    (
        lambda call: call.may_have_empty_rows,
        "as many keys as queries, the same tokens in row order, where keys are masked",
    ),
    *_BIAS_BY_DISTANCE,
    *_FUSED_REQUIREMENTS,
)


def _requirements(name: str, call: AttentionCall) -> tuple[_Requirement, ...]:
    if name == "cudnn":
        return _CUDNN_REQUIREMENTS
    if name == "pallas":
        return _PALLAS_TPU_REQUIREMENTS if call.platform == "tpu" else _PALLAS_GPU_REQUIREMENTS
    return _RING_REQUIREMENTS if call.uses_ring else ()
