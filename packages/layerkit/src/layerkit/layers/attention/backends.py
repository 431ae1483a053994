"""Which implementation computes attention, decided by a pure function that says why.

`xla` is plain array code: it does everything, everywhere, and holds the logits `[batch, heads,
queries, keys]` in memory. The others are fused kernels that never hold them (Dao et al., 2022,
arXiv:2205.14135) and know some kinds of attention only: `cudnn` is NVIDIA's own, `pallas` is
written in Pallas, one kernel for GPUs and one for TPUs. What each cannot do is a table of limits
below; a backend that runs into one is refused with the reason, and nothing falls back in silence.
`auto` takes the platform's proven kernel where it can do the call, and tells what it took and why.

docs/attention_backends.md shows the table as the tests prove it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from layerkit.near_names import near_names

BACKEND_NAMES = ("auto", "xla", "cudnn", "pallas")

# As JAX names the platforms of live and of planned devices with NVIDIA's kernels.
GPU_PLATFORMS = ("gpu", "cuda")


class BackendRefusal(ValueError):  # noqa: N818 - says what happened, not that something broke
    """The named backend cannot compute the attention that was asked for."""


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What a backend needs to know of one attention.

    Attributes:
      platform: Where it will run, as JAX names it: `cpu`, `gpu`, `cuda` or `tpu`.
      dtype: Of queries, keys and values.
      head_dim: Size of a head of queries and keys.
      value_dim: Size of a head of values.
      num_queries: Queries per row.
      num_keys: Keys per row.
      is_causal: Whether later keys are hidden.
      is_in_row_order: Whether positions are known to be the order of the row.
      window: How many positions back a query sees, itself included; None for all.
      has_segments: Whether rows hold several documents, or padding.
      has_prefix: Whether a prefix of each row is seen by all its queries.
      bias_dtype: Of what is added to the logits; None for nothing.
      has_sinks: Whether a logit per head takes probability and gives nothing.
      has_logit_cap: Whether logits are squeezed.
      has_dropout: Whether probabilities are dropped.
      zeroes_empty_rows: Whether a query that sees no key must read 0; otherwise it must read the
        mean of all values.
      length_parts: Over how many devices the length of a row is split.
      is_in_a_ring: Whether, if so, keys and values go round in a ring.
      split_obstacle: Why a kernel cannot run on each device's rows and heads; "" if it can.
      has_cudnn: Whether JAX finds cuDNN.
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
    has_sinks: bool = False
    has_logit_cap: bool = False
    has_dropout: bool = False
    zeroes_empty_rows: bool = False
    length_parts: int = 1
    is_in_a_ring: bool = False
    split_obstacle: str = ""
    has_cudnn: bool = True

    @property
    def queries_per_part(self) -> int:
        """Queries of a row that one device has; a single one is on every device."""
        return max(1, self.num_queries // self.length_parts)

    @property
    def is_self_attention(self) -> bool:
        """Whether query i and key i are known to be the same token, so that it sees itself."""
        return self.is_in_row_order and self.num_queries == self.num_keys

    @property
    def may_have_empty_rows(self) -> bool:
        """Whether a query may see no key at all."""
        hides = self.is_causal or self.has_segments or self.window is not None
        return hides and not self.is_self_attention


@dataclasses.dataclass(frozen=True)
class Backend:
    """The choice: `name` is `xla`, `cudnn` or `pallas`, `reason` why it was taken."""

    name: str
    reason: str

    def describe(self) -> str:
        """One line for people: `attention backend: xla (auto: cpu has no fused kernel)`."""
        return f"attention backend: {self.name} ({self.reason})"


def check_backend_name(name: str, *, owner: str = "") -> None:
    """Raises ValueError for a name that is not in `BACKEND_NAMES`; says whose it is."""
    if name not in BACKEND_NAMES:
        where = f"{owner}: " if owner else ""
        raise ValueError(
            f"{where}backend={name!r} is not an attention backend"
            f"{near_names(str(name), BACKEND_NAMES)} Backends: {', '.join(BACKEND_NAMES)}."
        )


def select_backend(name: str, call: AttentionCall) -> Backend:
    """Turns the name that a user gave into the backend that will run.

    `auto` takes cuDNN on GPUs and Pallas on TPUs where they can do the call, and `xla` elsewhere.

    Args:
      name: One of `BACKEND_NAMES`.
      call: What is asked.

    Raises:
      BackendRefusal: the named backend cannot do it; gives every reason.
      ValueError: an unknown name.
    """
    check_backend_name(name)
    if call.is_in_a_ring and name in ("auto", "xla"):
        found = obstacles("xla", call)
        if found:
            raise BackendRefusal(
                f"context_parallel='ring' cannot do what is asked: {'; '.join(found)}."
                " Use context_parallel='all_gather'."
            )
        return Backend("xla", "in a ring")
    if name == "auto":
        return _choose(call)
    found = obstacles(name, call)
    if found:
        raise BackendRefusal(
            f"attention backend {name!r} cannot do what is asked: {'; '.join(found)}."
            " Use backend='xla' or 'auto'."
        )
    return Backend(name, "as asked")


def obstacles(name: str, call: AttentionCall) -> list[str]:
    """Why a backend, `xla`, `cudnn` or `pallas`, cannot do a call; empty if it can."""
    dtype = jnp.dtype(call.dtype).name
    return [text.format(call=call, dtype=dtype) for hit, text in _limits(name, call) if hit(call)]


def _choose(call: AttentionCall) -> Backend:
    if call.platform in GPU_PLATFORMS:
        # Pallas on GPUs is taken by name only: cuDNN is the faster and the better proven kernel.
        name = "cudnn"
    elif call.platform == "tpu":
        name = "pallas"
    else:
        return Backend("xla", f"auto: {call.platform} has no fused kernel")
    found = obstacles(name, call)
    if found:
        return Backend("xla", f"auto: {name} cannot, {'; '.join(found)}")
    return Backend(name, f"auto: {name} can do it on {call.platform}")


# Whether a call runs into a limit, and what to tell.
_Limit = tuple[Callable[[AttentionCall], bool], str]

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)

_EMPTY_ROWS_LIMIT: _Limit = (
    lambda call: call.may_have_empty_rows and not call.zeroes_empty_rows and not call.has_sinks,
    "a query that sees no key reads 0 there, for which zero_fully_masked_rows must be set",
)

# Of array code that walks round a ring of devices.
_RING_LIMITS: tuple[_Limit, ...] = (
    (lambda call: call.bias_dtype is not None, "it does not know a bias"),
    (lambda call: call.has_dropout, "it does not know dropout"),
    (
        lambda call: call.num_queries == 1 or call.num_keys == 1,
        "it needs rows that can be split, not {call.num_queries} queries and {call.num_keys} keys",
    ),
    _EMPTY_ROWS_LIMIT,
)

# Of every fused kernel here. Each could drop out, but by random bits of its own: then a run would
# depend on the backend.
_FUSED_LIMITS: tuple[_Limit, ...] = (
    (lambda call: call.has_prefix, "it does not know prefixes"),
    (lambda call: call.has_dropout, "it does not know our dropout"),
    (lambda call: call.is_in_a_ring, "it does not know context_parallel='ring'"),
    (lambda call: call.split_obstacle != "", "{call.split_obstacle}"),
)

_CUDNN_LIMITS: tuple[_Limit, ...] = (
    (lambda call: call.platform not in GPU_PLATFORMS, "it needs a GPU, not {call.platform}"),
    (
        lambda call: call.platform in GPU_PLATFORMS and not call.has_cudnn,
        "cuDNN is not installed here",
    ),
    (
        lambda call: jnp.dtype(call.dtype) not in (jnp.bfloat16, jnp.float16),
        "it needs bfloat16 or float16, not {dtype}",
    ),
    (
        # Hopper can do 256; a plan for other machines does not tell which chip it is for.
        lambda call: call.head_dim % 8 != 0 or call.head_dim > 128,
        "it needs heads of a multiple of 8 and at most 128, not {call.head_dim}",
    ),
    (
        lambda call: call.is_causal and call.num_queries != call.num_keys,
        "it needs as many queries as keys when causal, not {call.num_queries} and {call.num_keys}",
    ),
    (
        lambda call: call.is_causal and not call.is_in_row_order,
        "it takes causal to mean the order of the row, and these positions may differ from it",
    ),
    (
        lambda call: call.head_dim != call.value_dim,
        "it needs values as large as keys, not {call.value_dim} and {call.head_dim}",
    ),
    (
        lambda call: call.window is not None and not call.is_causal,
        "it knows windows in causal attention only",
    ),
    (
        lambda call: (
            call.bias_dtype is not None and jnp.dtype(call.bias_dtype) != jnp.dtype(call.dtype)
        ),
        "it would round the bias, {call.bias_dtype}, to {dtype}",
    ),
    (
        lambda call: call.bias_dtype is not None and (call.num_queries % 2 + call.num_keys % 2 > 0),
        "it needs even lengths with a bias, not {call.num_queries} and {call.num_keys}",
    ),
    (lambda call: call.has_sinks, "it does not know sinks"),
    (lambda call: call.has_segments, "it does not know segments or padding"),
    (lambda call: call.has_logit_cap, "it does not know a logit cap"),
    (lambda call: call.length_parts > 1, "it does not know rows split over devices"),
    *_FUSED_LIMITS,
)

_PALLAS_PLATFORM_LIMIT: _Limit = (
    lambda call: call.platform not in (*GPU_PLATFORMS, "tpu"),
    "it needs a GPU or a TPU, not {call.platform}",
)

_PALLAS_GPU_LIMITS: tuple[_Limit, ...] = (
    _PALLAS_PLATFORM_LIMIT,
    (lambda call: jnp.dtype(call.dtype) not in _FLOATS, "it needs a float type, not {dtype}"),
    (
        lambda call: max(call.head_dim, call.value_dim) > 256,
        "it needs heads of at most 256, not {call.head_dim} and {call.value_dim}",
    ),
    (
        lambda call: call.queries_per_part % 16 != 0 or call.num_keys % 16 != 0,
        "it needs lengths of a multiple of 16, not {call.queries_per_part} and {call.num_keys}",
    ),
    (lambda call: call.bias_dtype is not None, "it does not know a bias"),
    _EMPTY_ROWS_LIMIT,
    *_FUSED_LIMITS,
)

_PALLAS_TPU_LIMITS: tuple[_Limit, ...] = (
    _PALLAS_PLATFORM_LIMIT,
    (
        lambda call: jnp.dtype(call.dtype) not in (jnp.bfloat16, jnp.float32),
        "it needs bfloat16 or float32, not {dtype}",
    ),
    (
        lambda call: call.queries_per_part % 128 != 0 or call.num_keys % 128 != 0,
        "it needs lengths of a multiple of 128, not {call.queries_per_part} and {call.num_keys}",
    ),
    (
        lambda call: (call.is_causal or call.window is not None) and not call.is_in_row_order,
        "it takes positions to be the order of the row, and these may differ from it",
    ),
    (
        lambda call: call.may_have_empty_rows,
        "it needs as many keys as queries where keys are hidden, the same tokens in row order",
    ),
    (lambda call: call.bias_dtype is not None, "it does not know a bias"),
    *_FUSED_LIMITS,
)


def _limits(name: str, call: AttentionCall) -> tuple[_Limit, ...]:
    if name == "cudnn":
        return _CUDNN_LIMITS
    if name == "pallas":
        return _PALLAS_TPU_LIMITS if call.platform == "tpu" else _PALLAS_GPU_LIMITS
    return _RING_LIMITS if call.is_in_a_ring else ()
