"""Dropless experts on a mesh: each device computes its experts, for the tokens of its neighbours.

Sorting tokens is a local affair, so the program for one device is written out (`shard_map`):

1. Weights are gathered along the axes over which only their storage is split (fsdp).
2. Tokens are gathered from the devices that hold other experts, where tokens are split over those.
3. Each device computes its own experts, and of those its part of the wide dimension (tensor).
4. The partial outputs are added up, and each device keeps the sum of its own tokens.

How many tokens an expert gets is not known beforehand, so an exchange of exactly those would need
buffers for the worst case all the same; experts with a capacity exchange by all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from layerkit.sharding import BoundSharding

# (tokens [tokens, dims], experts int32 [tokens, choices], weights float32 [tokens, choices], the
# experts' weights by name) → [tokens, dims]
LocalExperts = Callable[[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]], jax.Array]
Axes = tuple[str, ...]


def run_on_mesh(
    compute: LocalExperts,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    expert_weights: dict[str, jax.Array],
    *,
    weight_axes: Mapping[str, tuple[str, ...]],
    sharding: BoundSharding,
    owner: str,
) -> jax.Array:
    """What `compute` gives for all experts, each device computing those that it holds.

    Args:
      compute: The experts that it is given, numbered from 0, for the tokens that it is given; other
        numbers of experts count nothing. Parts of the wide dimension add up to the whole.
      x: `[batch, length, dims]`.
      experts: int32 `[batch, length, choices]`.
      weights: float32 `[batch, length, choices]`.
      expert_weights: Name → `[experts, …, …]`.
      weight_axes: Name → the logical axes of that weight: `expert`, `embed` and `mlp`.
      sharding: With a mesh.
      owner: Whose tokens they are, for error messages.

    Returns:
      `[batch, length, dims]`.

    Raises:
      ValueError: sizes that cannot be split evenly.
    """
    token_spec = sharding.spec(("batch", "length", None), shape=x.shape, owner=owner)
    weight_specs = {
        name: sharding.spec(weight_axes[name], shape=w.shape, owner=f"{owner}.{name}")
        for name, w in expert_weights.items()
    }
    token_axes = _axes_of(token_spec, 0), _axes_of(token_spec, 1)
    over_experts = _mesh_axes(sharding, "expert")
    # Devices that hold parts of the wide dimension, and the same tokens.
    over_mlp = tuple(a for a in _mesh_axes(sharding, "mlp") if a not in sum(token_axes, ()))

    def local(x: Any, experts: Any, weights: Any, expert_weights: Any) -> jax.Array:
        kept = over_experts + over_mlp
        own = {name: _gather(w, weight_specs[name], but=kept) for name, w in expert_weights.items()}
        shared = tuple(tuple(a for a in axes if a in over_experts) for axes in token_axes)
        for dim, axes in enumerate(shared):
            if axes:
                x, experts, weights = (
                    jax.lax.all_gather(part, axes, axis=dim, tiled=True)
                    for part in (x, experts, weights)
                )
        if over_experts:
            num_here = next(iter(own.values())).shape[0]
            experts = experts - num_here * jax.lax.axis_index(over_experts)
        choices = experts.shape[-1]
        tokens = x.reshape(-1, x.shape[-1])
        output = compute(tokens, experts.reshape(-1, choices), weights.reshape(-1, choices), own)
        output = output.reshape(x.shape)
        for dim, axes in enumerate(shared):
            if axes:
                output = jax.lax.psum_scatter(output, axes, scatter_dimension=dim, tiled=True)
        partial = over_mlp + tuple(a for a in over_experts if a not in sum(shared, ()))
        return jax.lax.psum(output, partial) if partial else output

    run = jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(token_spec, token_spec, token_spec, weight_specs),
        out_specs=token_spec,
        check_vma=False,
    )
    return run(x, experts, weights, expert_weights)


def _mesh_axes(sharding: BoundSharding, name: str) -> Axes:
    """The mesh axes over which a logical axis is really split."""
    return _axes_of(sharding.spec((name,)), 0)


def _axes_of(spec: PartitionSpec, dim: int) -> Axes:
    entry = spec[dim]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _gather(w: jax.Array, spec: PartitionSpec, *, but: Axes) -> jax.Array:
    """A weight whole along all axes over which it is split, `but` for some."""
    for dim in range(w.ndim):
        axes = tuple(axis for axis in _axes_of(spec, dim) if axis not in but)
        if axes:
            w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
    return w
