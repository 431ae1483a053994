"""Exchange of sorted rows between devices that hold different experts.

A device sorts its rows by expert and sends each group of rows to the device of that expert. The
rows arrive in the order of the receiver's experts, so that it multiplies them where they are, and
return by the same way. `jax.lax.ragged_all_to_all` moves exactly these rows: on average
tokens · choices · (devices - 1) / devices rows leave a device, in each direction.

XLA's CPU backend does not implement `ragged_all_to_all`. There the same exchange, with the same
results, gathers the rows of all devices and takes those that are addressed to the device. This
emulation is for tests; `auto` never selects it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from layerkit.base.sharding import model_device
from layerkit.errors import ConfigError
from layerkit.ops.moe.grouped_matmul import RowGroups
from layerkit.ops.moe.slots import no_gradient


def select_exchange(
    name: str,
    *,
    platform: str,
    num_devices: int,
    num_choices: int,
    splits_tokens: bool,
    owner: str,
) -> tuple[str, str]:
    """Return (exchange of dropless experts that are split over devices, reason of the selection).

    Args:
      name: `auto`, `ragged_all_to_all` or `all_gather`.
      platform: JAX's name of the platform that runs the model.
      num_devices: Number of devices that the experts are split over.
      num_choices: Number of experts of a token.
      splits_tokens: True if all mesh axes that split the experts split the tokens as well.
      owner: Name of the layer for error messages.

    Raises:
      ConfigError: `ragged_all_to_all` by name, for tokens that the experts' mesh axes do not split.
    """
    if name == "all_gather":
        return name, "as requested"
    if name == "ragged_all_to_all":
        if not splits_tokens:
            raise ConfigError(
                owner=owner,
                field="expert_exchange",
                value=name,
                expected="'all_gather', since a mesh axis of the experts does not split the tokens",
                hint="Add the mesh axes of the rule 'expert' to the rule 'batch'.",
            )
        return name, "as requested"
    if not splits_tokens:
        return "all_gather", "auto: the experts' mesh axes do not split the tokens"
    if platform == "cpu":
        return "all_gather", "auto: cpu has no ragged_all_to_all"
    if num_choices >= num_devices:
        reason = f"auto: a token has {num_choices} choices on {num_devices} devices"
        return "all_gather", reason
    reason = f"auto: a token has {num_choices} choices, fewer than {num_devices} devices"
    return "ragged_all_to_all", reason


@struct.dataclass
class Slices:
    """Slices of the rows of one device, one for each pair of a device and an expert.

    Attributes:
      starts: First row of each slice, int32 `[slices]`.
      sizes: Number of rows of each slice, int32 `[slices]`.
      places: First row of each slice in the rows of the other device, int32 `[slices]`.
      num_rows: Number of rows of the array; static.
    """

    starts: jax.Array
    sizes: jax.Array
    places: jax.Array
    num_rows: int = struct.field(pytree_node=False)


@struct.dataclass
class RowSlices:
    """The rows that one device sends and receives.

    Attributes:
      sent: Slices that are sent. Number d·n+j is for expert j of the n experts of device d.
      received: Slices that are received. Number s·n+j is from device s for the receiver's expert j.
      axes: Mesh axes of the devices; static.
      is_emulated: True to gather the rows of all devices instead of `ragged_all_to_all`; static.
    """

    sent: Slices
    received: Slices
    axes: tuple[str, ...] = struct.field(pytree_node=False)
    is_emulated: bool = struct.field(pytree_node=False)

    def reversed(self) -> RowSlices:
        """Return the slices that bring all received rows back to where they came from."""
        return RowSlices(self.received, self.sent, self.axes, self.is_emulated)


def plan_exchange(
    counts: jax.Array,
    *,
    num_rows: int,
    max_received: int,
    block: int,
    axes: tuple[str, ...],
) -> tuple[RowSlices, RowGroups]:
    """Return the slices of this device and the groups of the rows that it receives.

    If a device would receive more than `max_received` rows, the last rows of the last senders are
    not sent, and nothing returns for them.

    Args:
      counts: Number of this device's rows for each expert of all devices, int32 `[experts]`. The
        rows are sorted by expert, without empty rows in between.
      num_rows: Number of rows of this device's array.
      max_received: Largest number of rows that a device receives.
      block: Divisor of the first row of each group of received rows.
      axes: Mesh axes over which the experts are split; called inside of `jax.shard_map`.

    Returns:
      (slices, groups of received rows by expert of this device).
    """
    of_all = jax.lax.all_gather(counts, axes)
    num_devices, num_experts = of_all.shape
    here = jax.lax.axis_index(axes)
    num_here = num_experts // num_devices

    def take_local(values: jax.Array) -> jax.Array:
        start = here * num_here
        return jax.lax.dynamic_slice_in_dim(values, start, num_here, axis=1).reshape(-1)

    origins = jnp.cumsum(of_all, axis=1) - of_all
    sent = _limit(of_all, max_received)
    totals = jnp.sum(sent, axis=0).reshape(num_devices, num_here)
    sizes = (totals + block - 1) // block * block
    group_starts = (jnp.cumsum(sizes, axis=1) - sizes).reshape(-1)
    places = group_starts + jnp.cumsum(sent, axis=0) - sent
    most = -(-(max_received + num_here * (block - 1)) // block) * block
    received = Slices(take_local(places), take_local(sent), take_local(origins), most)
    sent_slices = Slices(origins[here], sent[here], places[here], num_rows)
    # The program could choose by itself, but then has conditionals around collectives.
    is_emulated = model_device(None).platform == "cpu"
    slices = RowSlices(sent_slices, received, axes, is_emulated)
    return slices, RowGroups(sizes[here], block, num_rows)


@jax.custom_vjp
def exchange_rows(rows: jax.Array, slices: RowSlices) -> jax.Array:
    """Send slices of rows to other devices and return the received rows; other rows are 0.

    Args:
      rows: `[sent rows, dims]`.
      slices: Slices of this device.

    Returns:
      `[received rows, dims]`.
    """
    if slices.is_emulated:
        return _gather_and_take(rows, slices)
    sent, received = slices.sent, slices.received
    empty = jnp.zeros((received.num_rows, rows.shape[1]), rows.dtype)
    sizes = sent.starts, sent.sizes, sent.places, received.sizes
    return jax.lax.ragged_all_to_all(rows, empty, *sizes, axis_name=slices.axes)


def _exchange_rows_bwd(slices: RowSlices, gradient: jax.Array) -> tuple[jax.Array, RowSlices]:
    return exchange_rows(gradient, slices.reversed()), no_gradient(slices)


exchange_rows.defvjp(lambda rows, slices: (exchange_rows(rows, slices), slices), _exchange_rows_bwd)


def _gather_and_take(rows: jax.Array, slices: RowSlices) -> jax.Array:
    """Exchange rows by `all_gather`, for backends without `ragged_all_to_all`."""
    of_all, received = jax.lax.all_gather(rows, slices.axes, tiled=True), slices.received
    num_devices = of_all.shape[0] // rows.shape[0]
    senders = jnp.repeat(jnp.arange(num_devices), received.starts.size // num_devices)
    offsets = senders * rows.shape[0] + received.places - received.starts
    position = jnp.arange(received.num_rows)[:, None]
    is_in_slice = (position >= received.starts) & (position < received.starts + received.sizes)
    source = jnp.sum(jnp.where(is_in_slice, position + offsets, 0), axis=1)
    source = jnp.where(jnp.any(is_in_slice, axis=1), source, of_all.shape[0])
    return of_all.at[source].get(mode="fill", fill_value=0)


def _limit(counts: jax.Array, most: int) -> jax.Array:
    """Reduce counts `[senders, experts]` so that no device receives more than `most` rows."""
    num_devices = counts.shape[0]
    by_receiver = counts.reshape(num_devices, num_devices, -1).swapaxes(0, 1)
    ends = jnp.minimum(jnp.cumsum(by_receiver.reshape(num_devices, -1), axis=1), most)
    kept = jnp.diff(ends, axis=1, prepend=0).reshape(by_receiver.shape)
    return kept.swapaxes(0, 1).reshape(counts.shape)
