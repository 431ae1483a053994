"""Rematerialisation by name: what the backward pass keeps and what it computes again.

| name | kept from the forward pass | extra compute |
|---|---|---|
| `none` | everything XLA wants | none |
| `dots` | outputs of all matrix products | little |
| `dots_no_batch` | those without batch dimensions: projections, not attention logits | some |
| `projections` | queries, keys, values and what each branch gave; nothing wide | more |
| `attention_out` | what attention gave | almost a forward pass |
| `residual` | what layers were given, within a stage of a pipeline; nothing else | as below |
| `full` | nothing | one more forward pass |
| `offload_projections` | as `projections`, in the memory of the host | as there |
| `offload_residual` | as `full`, in the memory of the host | as there |

All but `none` also keep the input of the layer, and the first lines keep more than the later ones.

The last six go by the names that layers give to their activations (`name_activation`), so they
keep the same with any kernel. The last two move what they keep over the bus to pinned memory of the
host and back, while the device computes other layers; the device then holds one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from layerkit.near_names import near_names
from layerkit.sharding import BoundSharding

_RESIDUAL = ("residual",)
_PROJECTIONS = (
    "query",
    "key",
    "value",
    "attention_out",
    "cross_attention_out",
    "feed_forward_out",
)
ACTIVATION_NAMES = (*_RESIDUAL, *_PROJECTIONS)

_HOST_MEMORY = "pinned_host"


def _offload(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst=_HOST_MEMORY,
    )


_POLICIES: dict[str, Any] = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "projections": jax.checkpoint_policies.save_only_these_names(*_PROJECTIONS),
    "attention_out": jax.checkpoint_policies.save_only_these_names(
        "attention_out", "cross_attention_out"
    ),
    "residual": jax.checkpoint_policies.save_only_these_names(*_RESIDUAL),
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload_projections": _offload(*ACTIVATION_NAMES),
    "offload_residual": _offload(*_RESIDUAL),
}
REMAT_POLICIES = tuple(_POLICIES)


def name_activation(x: jax.Array, name: str) -> jax.Array:
    """`x` `[...]`, unchanged, under a name that policies know it by.

    Where a layer names its input, it must go on with what this returns, or both are kept.

    Raises:
      ValueError: a name that is not in `ACTIVATION_NAMES`.
    """
    if name not in ACTIVATION_NAMES:
        raise ValueError(
            f"{name!r} is not the name of an activation{near_names(name, ACTIVATION_NAMES)}"
            f" Names: {', '.join(ACTIVATION_NAMES)}."
        )
    named: jax.Array = checkpoint_name(x, name)
    return named


def check_remat_policy(policy: str, *, owner: str, sharding: BoundSharding | None = None) -> None:
    """Refuses what cannot be done; for `setup`.

    Args:
      policy: One of `REMAT_POLICIES`.
      owner: Whose field it is, for messages.
      sharding: Its mesh says for which devices; without one, those that JAX finds.

    Raises:
      ValueError: a name that is not a policy, or one that offloads where devices cannot.
    """
    if policy not in _POLICIES:
        raise ValueError(
            f"{owner}: remat={policy!r} is not a policy{near_names(str(policy), _POLICIES)}"
            f" Policies: {', '.join(_POLICIES)}."
        )
    if policy.startswith("offload"):
        mesh = None if sharding is None else sharding.mesh
        device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
        check_host_memory(policy, _memory_kinds(device), owner=owner)


def check_host_memory(policy: str, memory_kinds: Collection[str], *, owner: str) -> None:
    """Refuses to offload from devices without memory of the host that they can copy to.

    Args:
      policy: A name of `REMAT_POLICIES` that offloads.
      memory_kinds: What the devices say they can address; nothing where they cannot tell.
      owner: Whose field it is, for messages.

    Raises:
      ValueError: the devices tell, and there is none; names the policy that keeps the same on them.
    """
    if memory_kinds and _HOST_MEMORY not in memory_kinds:
        kept = policy.replace("offload_residual", "full").removeprefix("offload_")
        raise ValueError(
            f"{owner}: remat={policy!r} keeps activations in memory of the kind {_HOST_MEMORY!r},"
            f" but these devices have only {', '.join(memory_kinds)}; use remat={kept!r}"
        )


def _memory_kinds(device: jax.Device) -> list[str]:
    try:
        return [memory.kind for memory in device.addressable_memories()]
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return []  # a device that is only compiled for


def remat(body: Callable[..., Any], policy: str, *, in_scan: bool) -> Callable[..., Any]:
    """`body(module, *args)` that keeps what `policy` names and recomputes the rest.

    Args:
      body: A function of a Flax module and arrays.
      policy: One of `REMAT_POLICIES`.
      in_scan: Whether it is the body of a scan, which XLA does not merge with its recomputation.
    """
    if policy == "none":
        return body
    return nn.remat(body, policy=_POLICIES[policy], prevent_cse=not in_scan)


def remat_in_scan(body: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Like `remat` for the body of a scan that is a function of arrays `[...]` alone.

    Args:
      body: A pure function.
      policy: One of `REMAT_POLICIES`.
    """
    if policy == "none":
        return body
    return jax.checkpoint(body, policy=_POLICIES[policy], prevent_cse=False)
