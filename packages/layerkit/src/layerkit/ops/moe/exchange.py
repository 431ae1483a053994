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
class RowSlices:
    """The rows that one device sends and receives, a slice for each pair of device and expert.

    Slice d·n+j of those that are sent is for expert j of the n experts of device d. Slice s·n+j of
    those that are received is from device s for the receiver's expert j. All arrays are int32
    `[slices]`.

    Attributes:
      send_starts: First row of each slice that is sent, in the sender's rows.
      send_sizes: Number of rows of each slice that is sent.
      written_starts: First row of each slice that is sent, in the rows of its receiver.
      received_starts: First row of each slice that is received, in the receiver's rows.
      received_sizes: Number of rows of each slice that is received.
      origin_starts: First row of each slice that is received, in the rows of its sender.
      num_sent: Number of rows of the sender's array; static.
      num_received: Number of rows of the receiver's array; static.
      axes: Mesh axes of the devices; static.
      is_emulated: True to gather the rows of all devices instead of `ragged_all_to_all`; static.
    """

    send_starts: jax.Array
    send_sizes: jax.Array
    written_starts: jax.Array
    received_starts: jax.Array
    received_sizes: jax.Array
    origin_starts: jax.Array
    num_sent: int = struct.field(pytree_node=False)
    num_received: int = struct.field(pytree_node=False)
    axes: tuple[str, ...] = struct.field(pytree_node=False)
    is_emulated: bool = struct.field(pytree_node=False)

    def reversed(self) -> RowSlices:
        """Return the slices that bring all received rows back to where they came from."""
        return RowSlices(
            send_starts=self.received_starts,
            send_sizes=self.received_sizes,
            written_starts=self.origin_starts,
            received_starts=self.send_starts,
            received_sizes=self.send_sizes,
            origin_starts=self.written_starts,
            num_sent=self.num_received,
            num_received=self.num_sent,
            axes=self.axes,
            is_emulated=self.is_emulated,
        )


def plan_exchange(
    counts: jax.Array,
    *,
    num_rows: int,
    max_received: int,
    block: int,
    axes: tuple[str, ...],
    is_emulated: bool,
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
      is_emulated: True for a backend without `ragged_all_to_all`.

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
    slices = RowSlices(
        send_starts=origins[here],
        send_sizes=sent[here],
        written_starts=places[here],
        received_starts=take_local(places),
        received_sizes=take_local(sent),
        origin_starts=take_local(origins),
        num_sent=num_rows,
        num_received=-(-(max_received + num_here * (block - 1)) // block) * block,
        axes=axes,
        is_emulated=is_emulated,
    )
    return slices, RowGroups(sizes[here], block, num_rows)


@jax.custom_vjp
def exchange_rows(rows: jax.Array, slices: RowSlices) -> jax.Array:
    """Send slices of rows to other devices and return the received rows; other rows are 0.

    Args:
      rows: `[num_sent, dims]`.
      slices: Slices of this device.

    Returns:
      `[num_received, dims]`.
    """
    if slices.is_emulated:
        return _gather_and_take(rows, slices)
    return jax.lax.ragged_all_to_all(
        rows,
        jnp.zeros((slices.num_received, rows.shape[1]), rows.dtype),
        slices.send_starts,
        slices.send_sizes,
        slices.written_starts,
        slices.received_sizes,
        axis_name=slices.axes,
    )


def _exchange_rows_bwd(slices: RowSlices, gradient: jax.Array) -> tuple[jax.Array, RowSlices]:
    return exchange_rows(gradient, slices.reversed()), no_gradient(slices)


exchange_rows.defvjp(lambda rows, slices: (exchange_rows(rows, slices), slices), _exchange_rows_bwd)


def _gather_and_take(rows: jax.Array, slices: RowSlices) -> jax.Array:
    """Exchange rows by `all_gather`, for backends without `ragged_all_to_all`."""
    of_all = jax.lax.all_gather(rows, slices.axes, tiled=True)
    num_devices = of_all.shape[0] // rows.shape[0]
    senders = jnp.repeat(jnp.arange(num_devices), slices.received_starts.size // num_devices)
    offsets = senders * rows.shape[0] + slices.origin_starts - slices.received_starts
    position = jnp.arange(slices.num_received)[:, None]
    ends = slices.received_starts + slices.received_sizes
    is_in_slice = (position >= slices.received_starts) & (position < ends)
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
