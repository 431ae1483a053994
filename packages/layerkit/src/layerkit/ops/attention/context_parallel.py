"""Attention over rows that are split over devices (context parallelism).

If the rule of `length` names a mesh axis, each device holds a shard of every row. Other layers work
on their shard alone; attention needs the keys of the other shards:

- `all_gather`: each device gathers all keys and values of its rows and keeps its queries (as in
  Llama 3; arXiv:2407.21783, section 3.3.2). All options of attention are supported. Memory for
  keys and values, and for logits unless a fused kernel runs, grows with the whole length.
- `ring`: keys and values are passed around a ring of devices, one shard at a time; see
  `layerkit.ops.attention.ring`. A device holds no more than two shards of keys and values.
- `ulysses`: devices exchange their shards of rows for shards of heads and back, by all-to-all
  (Jacobs et al., 2023, arXiv:2309.14509). Each device then holds whole rows of some heads, so that
  all options and backends are supported. The devices of a row must divide the heads of queries and
  of keys; a single key head is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from layerkit.base.sharding import BoundSharding
from layerkit.ops.attention.sharded_kernel import QUERY_AXES, find_split_problem, key_axes
from layerkit.ops.implementations import UnsupportedBackendError


def gather_keys(
    query: jax.Array, key: jax.Array, value: jax.Array, sharding: BoundSharding
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split queries `[batch, queries, …]` by the rules of length and heads, others by heads alone.

    Raises:
      ConfigError: The queries cannot be split evenly.
    """
    sharding.spec(("length",), shape=query.shape[1:2], owner="queries")
    whole = key_axes(key.shape[2])
    query = sharding.constrain(query, QUERY_AXES)
    return query, sharding.constrain(key, whole), sharding.constrain(value, whole)


def ulysses_attention(
    attend: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sharding: BoundSharding,
) -> jax.Array:
    """Exchange shards of rows for shards of heads, attend, and exchange the outputs back.

    `attend`, attention of whole rows, is called with query, key, value and their sharding. The
    result is `[batch, queries, heads, value_dim]`.

    Raises:
      UnsupportedBackendError: The devices do not divide the heads evenly.
    """
    rules = sharding.rules
    heads = {
        name: rules.mesh_axes(name) + rules.mesh_axes("length")
        for name in ("act_heads", "act_kv_heads")
    }
    whole_rows = BoundSharding(sharding.mesh, rules.replace(length=None, **heads))
    if find_split_problem(query, key, whole_rows):
        axes = whole_rows.spec(("act_heads",))[0]
        raise UnsupportedBackendError(
            "unsupported attention",
            field="context_parallel",
            value="ulysses",
            expected=(
                f"query and key heads that can be split over the mesh axes {axes!r} instead of"
                f" {query.shape[2]} and {key.shape[2]}"
            ),
            hint="Use context_parallel='all_gather' or 'ring'.",
        )
    exchange = functools.partial(_exchange, before=sharding, after=whole_rows)
    query = exchange(query, "act_heads")
    key, value = exchange(key, "act_kv_heads"), exchange(value, "act_kv_heads")
    read = attend(query, key, value, whole_rows)
    return _exchange(read, "act_heads", before=whole_rows, after=sharding)


def _exchange(
    x: jax.Array, heads: str, *, before: BoundSharding, after: BoundSharding
) -> jax.Array:
    """Exchange shards of the length and of the heads of `[batch, length, heads, dims]`."""
    axes = ("batch", "length", heads, None)
    if x.shape[1] == 1 or x.shape[2] == 1:
        # A single query or key head is on every device.
        return after.constrain(x, axes)
    split_axis, concat_axis, rows = (2, 1, before) if before.is_split("length") else (1, 2, after)
    exchange: Callable[[jax.Array], jax.Array] = functools.partial(
        jax.lax.all_to_all,
        axis_name=rows.spec(("length",))[0],
        split_axis=split_axis,
        concat_axis=concat_axis,
        tiled=True,
    )
    mapped = jax.shard_map(
        exchange,
        mesh=before.mesh,
        in_specs=before.spec(axes),
        out_specs=after.spec(axes),
        check_vma=False,
    )
    return mapped(x)
