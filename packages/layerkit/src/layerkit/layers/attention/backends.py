"""Which implementation computes attention, decided by a pure function that says why.

`xla` is plain array code: it does everything, everywhere, and holds the logits `[batch, heads,
queries, keys]` in memory. `cudnn` is a fused kernel on NVIDIA GPUs that never holds them, but only
knows some kinds of attention. A backend that cannot do what is asked is refused with the reason;
nothing falls back in silence. `auto` takes a backend that can, and tells which and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from layerkit.near_names import near_names

BACKEND_NAMES = ("auto", "xla", "cudnn")


class BackendRefusal(ValueError):  # noqa: N818 - says what happened, not that something broke
    """The named backend cannot compute the attention that was asked for."""


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What a backend needs to know of one attention.

    Attributes:
      platform: Where it will run, as JAX names it: `cpu`, `gpu`, `cuda` or `tpu`.
      dtype: Of queries, keys and values.
      head_dim: Size of a head.
      num_queries: Queries per row.
      num_keys: Keys per row.
      is_causal: Whether later keys are hidden.
      has_segments: Whether rows hold several documents, or padding.
      has_logit_cap: Whether logits are squeezed.
      has_dropout: Whether probabilities are dropped.
    """

    platform: str
    dtype: Any
    head_dim: int
    num_queries: int
    num_keys: int
    is_causal: bool = False
    has_segments: bool = False
    has_logit_cap: bool = False
    has_dropout: bool = False


@dataclasses.dataclass(frozen=True)
class Backend:
    """The choice: `name` is `xla` or `cudnn`, `reason` why it was taken."""

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

    `auto` is `xla` everywhere for now: a fused kernel takes causal to mean the order of the row,
    and only the user knows that the positions of a mask agree with it. Naming `cudnn` says so.

    Args:
      name: One of `BACKEND_NAMES`.
      call: What is asked.

    Raises:
      BackendRefusal: the named backend cannot do it; gives every reason.
      ValueError: an unknown name.
    """
    check_backend_name(name)
    obstacles = _cudnn_obstacles(call)
    if name == "cudnn":
        if obstacles:
            raise BackendRefusal(
                f"attention backend 'cudnn' cannot do what is asked: {'; '.join(obstacles)}."
                " Use backend='xla' or 'auto'."
            )
        return Backend("cudnn", "as asked")
    if name == "xla":
        return Backend("xla", "as asked")
    if call.platform not in _GPU_PLATFORMS:
        return Backend("xla", f"auto: {call.platform} has no fused kernel")
    if obstacles:
        return Backend("xla", f"auto: cudnn cannot, {'; '.join(obstacles)}")
    return Backend("xla", "auto: cudnn could, but is taken only by name")


# As JAX names the platforms of live and of planned devices with NVIDIA's kernels.
_GPU_PLATFORMS = ("gpu", "cuda")

# Each of cuDNN's limits: whether a call runs into it, and what to tell. The kernel itself could
# drop out, but by random bits of its own: then a run would depend on the backend.
_CUDNN_LIMITS: tuple[tuple[Callable[[AttentionCall], bool], str], ...] = (
    (lambda call: call.platform not in _GPU_PLATFORMS, "it needs a GPU, not {call.platform}"),
    (
        lambda call: jnp.dtype(call.dtype) not in (jnp.bfloat16, jnp.float16),
        "it needs bfloat16 or float16, not {dtype}",
    ),
    (
        lambda call: call.head_dim % 8 != 0 or call.head_dim > 128,
        "it needs heads of a multiple of 8 and at most 128, not {call.head_dim}",
    ),
    (
        lambda call: call.is_causal and call.num_queries != call.num_keys,
        "it needs as many queries as keys when causal, not {call.num_queries} and {call.num_keys}",
    ),
    (lambda call: call.has_segments, "it does not know segments or padding"),
    (lambda call: call.has_logit_cap, "it does not know a logit cap"),
    (lambda call: call.has_dropout, "it does not know our dropout"),
)


def _cudnn_obstacles(call: AttentionCall) -> list[str]:
    dtype = jnp.dtype(call.dtype).name
    return [text.format(call=call, dtype=dtype) for hit, text in _CUDNN_LIMITS if hit(call)]
