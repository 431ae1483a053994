"""Dropless experts on one device and on a mesh.

On a mesh each device runs the same steps on its own shards (`jax.shard_map`). It gathers weights
along the mesh axes that split only their storage (fsdp). Then one of two exchanges brings tokens
and experts together along the mesh axes that split the experts:

- `ragged_all_to_all` sends a row for each choice to the device of its expert, and the outputs back
  (`layerkit.ops.moe.exchange`);
- `all_gather` gathers the tokens of all devices. Each device computes its experts for all of them,
  and the sums over devices are scattered back.

If the hidden (`mlp`) dimension of the experts is split (tensor), a device computes its shard of it,
and the outputs are partial sums.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from layerkit.base.sharding import BoundSharding
from layerkit.ops.moe.exchange import exchange_rows, plan_exchange, select_exchange
from layerkit.ops.moe.grouped_matmul import GroupedMatmul, RowGroups, RowsProduct
from layerkit.ops.moe.slots import from_slots, sorted_slots, to_slots, weighted_sum
from layerkit.ops.pipeline_schedule import stage_mesh_axes

_LOG = logging.getLogger(__name__)

# (rows [rows, dims] sorted by expert, grouped product of these rows, weights of these experts by
# name) → outputs [rows, dims]
ApplyExperts = Callable[[jax.Array, RowsProduct, dict[str, jax.Array]], jax.Array]
Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Dropless:
    """The computation of dropless experts.

    Attributes:
      apply: Function that applies experts to sorted rows. If the hidden dimension of the weights is
        a shard, its outputs for all shards sum to the whole output.
      num_experts: Number of experts.
      matmul: Implementation of the grouped products.
      split_axes: Mesh axes over which the rows of an expert or their features are split.
    """

    apply: ApplyExperts
    num_experts: int
    matmul: GroupedMatmul
    split_axes: Axes = ()

    def __call__(
        self, x: jax.Array, experts: jax.Array, weights: jax.Array, arrays: dict[str, jax.Array]
    ) -> jax.Array:
        """Compute Σ weight · expert(x) over the choices of experts that `arrays` holds.

        Args:
          x: Tokens, `[..., dims]`.
          experts: Chosen experts, int32 `[..., choices]`, numbered from the first in `arrays`.
            Choices of other experts add nothing.
          weights: Weights of the choices, float32 `[..., choices]`.
          arrays: Weights of experts by name, `[experts, …, …]`.

        Returns:
          `[..., dims]`.
        """
        tokens, experts, weights = _merge_tokens(x, experts, weights)
        num_local = arrays["up"].shape[0]
        # All experts count, since those of other devices also receive tokens.
        block = self.matmul.block_size(experts.size, self.num_experts)
        slots, groups = sorted_slots(
            experts,
            num_experts=num_local,
            num_balanced=experts.size * num_local // self.num_experts,
            block=block,
        )
        outputs = self._outputs(to_slots(tokens, slots), groups, arrays)
        return weighted_sum(from_slots(outputs, slots), weights).reshape(x.shape)

    def exchanged(
        self,
        x: jax.Array,
        experts: jax.Array,
        weights: jax.Array,
        arrays: dict[str, jax.Array],
        *,
        axes: Axes,
        buffer_factor: float | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute Σ weight · expert(x) with experts of other devices; inside of `jax.shard_map`.

        Tokens `[..., dims]` and arrays are those of this device; experts are numbered from 0 to
        num_experts - 1. See `__call__`, `run_on_mesh` and `plan_exchange`.

        Returns:
          (`[..., dims]`, int32 scalar: choices of this device that were not sent).
        """
        tokens, experts, weights = _merge_tokens(x, experts, weights)
        slots, groups = sorted_slots(experts, num_experts=self.num_experts)
        num_tokens, num_choices = experts.shape
        num_devices = int(jax.lax.axis_size(axes))
        num_local = self.num_experts // num_devices
        # The choices of a token differ, so that at most num_own of them are on one device.
        most = num_devices * num_tokens * min(num_choices, num_local)
        if buffer_factor is not None:
            most = min(most, max(1, math.ceil(experts.size * buffer_factor)))
        slices, received_groups = plan_exchange(
            groups.sizes,
            num_rows=experts.size,
            max_received=most,
            block=self.matmul.block_size(experts.size, num_local),
            axes=axes,
        )
        received = exchange_rows(to_slots(tokens, slots), slices)
        outputs = self._outputs(received, received_groups, arrays)
        returned = exchange_rows(outputs, slices.reversed())
        output = weighted_sum(from_slots(returned, slots), weights).reshape(x.shape)
        return output, jnp.sum(groups.sizes) - jnp.sum(slices.sent.sizes)

    def _outputs(
        self, rows: jax.Array, groups: RowGroups, arrays: dict[str, jax.Array]
    ) -> jax.Array:
        product = RowsProduct(groups, self.matmul, rows.shape[0], self.split_axes)
        return self.apply(rows, product, arrays)


