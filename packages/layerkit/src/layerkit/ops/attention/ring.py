"""Ring attention: keys and values are passed around the devices that share a row.

Each device attends with its queries to one part of the keys at a time and merges the outputs by
their log-sum-exp (Liu et al., 2023, arXiv:2310.01889). The backward pass sends the keys around
again, with the sums of their gradients. No product needs the part that is being sent, so that the
compiler can overlap both. For TPUs it does so in the backward pass only: JAX's splash attention
gives its scheduler no estimate of the cost of a kernel, and forward the kernels come first.

Under a causal mask, later queries see more keys. Devices would wait for the one with the end of the
row. With n devices, rows are therefore cut into 2n chunks, and device i works on the chunks i and
2n - 1 - i ("zigzag"; Zhu, 2024, github.com/zhuzilin/ring-flash-attention). Every device then
computes 2 products of chunks for each part that it receives, and 3 for its own part. That is
(2n + 1) / 4n of the work without a causal mask. Attention exchanges the chunks itself, so that
inputs, positions and other layers keep the order of the row.

With a window that reaches half of the devices or less, a ring of shards in row order is shorter: it
stops once all shards within the window have passed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention.masks import MASKED_LOGIT, AttentionMask, row_positions
from layerkit.ops.attention.sharded_kernel import QUERY_AXES, check_split, key_axes


class PartAttention(Protocol):
    """Attention of a part of the queries to a part of the keys, with static options.

    Numbers per query, such as the log-sum-exp of its logits, are float32
    `[batch, queries, heads]`. Implementations are hashable.
    """

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask
    ) -> tuple[jax.Array, jax.Array]:
        """Return (float32 `[batch, queries, heads, value_dim]`, log-sum-exp of each query).

        The log-sum-exp of a query that sees no key of the part is `MASKED_LOGIT` or less.
        """
        ...

    def gradients(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        out_gradient: jax.Array,
        log_sum: jax.Array,
        common: jax.Array,
        mask: AttentionMask,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the float32 gradients of query, key and value that this part adds.

        Args:
          query: `[batch, queries, heads, head_dim]`.
          key: `[batch, keys, kv_heads, head_dim]`.
          value: `[batch, keys, kv_heads, value_dim]`.
          out_gradient: Gradient of the output of all parts, `[batch, queries, heads, value_dim]`.
          log_sum: Log-sum-exp of the logits of all parts, per query.
          common: Product of the output and its gradient, summed over a head, per query.
          mask: Mask of the part.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Static properties of a ring, for which it is compiled."""

    sharding: BoundSharding
    attention: PartAttention
    has_one_kv_head: bool
    num_devices: int
    num_steps: int
    is_zigzag: bool

    @property
    def num_chunks(self) -> int:
        """Number of chunks in the shard of a device."""
        return 2 if self.is_zigzag else 1

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes of the ring, the slowest first in the order of shards."""
        return self.sharding.split_axes("length")

    @property
    def queries(self) -> PartitionSpec:
        """Spec of `[batch, queries, heads, head_dim]`."""
        return self.sharding.spec(QUERY_AXES)

    @property
    def keys(self) -> PartitionSpec:
        """Spec of `[batch, keys, kv_heads, head_dim]`."""
        heads = key_axes(1 if self.has_one_kv_head else 2)[2]
        return self.sharding.spec(("batch", "length", heads, None))

    @property
    def per_query(self) -> PartitionSpec:
        """Spec of an array with one number per query, `[batch, queries, heads]`."""
        return self.sharding.spec(QUERY_AXES[:3])

    def mask_specs(self, mask: AttentionMask) -> Any:
        """Return the specs of the arrays of a mask."""
        return jax.tree.map(lambda _: self.sharding.spec(("batch", "length")), mask)

    def shift(self, tree: Any, *, by: int = 1) -> Any:
        """Return the arrays of the device that is `by` places before this one in the ring."""
        to = [(i + by) % self.num_devices for i in range(self.num_devices)]
        return jax.tree.map(lambda x: self._send(x, to), tree)

    def _send(self, x: jax.Array, to: Sequence[int]) -> jax.Array:
        """Send the array of each device i to the device `to[i]`, both in the order of shards."""
        # `ppermute` numbers devices in the order of the mesh, whatever the order of its axes.
        assert self.sharding.mesh is not None
        sizes = self.sharding.mesh.shape
        in_mesh_order = [axis for axis in sizes if axis in self.axes]
        devices = np.arange(self.num_devices).reshape([sizes[axis] for axis in in_mesh_order])
        numbers = devices.transpose([in_mesh_order.index(axis) for axis in self.axes]).ravel()
        pairs = [(int(numbers[i]), int(numbers[j])) for i, j in enumerate(to)]
        return jax.lax.ppermute(x, tuple(in_mesh_order), pairs)

    def shard_map(self, f: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Any:
        """Map `f` over the rows, heads and shard of the length of each device."""
        mesh = self.sharding.mesh
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def split(self, tree: Any) -> Any:
        """Turn shards `[batch, length, …]` into the chunks `[chunk, batch, length, …]` to compute.

        With zigzag, those are chunks of other devices.
        """
        return jax.tree.map(self._split, tree)

    def join(self, tree: Any) -> Any:
        """Invert `split`."""
        return jax.tree.map(self._join, tree)

    def _split(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], self.num_chunks, -1, *x.shape[2:])
        x = jnp.moveaxis(x, 1, 0)
        if not self.is_zigzag:
            return x
        even, odd = (self._exchange(x[parity], parity) for parity in (0, 1))
        return self._swap_on_odd_devices(jnp.stack([even, odd]))

    def _join(self, x: jax.Array) -> jax.Array:
        if self.is_zigzag:
            x = self._swap_on_odd_devices(x)
            x = jnp.stack([self._exchange(x[parity], parity, back=True) for parity in (0, 1)])
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def _exchange(self, x: jax.Array, parity: int, *, back: bool = False) -> jax.Array:
        """Send the even or odd chunk of each device, 2i or 2i + 1, to the device that computes it.

        Each device computes one even and one odd chunk.
        """
        count = self.num_devices
        chunks = np.arange(parity, 2 * count, 2)
        to = np.minimum(chunks, 2 * count - 1 - chunks)
        return self._send(x, (np.argsort(to) if back else to).tolist())

    def _swap_on_odd_devices(self, x: jax.Array) -> jax.Array:
        # The first chunk of device i is chunk i.
        return jnp.where(jax.lax.axis_index(self.axes) % 2 == 1, x[::-1], x)

    def products(self, step: Any) -> Iterator[tuple[Any, Any, bool]]:
        """Yield (chunk of queries, chunk of keys, whether both are the same tokens).

        Args:
          step: Number of places that the keys were passed on. The number 0 is static.
        """
        if not self.is_zigzag:
            yield 0, 0, isinstance(step, int)
        elif isinstance(step, int):
            yield from ((0, 0, True), (1, 0, False), (1, 1, True))
        else:
            # The second chunk of each device is later than the first chunks of all. The keys of
            # earlier devices are earlier in the first chunk, those of later devices in the second.
            yield 1, 0, False
            which = jnp.where(step <= jax.lax.axis_index(self.axes), 0, 1)
            yield which, which, False

    def part_mask(
        self, mask: AttentionMask, key_arrays: dict[str, Any], product: tuple[Any, Any, bool]
    ) -> AttentionMask:
        """Return the mask of one of the `products`."""
        i, j, is_diagonal = product
        arrays = {name: array[j] for name, array in key_arrays.items()}
        arrays |= {name: array[i] for name, array in mask.query_arrays().items()}
        return dataclasses.replace(
            mask,
            causal=mask.causal and (is_diagonal or not self.is_zigzag),
            in_row_order=mask.in_row_order and is_diagonal,
            **arrays,
        )


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: AttentionMask | None,
    attention: PartAttention,
    sharding: BoundSharding,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Compute attention by passing keys and values around the devices that share a row.

    The output `[batch, queries, heads, value_dim]` is 0 for a query that sees no key. The rule of
    `length` names the mesh axes of the ring. See `dot_product_attention`.

    Raises:
      ConfigError: Queries or keys cannot be split evenly, or heads and kv_heads are split over
        different mesh axes.
    """
    check_split(query, key, sharding)
    sharding.spec(("length",), shape=key.shape[1:2], owner="keys")
    batch, count = query.shape[0], sharding.num_shards("length")
    if mask is None:
        queries, keys = (row_positions(batch, x.shape[1]) for x in (query, key))
        mask = AttentionMask(queries, keys)
    mask = jax.tree.map(lambda array: jnp.broadcast_to(array, (batch, *array.shape[1:])), mask)
    assert mask is not None
    in_row_order = mask.in_row_order and query.shape[1] == key.shape[1]
    mask = dataclasses.replace(mask, in_row_order=in_row_order)
    num_steps, is_zigzag = _schedule(mask, key.shape[1] // count, count)
    ring = _Ring(
        sharding=sharding,
        attention=attention,
        has_one_kv_head=key.shape[2] == 1,
        num_devices=count,
        num_steps=num_steps,
        is_zigzag=is_zigzag,
    )
    # The count of model FLOPs halves the products in the causal scope.
    with jax.named_scope("causal_attention" if mask.causal and not is_zigzag else "attention"):
        sinks = None if sinks is None else sinks.astype(jnp.float32)
        return _ring(ring, query, key, value, sinks, mask)


def _schedule(mask: AttentionMask, shard: int, count: int) -> tuple[int, bool]:
    """Return (number of parts of the keys that each device attends, whether chunks are zigzag)."""
    if not (mask.in_row_order and mask.causal) or mask.reads_ahead:
        return count, False
    num_steps = count
    if mask.window is not None:
        num_steps = min(count, 1 + -(-(mask.window - 1) // shard))
    is_zigzag = shard % 2 == 0 and num_steps > count // 2
    return (count, True) if is_zigzag else (num_steps, False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: Any) -> jax.Array:
    return _ring_forward(ring, query, key, value, sinks, mask)[0]


def _ring_forward(
    ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: Any
) -> tuple[jax.Array, Any]:
    forward = ring.shard_map(
        functools.partial(_forward_shard, ring),
        in_specs=(
            ring.queries,
            ring.keys,
            ring.keys,
            None if sinks is None else ring.sharding.spec(("act_heads",)),
            ring.mask_specs(mask),
        ),
        out_specs=(ring.queries, ring.per_query),
    )
    read, log_sum = forward(query, key, value, sinks, mask)
    return read, (query, key, value, sinks, mask, read, log_sum)


def _ring_backward(ring: _Ring, residuals: Any, read_gradient: jax.Array) -> Any:
    query, key, value, sinks, mask, read, log_sum = residuals
    # The softmax subtracts this number from each of a query's gradients.
    common = (read.astype(jnp.float32) * read_gradient.astype(jnp.float32)).sum(axis=-1)
    backward = ring.shard_map(
        functools.partial(_backward_shard, ring),
        in_specs=(
            ring.queries,
            ring.keys,
            ring.keys,
            ring.queries,
            ring.per_query,
            ring.per_query,
            ring.mask_specs(mask),
        ),
        out_specs=(ring.queries, ring.keys, ring.keys),
    )
    gradients = backward(query, key, value, read_gradient, log_sum, common, mask)
    sinks_gradient = None
    if sinks is not None:
        sinks_gradient = -(jnp.exp(sinks - log_sum) * common).sum(axis=(0, 1))
    return *gradients, sinks_gradient, None


_ring.defvjp(_ring_forward, _ring_backward)


def _forward_shard(
    ring: _Ring, query: Any, key: Any, value: Any, sinks: Any, mask: AttentionMask
) -> tuple[jax.Array, jax.Array]:
    dtype = value.dtype
    query, key, value, mask = ring.split((query, key, value, mask))
    no_key = jnp.float32(MASKED_LOGIT) if sinks is None else sinks
    log_sum = jnp.broadcast_to(no_key, query.shape[:-1])
    read = jnp.zeros((*query.shape[:-1], value.shape[-1]), jnp.float32)

    def attend(state: Any, shard: Any, step: Any) -> Any:
        read, log_sum = state
        k, v, key_arrays = shard
        for product in ring.products(step):
            i, j, _ = product
            part = ring.part_mask(mask, key_arrays, product)
            part_read, part_sum = ring.attention.forward(query[i], k[j], v[j], part)
            total = jnp.logaddexp(log_sum[i], part_sum)
            old, new = (jnp.exp(x - total)[..., None] for x in (log_sum[i], part_sum))
            read = read.at[i].set(read[i] * old + part_read * new)
            log_sum = log_sum.at[i].set(total)
        return read, log_sum

    def attend_and_send(carry: Any, step: Any) -> Any:
        state, shard = carry
        return (attend(state, shard, step), ring.shift(shard)), None

    shard = key, value, mask.key_arrays()
    state = attend((read, log_sum), shard, 0)
    if ring.num_steps > 1:
        steps = jnp.arange(1, ring.num_steps)
        carry = state, ring.shift(shard)
        (state, shard), _ = jax.lax.scan(attend_and_send, carry, steps[:-1])
        state = attend(state, shard, steps[-1])
    read, log_sum = ring.join(state)
    return read.astype(dtype), log_sum


def _backward_shard(
    ring: _Ring,
    query: Any,
    key: Any,
    value: Any,
    read_gradient: Any,
    log_sum: Any,
    common: Any,
    mask: AttentionMask,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dtypes = [x.dtype for x in (query, key, value)]
    per_query = query, read_gradient, log_sum, common
    (query, read_gradient, log_sum, common), key, value, mask = ring.split(
        (per_query, key, value, mask)
    )

    def attend(query_total: Any, shard: Any, totals: Any, step: Any) -> Any:
        k, v, key_arrays = shard
        key_total, value_total = totals
        for product in ring.products(step):
            i, j, _ = product
            part = ring.part_mask(mask, key_arrays, product)
            query_gain, key_gain, value_gain = ring.attention.gradients(
                query[i], k[j], v[j], read_gradient[i], log_sum[i], common[i], part
            )
            query_total = query_total.at[i].add(query_gain)
            key_total = key_total.at[j].add(key_gain)
            value_total = value_total.at[j].add(value_gain)
        return query_total, (key_total, value_total)

    def attend_and_send(carry: Any, step: Any) -> Any:
        query_total, shard, totals = carry
        query_total, totals = attend(query_total, shard, ring.shift(totals), step)
        return (query_total, ring.shift(shard), totals), None

    shard = key, value, mask.key_arrays()
    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (query, key, value)]
    query_total, totals = attend(zeros[0], shard, tuple(zeros[1:]), 0)
    if ring.num_steps > 1:
        steps = jnp.arange(1, ring.num_steps)
        carry = query_total, ring.shift(shard), totals
        (query_total, shard, totals), _ = jax.lax.scan(attend_and_send, carry, steps[:-1])
        query_total, totals = attend(query_total, shard, ring.shift(totals), steps[-1])
    # The sums were passed around with their keys; return them to the devices of these keys.
    totals = ring.shift(totals, by=1 - ring.num_steps)
    axes = ring.queries[2]
    if ring.has_one_kv_head and axes is not None:
        # Each device has some of the query heads that read the single key head.
        totals = jax.lax.psum(totals, axes)
    gradients = ring.join((query_total, *totals))
    query_gradient, key_gradient, value_gradient = (
        x.astype(dtype) for x, dtype in zip(gradients, dtypes, strict=True)
    )
    return query_gradient, key_gradient, value_gradient
