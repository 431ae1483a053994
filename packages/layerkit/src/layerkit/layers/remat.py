"""Rematerialisation by name: what the backward pass keeps and what it computes again.

| name | kept from the forward pass | memory | extra compute |
|---|---|---|---|
| `none` | everything XLA wants | most | none |
| `dots` | outputs of all matrix products | | little |
| `dots_no_batch` | those without batch dimensions: projections, not attention logits | | some |
| `full` | only the layer's input | least | one more forward pass |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from layerkit.near_names import near_names

_POLICIES: dict[str, Any] = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
REMAT_POLICIES = tuple(_POLICIES)


def check_remat_policy(policy: str, *, owner: str) -> None:
    """Raises ValueError for a name that is not in `REMAT_POLICIES`."""
    if policy not in _POLICIES:
        raise ValueError(
            f"{owner}: remat={policy!r} is not a policy{near_names(str(policy), _POLICIES)}"
            f" Policies: {', '.join(_POLICIES)}."
        )


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