def run_on_mesh(
    compute: Dropless,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    expert_weights: dict[str, jax.Array],
    *,
    weight_axes: Mapping[str, tuple[str | None, ...] | None],
    added_once: Collection[str],
    sharding: BoundSharding,
    exchange: str,
    buffer_factor: float | None,
    owner: str,
) -> tuple[jax.Array, jax.Array]:
    """Run `compute` for all experts; each device computes the experts that it holds.

    Args:
      compute: Computation of the experts.
      x: Tokens, `[batch, length, dims]`.
      experts: Chosen experts, int32 `[batch, length, choices]`.
      weights: Weights of the choices, float32 `[batch, length, choices]`.
      expert_weights: Weights of the experts by name, `[experts, …, …]`.
      weight_axes: Logical axes of each of these weights: `expert`, `embed` and `mlp`; None for a
        state that all devices share and whose gradient is the maximum over devices.
      added_once: Names of the weights that are added to outputs. Of the devices whose outputs are
        summed, one has these weights and the others have zeros.
      sharding: Sharding of the model, with a mesh.
      exchange: `auto`, `ragged_all_to_all` or `all_gather`.
      buffer_factor: Bound of the rows that a device receives by `ragged_all_to_all`, relative to
        the choices of a device; None for as many as there can be.
      owner: Name of the layer for error messages.

    Returns:
      (`[batch, length, dims]`, int32 scalar: choices of the batch that exceeded the bound).

    Raises:
      ConfigError: A dimension cannot be split evenly over its mesh axes, or the exchange does not
        support the sharding.
    """
    mesh: Any = sharding.mesh
    token_spec = sharding.spec(("batch", "length", None), shape=x.shape, owner=owner)
    weight_specs = {}
    # The devices of a stage of a pipeline share a state, and others all devices.
    sharers = tuple(axis for axis in mesh.axis_names if axis not in stage_mesh_axes())
    num_copies = math.prod(mesh.shape[axis] for axis in sharers)
    for name, w in expert_weights.items():
        axes = weight_axes[name]
        if axes is None:
            weight_specs[name] = PartitionSpec(sharers)
            expert_weights = {**expert_weights, name: _copies_of_state(w, num_copies, w.dtype)}
        else:
            weight_specs[name] = sharding.spec(axes, shape=w.shape, owner=f"{owner}.{name}")
    token_axes = _axes_of(token_spec, 0), _axes_of(token_spec, 1)
    all_token_axes = sum(token_axes, ())
    over_experts = sharding.split_axes("expert")
    # Mesh axes along which devices hold different shards of the hidden dimension, but equal tokens.
    over_mlp = tuple(a for a in sharding.split_axes("mlp") if a not in all_token_axes)
    split_axes = tuple(a for a in (*all_token_axes, *over_mlp) if a not in over_experts)
    compute = dataclasses.replace(compute, split_axes=split_axes)
    exchanges = False
    if over_experts:
        chosen, reason = select_exchange(
            exchange,
            platform=mesh.devices.flat[0].platform,
            num_devices=math.prod(mesh.shape[axis] for axis in over_experts),
            num_choices=experts.shape[-1],
            splits_tokens=set(over_experts) <= set(all_token_axes),
            owner=owner,
        )
        _LOG.info("expert exchange: %s (%s)", chosen, reason)
        exchanges = chosen == "ragged_all_to_all"

    def local(x: Any, experts: Any, weights: Any, expert_weights: Any) -> tuple[Any, Any]:
        kept = over_experts + over_mlp
        arrays = {
            name: w[0] if weight_axes[name] is None else _gather(w, weight_specs[name], kept)
            for name, w in expert_weights.items()
        }
        if over_mlp:
            is_first = jax.lax.axis_index(over_mlp) == 0
            arrays |= {
                name: jnp.where(is_first, arrays[name], 0) for name in added_once if name in arrays
            }
        if exchanges:
            output, num_dropped = compute.exchanged(
                x,
                experts,
                weights,
                arrays,
                axes=over_experts,
                buffer_factor=buffer_factor,
            )
            output = jax.lax.psum(output, over_mlp) if over_mlp else output
            return output, jax.lax.psum(num_dropped, all_token_axes)
        shared = tuple(tuple(a for a in axes if a in over_experts) for axes in token_axes)
        partial = over_mlp + tuple(a for a in over_experts if a not in sum(shared, ()))
        x, experts, weights = (_gather_tokens(part, shared) for part in (x, experts, weights))
        if over_experts:
            num_here = arrays["up"].shape[0]
            experts = experts - num_here * jax.lax.axis_index(over_experts)
        output = _scatter_sums(compute(x, experts, weights, arrays), shared)
        return jax.lax.psum(output, partial) if partial else output, jnp.int32(0)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(token_spec, token_spec, token_spec, weight_specs),
        out_specs=(token_spec, PartitionSpec()),
        check_vma=False,
    )
    return run(x, experts, weights, expert_weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copies_of_state(state: jax.Array, count: int, dtype: Any) -> jax.Array:
    """Return float32 copies `[count, ...]` of a state of a dtype; its gradient is their maximum."""
    del dtype
    return jnp.broadcast_to(jax.lax.convert_element_type(state, jnp.float32), (count, *state.shape))


def _copies_forward(state: jax.Array, count: int, dtype: Any) -> tuple[jax.Array, None]:
    return _copies_of_state(state, count, dtype), None


def _copies_backward(
    count: int, dtype: Any, residuals: None, gradient: jax.Array
) -> tuple[jax.Array]:
    del count, residuals
    return (jax.lax.convert_element_type(jnp.max(gradient, axis=0), dtype),)


_copies_of_state.defvjp(_copies_forward, _copies_backward)


def _gather_tokens(tokens: jax.Array, shared: tuple[Axes, ...]) -> jax.Array:
    """Gather `[batch, length, …]` along the mesh axes of each dimension that split experts too."""
    for dim, axes in enumerate(shared):
        if axes:
            tokens = jax.lax.all_gather(tokens, axes, axis=dim, tiled=True)
    return tokens


def _scatter_sums(output: jax.Array, shared: tuple[Axes, ...]) -> jax.Array:
    """Sum `[batch, length, dims]` over these mesh axes; each device keeps its own tokens."""
    for dim, axes in enumerate(shared):
        if axes:
            output = jax.lax.psum_scatter(output, axes, scatter_dimension=dim, tiled=True)
    return output


def _merge_tokens(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Reshape each array `[..., features]` to `[tokens, features]`."""
    return tuple(array.reshape(-1, array.shape[-1]) for array in arrays)


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
