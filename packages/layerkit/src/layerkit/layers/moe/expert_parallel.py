"""Dropless experts on a mesh: each device computes its experts for the tokens of other devices.

Each device runs the same steps on its own shards (`jax.shard_map`):

1. Gather weights along the mesh axes that split only their storage (fsdp).
2. Gather tokens along the mesh axes that split both tokens and experts.
3. Compute the experts of the device. If the hidden (`mlp`) dimension of the experts is split
   (tensor), the device computes its shard of it, and the outputs are partial sums.
4. Sum the outputs over devices. Each device keeps the sums of its own tokens.

The number of tokens per expert is known only at run time. An all-to-all exchange of exactly these
tokens would need buffers for the worst case, too. Experts with a capacity have buffers of a fixed
size and exchange tokens by all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from layerkit.sharding import BoundSharding

# (tokens [tokens, dims], experts int32 [tokens, choices], weights float32 [tokens, choices],
# weights of the experts by name) → [tokens, dims]
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
    """Run `compute` for all experts; each device computes the experts that it holds.

    Args:
      compute: Function that applies the experts of one device, numbered from 0, to tokens. It
        ignores choices of other numbers. Its outputs for all shards of the hidden dimension sum to
        the whole output.
      x: Tokens, `[batch, length, dims]`.
      experts: Chosen experts, int32 `[batch, length, choices]`.
      weights: Weights of the choices, float32 `[batch, length, choices]`.
      expert_weights: Weights of the experts by name, `[experts, …, …]`.
      weight_axes: Logical axes of each of these weights: `expert`, `embed` and `mlp`.
      sharding: Sharding of the model, with a mesh.
      owner: Name of the layer for error messages.

    Returns:
      `[batch, length, dims]`.

    Raises:
      ConfigError: A dimension cannot be split evenly over its mesh axes.
    """
    token_spec = sharding.spec(("batch", "length", None), shape=x.shape, owner=owner)
    weight_specs = {
        name: sharding.spec(weight_axes[name], shape=w.shape, owner=f"{owner}.{name}")
        for name, w in expert_weights.items()
    }
    token_axes = _axes_of(token_spec, 0), _axes_of(token_spec, 1)
    over_experts = _mesh_axes(sharding, "expert")
    # Mesh axes along which devices hold different shards of the hidden dimension, but equal tokens.
    over_mlp = tuple(a for a in _mesh_axes(sharding, "mlp") if a not in sum(token_axes, ()))

    def local(x: Any, experts: Any, weights: Any, expert_weights: Any) -> jax.Array:
        kept = over_experts + over_mlp
        own = {name: _gather(w, weight_specs[name], kept) for name, w in expert_weights.items()}
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
    """Return the mesh axes over which a logical axis is split."""
    return _axes_of(sharding.spec((name,)), 0)


def _axes_of(spec: PartitionSpec, dim: int) -> Axes:
    entry = spec[dim]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _gather(w: jax.Array, spec: PartitionSpec, kept_axes: Axes) -> jax.Array:
    """Gather a weight along all mesh axes of its spec except `kept_axes`."""
    for dim in range(w.ndim):
        axes = tuple(axis for axis in _axes_of(spec, dim) if axis not in kept_axes)
        if axes:
            w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
    return w
